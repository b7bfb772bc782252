"""Every shipped algorithm keeps every law; `tests.shipped` has the table."""

import functools

import pytest
import torch

from purecompose.testing import LAWS, Status
from purecompose.testing.checking import Trials
from tests.shipped import SHIPPED
from tests.shipped_examples import examples


each_example = pytest.mark.parametrize(("row", "source"), examples())
each_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)


@functools.cache  # the accepted tasks of an algorithm are determined once, not for each law
def trials_of(row, source, max_examples, seed):
    return Trials(source, neutral=row.neutral, tasks=row.accepted, max_examples=max_examples, seed=seed)


def check_kept(law, prepared):
    assert not prepared.failed_tasks, prepared.refused
    outcome = prepared.judge(law)
    assert outcome.status in (Status.KEPT, Status.SKIPPED), f"{outcome.reason}\n{outcome.details}"


@pytest.mark.parametrize(
    ("row", "source", "law"),
    [
        # One law in 24 of each method, and one method in 24 of each law; all of them in the slow tests.
        pytest.param(row, source, law, marks=[] if is_quick else pytest.mark.slow, id=f"{law.name}-{source}")
        for number, row in enumerate(SHIPPED.values())
        for source in row.examples
        for place, law in enumerate(LAWS)
        for is_quick in [source == row.examples[0] and (number + place) % 24 == 0]
    ],
)
def test_a_shipped_algorithm_keeps_a_law(row, source, law):
    if torch.__version__ < "2.12" and source == "alternating_flip()" and law.name == "vmap_agrees":
        pytest.skip("torch 2.11 cannot read bits under vmap")
    check_kept(law, trials_of(row, source, max_examples=1, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize(("max_examples", "seed"), [(25, 0), (100, 1)], ids=["as by default", "more"])
@each_example
@each_law
def test_a_shipped_algorithm_keeps_a_law_in_many_cases(row, source, law, max_examples, seed):
    check_kept(law, trials_of(row, source, max_examples, seed))
