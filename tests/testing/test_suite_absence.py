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
from purecompose.testing.suite.absence import absent_when_unmatched, draws_keyed, neutral_setting
from purecompose.testing.tasks import TASKS
from purecompose.time.event import Event
from purecompose.time.predicates import between, on


CASE = Case(seed=3, batch_size=6, num_batches=2, microbatches=2, others=("noise", "shrink"), place=1)


def test_an_algorithm_outside_its_period_is_absent_but_can_act() -> None:
    late = alg.selective_backprop(start=0.9, end=1.0, full_every=0)
    assert absent_when_unmatched(late, CASE)


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


def test_what_the_network_draws_again_is_not_the_algorithms() -> None:
    case = Case(task=TASKS["bf16_tokens"], seed=453, batch_size=2, batches_per_epoch=1, epochs=3, microbatches=3)
    assert not draws_keyed(alg.sam(0.5), case)
    assert draws_keyed(alg.sometimes(alg.sam(0.5), 0.5), case)
