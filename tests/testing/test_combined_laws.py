"""Methods made of methods keep every law, and the law about them holds for what they are made of."""

import functools

import pytest

from purecompose.testing import LAWS, Status
from purecompose.testing.checking import Trials


COMBINATIONS = (
    "sometimes(mixup(0.4), 0.5)",
    "sometimes(cutmix(1.0), 0.5, per_example=True)",
    "sometimes(label_smoothing(0.1), 0.7)",
    "sometimes(sam(0.5), 0.5)",
    "sometimes(ema('2ba'), 0.5)",
    "sometimes(gradient_clipping('norm', 0.1), 0.5)",
    "sometimes(cutout(), 0.5, host=True)",
    "one_of(mixup(0.4), cutmix(1.0))",
    "one_of(mixup(0.4), label_smoothing(0.1), weights=(1, 3))",
    "one_of(cutout(), cutmix(1.0), per_example=True)",
    "one_of(lookahead(every=1), ema('2ba'))",
    "chain(cutout(), mixup(0.4))",
    "one_of(chain(cutout(), cutmix(1.0)), randaugment(9, 1, ('rotate', 'equalize')))",
    "during(sometimes(mixup(0.4), 0.5), '1ba', '3ba')",
    "during(ema('2ba'), '1ba', '3ba')",
    "every(one_of(mixup(0.4), mixup(1.0, name='strong')), 2)",
)


@functools.cache
def trials_of(source, max_examples, seed):
    return Trials(source, neutral=None, tasks=None, max_examples=max_examples, seed=seed)


@pytest.mark.parametrize(
    ("source", "law"),
    [
        pytest.param(source, law, marks=[] if (i + j) % 9 == 0 else pytest.mark.slow, id=f"{law.name}-{source}")
        for i, source in enumerate(COMBINATIONS)
        for j, law in enumerate(LAWS)
    ],
)
def test_a_combination_keeps_a_law(source, law):
    outcome = trials_of(source, 1, 0).judge(law)
    assert outcome.status in (Status.KEPT, Status.SKIPPED), f"{outcome.reason}\n{outcome.details}"
