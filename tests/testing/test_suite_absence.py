"""The laws of absence: their reports, and that they ignore algorithms they do not concern."""

import dataclasses

import pytest
import torch
from torch import nn

from purecompose import algorithms as alg
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.nn.model import from_module
from purecompose.testing.case import Case, bystander
from purecompose.testing.law import LawViolation
from purecompose.testing.suite.absence import absent_when_unmatched, draws_independent, neutral_setting
from purecompose.time.event import Event
from purecompose.time.predicates import between, on
from tests.testing.mutants.absence import forgets_everything, splits_the_key_at_init


CASE = Case(seed=3, batch_size=6, num_batches=2, microbatches=2, others=("noise", "shrink"), place=1)


def test_the_leaf_that_a_mutant_changed_is_named() -> None:
    with pytest.raises(LawViolation) as caught:
        draws_independent(splits_the_key_at_init(), CASE)
    assert (caught.value.event, caught.value.path) == (Event.INIT, "key")
    assert list(caught.value.values) == ["at the start", "afterwards"] and caught.value.values["at the start"] == 3


def test_witnesses_detect_changes_of_other_algorithms_slots() -> None:
    with pytest.raises(LawViolation, match="slots.'early_witness'"):
        draws_independent(forgets_everything(), CASE)


def test_an_algorithm_outside_its_period_is_absent_but_can_act() -> None:
    late = alg.selective_backprop(start=0.9, end=1.0, full_every=0)
    assert absent_when_unmatched(late, CASE)
    assert not draws_independent(bystander("late"), dataclasses.replace(CASE, num_batches=0))


@pytest.mark.parametrize("also_changes_lr", [False, True])
def test_after_surgery_the_rest_is_still_compared(also_changes_lr: bool) -> None:
    def widen(event: Event, state: State) -> State:
        if event is not Event.INIT:
            return state
        parts = from_module(nn.Linear(4, 3).requires_grad_(True))
        hparams = {"lr": torch.tensor(1.0)} if also_changes_lr else state.hparams
        opt_state = state.optimizer.init(parts.params)
        new = {"model": parts.model, "params": parts.params, "buffers": parts.buffers, "opt_state": opt_state}
        return state.replace(**new, hparams=hparams)

    surgery = Algorithm("widen", on(Event.INIT, Event.BATCH_END) & between(0.0, 1.0), widen)
    case = dataclasses.replace(CASE, others=("bystander",))
    if also_changes_lr:
        with pytest.raises(LawViolation, match="hparams"):
            absent_when_unmatched(surgery, case)
    else:
        assert absent_when_unmatched(surgery, case)


def test_own_metrics_and_slots_are_allowed_to_a_neutral_algorithm() -> None:
    assert neutral_setting(bystander("neutral"), CASE)
