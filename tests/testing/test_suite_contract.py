"""The laws of the contract: their reports, and what they allow."""

import pytest
import torch

from purecompose.core.algorithm import Algorithm
from purecompose.schedule import hparam
from purecompose.testing.case import Case
from purecompose.testing.law import LawViolation
from purecompose.testing.suite.contract import init_once, own_slot, structure_kept
from purecompose.testing.tasks import TASKS
from purecompose.time.event import Event
from purecompose.time.predicates import on
from tests.testing.mutants.contract import decays_frozen, late_slot, widens_params


def test_shapes_are_shown_before_and_after() -> None:
    with pytest.raises(LawViolation, match=r"float32\[6, 4\](.|\n)*float64\[6, 4\]"):
        structure_kept(widens_params(), Case())
    with pytest.raises(LawViolation, match=r"slots\['late_slot'\] from absent"):
        structure_kept(late_slot(), Case())


def test_a_slot_may_have_a_temporary_part_within_the_step() -> None:
    def apply(event, state):
        if event is Event.INIT:
            return state.replace(slots={**state.slots, "passing": {}})
        slot = {"inputs": state.inputs} if event is Event.AFTER_DATALOADER else {}
        return state.replace(slots={**state.slots, "passing": slot})

    events = on(Event.INIT, Event.AFTER_DATALOADER, Event.BATCH_END)
    assert structure_kept(Algorithm("passing", events, apply), Case(num_batches=2))


def test_the_loss_keeps_its_shape_and_dtype() -> None:
    def apply(event, state):
        del event
        return state.replace(loss=state.loss.double())

    with pytest.raises(LawViolation) as caught:
        structure_kept(Algorithm("wide_loss", on(Event.AFTER_TRAIN_BATCH), apply), Case())
    assert (caught.value.path, caught.value.event) == ("loss", Event.AFTER_TRAIN_BATCH)


def test_an_algorithm_may_change_an_hparam_that_it_names() -> None:
    def apply(event, state):
        del event
        return state.replace(hparams={**state.hparams, "lr": state.hparams["lr"] * 0.5})

    def make(**config):
        return Algorithm("decay", on(Event.BATCH_END), apply, config=config)

    assert own_slot(make(rate=hparam("lr", 0.1)), Case())
    with pytest.raises(LawViolation, match="hparams"):
        own_slot(make(), Case())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(3))
def test_a_write_into_a_frozen_parameter_is_seen_in_every_case(task: str, seed: int) -> None:
    with pytest.raises(LawViolation, match=r"the law own_slot(.|\n)*leaf +params\["):
        own_slot(decays_frozen(), Case(TASKS[task], seed=seed))


def test_surgery_may_change_weights_at_init() -> None:
    wider = TASKS["vectors"].make_state(0)
    other = TASKS["images"].make_state(0)

    def apply(event, state):
        del event
        changes = {name: getattr(other, name) for name in ("params", "buffers", "opt_state", "model")}
        return state.replace(**changes)

    assert wider.model != other.model and torch.is_tensor(wider.key)
    assert init_once(Algorithm("surgery", on(Event.INIT), apply), Case())
