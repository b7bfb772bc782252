"""The laws of the contract: what they find, where, and that shipped algorithms keep them."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from purecompose.algorithm import Algorithm, identity
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.schedule import hparam
from purecompose.testing.case import Case
from purecompose.testing.companions import bystander
from purecompose.testing.law import Law, LawViolation
from purecompose.testing.mutants.contract import MUTANTS
from purecompose.testing.mutants.mutant import Mutant
from purecompose.testing.strategies import cases
from purecompose.testing.suite import contract
from purecompose.testing.suite.contract import buffers_kept, init_once, own_slot, structure_kept
from purecompose.testing.tasks import TASKS


LAWS = [structure_kept, own_slot, buffers_kept, init_once]
FOUND = {
    "late_slot": (Event.AFTER_TRAIN_BATCH, "slots['late_slot']"),
    "widens_params": (Event.BATCH_END, "params['0.weight']"),
    "wraps_params": (Event.BATCH_END, "params['0.weight']"),
    "drops_buffers": (Event.BATCH_END, "buffers['1.num_batches_tracked']"),
    "averages_counters": (Event.BATCH_END, "buffers['1.num_batches_tracked']"),
    "momentum_of_shape_one": (Event.AFTER_TRAIN_BATCH, "slots['momentum_of_shape_one']"),
    "slot_at_epoch_end": (Event.EPOCH_END, "slots['slot_at_epoch_end']['0.weight']"),
    "freezes_by_context": (Event.BATCH_START, "context.frozen"),
    "decays_all_slots": (Event.AFTER_TRAIN_BATCH, "slots['companion.bystander']['draws']"),
    "replaces_slots": (None, "slots['companion.bystander']['draws']"),
    "fixed_slot_name": (Event.INIT, "slots['average']['0.weight']"),
    "splits_key": (Event.AFTER_DATALOADER, "key"),
    "halves_learning_rate": (Event.BATCH_START, "hparams['lr']"),
    "second_forward": (Event.AFTER_DATALOADER, "buffers['1.running_mean']"),
    "resets_statistics": (Event.AFTER_TRAIN_BATCH, "buffers['1.running_mean']"),
    "statistics_in_place": (Event.AFTER_TRAIN_BATCH, "buffers['1.running_mean']"),
    "rescales_at_init": (Event.INIT, "params['0.weight']"),
    "slot_by_position": (Event.INIT, "slots['slot_by_position']"),
    "counts_inits": (Event.INIT, "slots['counts_inits']"),
}


@pytest.mark.parametrize("law", LAWS, ids=repr)
@settings(max_examples=4)
@given(data=st.data())
def test_shipped_algorithms_keep_the_law(law: Law, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["mixup(0.2)", "label_smoothing(0.1)", "selective_backprop(0, 1.0, 0.5)"]))
    tasks = [task for task in TASKS.values() if not (text.startswith("mixup") and task.name == "tokens")]
    case = data.draw(cases([TASKS["images"]] if law is buffers_kept else tasks))
    assert law(text, case)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@settings(max_examples=3)
@given(data=st.data())
def test_a_mutant_breaks_its_law(mutant: Mutant, data: st.DataObject) -> None:
    law: Law = getattr(contract, mutant.breaks)
    case = data.draw(cases([TASKS[mutant.task]]))
    if mutant.name == "wraps_params" and "shrink" in case.others[case.place :]:
        return  # what comes after it multiplies the weights, without a graph, and so takes the mark off
    with pytest.raises(LawViolation) as caught:
        law(mutant.make(), case)
    violation = caught.value
    event, path = FOUND[mutant.name]
    assert violation.path == path and violation.event is (event or violation.event)
    assert violation.__cause__ is None  # found by comparing, not by the step's own watch
    text = str(violation)
    assert text.startswith(f"the law {mutant.breaks} is broken: ") and mutant.name in text and law.remedy in text


def test_every_mutant_names_a_law_of_the_file() -> None:
    assert {mutant.breaks for mutant in MUTANTS} == {law.name for law in LAWS}
    assert {mutant.name for mutant in MUTANTS} == FOUND.keys()


def test_forms_are_shown_before_and_after() -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "widens_params")
    with pytest.raises(LawViolation) as caught:
        structure_kept(mutant.make(), Case())
    assert caught.value.values == {"before": "float32 (6, 4) on cpu", "after": "float64 (6, 4) on cpu"}
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "late_slot")
    with pytest.raises(LawViolation, match=r"slots\['late_slot'\](.|\n)*only after"):
        structure_kept(mutant.make(), Case())


def test_a_slot_may_have_a_temporary_part_within_the_step() -> None:
    def apply(event, state):
        if event is Event.INIT:
            return state.replace(slots={**state.slots, "passing": {}})
        slot = {"inputs": state.inputs} if event is Event.AFTER_DATALOADER else {}
        return state.replace(slots={**state.slots, "passing": slot})

    events = on(Event.INIT, Event.AFTER_DATALOADER, Event.BATCH_END)
    assert structure_kept(Algorithm("passing", events, apply), Case(num_batches=2))


def test_the_loss_keeps_its_form() -> None:
    def apply(event, state):
        del event
        return state.replace(loss=state.loss.double())

    with pytest.raises(LawViolation) as caught:
        structure_kept(Algorithm("wide_loss", on(Event.AFTER_TRAIN_BATCH), apply), Case())
    assert (caught.value.path, caught.value.event) == ("loss", Event.AFTER_TRAIN_BATCH)


def test_an_hparam_that_it_names_is_its_own() -> None:
    def apply(event, state):
        del event
        return state.replace(hparams={**state.hparams, "lr": state.hparams["lr"] * 0.5})

    def make(**config):
        return Algorithm("decay", on(Event.BATCH_END), apply, config=config)

    assert own_slot(make(rate=hparam("lr", 0.1)), Case())
    with pytest.raises(LawViolation, match="hparams"):
        own_slot(make(), Case())


def test_the_companion_itself_keeps_the_laws() -> None:
    case = Case(task=TASKS["images"], others=("noise",), num_batches=2)
    assert all([law(bystander(), case) for law in LAWS])


def test_what_gives_no_evidence() -> None:
    idle = Algorithm("idle", on(Event.EVAL_BATCH_START), lambda event, state: state)
    assert [law(idle, Case()) for law in (structure_kept, own_slot, buffers_kept)] == [False] * 3
    shrinks = Algorithm("nothing", on(Event.BATCH_END), lambda event, state: state)
    assert buffers_kept(shrinks, Case(task=TASKS["vectors"])) is False  # the network has no buffers
    assert buffers_kept(shrinks, Case(task=TASKS["images"])) is True
    assert init_once.exempt(shrinks) == "it does not act at INIT"
    assert all(law.exempt(identity()) is not None for law in LAWS)


def test_surgery_may_change_weights_at_init() -> None:
    wider = TASKS["vectors"].make_state(0)
    other = TASKS["images"].make_state(0)

    def apply(event, state):
        del event
        changes = {name: getattr(other, name) for name in ("params", "buffers", "opt_state", "model")}
        return state.replace(**changes)

    assert wider.model != other.model and torch.is_tensor(wider.key)
    assert init_once(Algorithm("surgery", on(Event.INIT), apply), Case())
