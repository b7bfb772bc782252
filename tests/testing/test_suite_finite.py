"""stays_finite: leaves that become NaN are named, and NaNs of the plain step are not the algorithm's fault."""

import dataclasses

import pytest
import torch

from purecompose import Algorithm, Event, State, algorithms as alg, on
from purecompose.testing import TASKS, Case, LawViolation, check
from purecompose.testing.suite.numbers import stays_finite


def decay_by(factor: float) -> Algorithm:
    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(params={name: factor * param for name, param in state.params.items()})

    return Algorithm("decay", on(Event.BATCH_END), apply)


def test_lawful_algorithms_stay_finite() -> None:
    assert stays_finite(decay_by(0.99), Case()) is True
    assert check(alg.mixup(0.2), laws=[stays_finite], max_examples=3).ok


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_leaf_that_becomes_nan_is_named_with_its_event(factor: float) -> None:
    with pytest.raises(LawViolation) as caught:
        stays_finite(decay_by(factor), Case())
    assert (caught.value.event, caught.value.path) == (Event.BATCH_END, "params['0.weight']")


def test_a_loss_that_is_not_finite_is_a_violation() -> None:
    def apply(event: Event, state: State) -> State:
        del event
        assert state.loss is not None
        return state.replace(loss=state.loss * torch.tensor(float("nan")))

    with pytest.raises(LawViolation, match="leaf +loss"):
        stays_finite(Algorithm("lossy", on(Event.BATCH_END), apply), Case())


def test_a_task_that_is_not_finite_by_itself_is_not_a_violation() -> None:
    plain = TASKS["vectors"]

    def batch(seed: int, size: int):
        inputs, targets = plain.make_batch(seed, size)
        return inputs * float("nan"), targets

    hopeless = dataclasses.replace(plain, name="hopeless", batch=batch)
    assert stays_finite(decay_by(0.99), Case(hopeless)) is True
