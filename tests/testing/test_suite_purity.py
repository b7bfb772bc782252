"""The laws of purity: what they find, where, and that shipped algorithms keep them."""

import random as python_random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from purecompose import tree
from purecompose.algorithm import Algorithm, identity
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.testing.case import Case
from purecompose.testing.law import Law, LawViolation
from purecompose.testing.mutants.mutant import Mutant
from purecompose.testing.mutants.purity import MUTANTS
from purecompose.testing.process import process_settings
from purecompose.testing.strategies import cases
from purecompose.testing.suite import purity
from purecompose.testing.suite.purity import deterministic, global_state_kept, input_untouched
from purecompose.testing.tasks import TASKS


LAWS = [deterministic, global_state_kept, input_untouched]
# By mutant: the event and the leaf of its first difference; None where no leaf is to blame.
FOUND = {
    "decays_in_place": (Event.BATCH_END, "params['0.weight']"),
    "clamps_through_data": (Event.BATCH_END, "params['0.weight']"),
    "noise_into_batch": (Event.AFTER_DATALOADER, "batch[0]"),
    "replaces_entry": (Event.AFTER_TRAIN_BATCH, "params['0.weight']"),
    "flips_gradients_in_place": (Event.AFTER_TRAIN_BATCH, "grads['0.weight']"),
    "torch_noise": (Event.AFTER_DATALOADER, ""),
    "python_coin": (Event.BATCH_END, "params['0.weight']"),
    "numpy_mixing": (Event.AFTER_DATALOADER, "batch[0]"),
    "counts_in_closure": (Event.BATCH_END, "params['0.weight']"),
    "caches_statistics": (Event.AFTER_DATALOADER, "batch[0]"),
    "mixes_with_last_batch": (Event.AFTER_DATALOADER, "batch[0]"),
    "module_global": (Event.BATCH_END, "params['0.weight']"),
    "seeds_in_apply": (Event.BATCH_END, "the process's ['torch generator']"),
    "seeds_python_in_apply": (Event.INIT, "the process's ['random generator']"),
    "sets_default_dtype": (Event.AFTER_TRAIN_BATCH, "the process's ['default dtype']"),
    "leaves_grad_mode": (Event.BATCH_END, "the process's ['grad mode']"),
    "switches_grad_off": (Event.BEFORE_FORWARD, "the process's ['grad mode']"),
}


@pytest.mark.parametrize("law", LAWS, ids=repr)
@settings(max_examples=4)
@given(data=st.data())
def test_shipped_algorithms_keep_the_law(law: Law, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["mixup(0.2)", "label_smoothing(0.1)", "selective_backprop(0, 1.0, 0.5)"]))
    tasks = [task for task in TASKS.values() if not (text.startswith("mixup") and task.name == "tokens")]
    assert law(text, data.draw(cases(tasks)))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@settings(max_examples=3)
@given(data=st.data())
def test_a_mutant_breaks_its_law(mutant: Mutant, data: st.DataObject) -> None:
    law: Law = getattr(purity, mutant.breaks)
    before = process_settings() | {"torch generator": 0, "random generator": 0, "NumPy generator": 0}
    with pytest.raises(LawViolation) as caught:
        law(mutant.make(), data.draw(cases([TASKS[mutant.task]])))
    after = process_settings() | {"torch generator": 0, "random generator": 0, "NumPy generator": 0}
    assert tree.equal(before, after)
    violation = caught.value
    assert (violation.event, violation.path) == FOUND[mutant.name]
    text = str(violation)
    assert text.startswith(f"the law {mutant.breaks} is broken: ") and mutant.name in text and law.remedy in text


def test_every_mutant_names_a_law_of_the_file() -> None:
    assert {mutant.breaks for mutant in MUTANTS} == {law.name for law in LAWS}
    assert {mutant.name for mutant in MUTANTS} == FOUND.keys()


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_what_never_acts_is_exempt_and_what_does_not_act_is_no_evidence(law: Law) -> None:
    assert law.exempt(identity()) is not None
    assert law.exempt(Algorithm("idle", on(Event.FIT_END), lambda event, state: state)) is None
    assert law(Algorithm("idle", on(Event.FIT_END), lambda event, state: state), Case()) is False


def test_the_values_before_and_after_are_shown() -> None:
    def apply(event, state):
        state.params["3.bias"].data.fill_(2.5)
        return state

    with pytest.raises(LawViolation) as caught:
        input_untouched(Algorithm("filler", on(Event.BATCH_END), apply), Case())
    assert caught.value.path == "params['3.bias']"
    assert caught.value.values["after"] == 2.5 and caught.value.values["before"] != 2.5


def test_generators_are_left_where_they_were() -> None:
    torch_before, python_before = torch.get_rng_state(), python_random.getstate()
    for mutant in MUTANTS:
        if mutant.name in ("python_coin", "seeds_in_apply", "seeds_python_in_apply"):
            with pytest.raises(LawViolation):
                getattr(purity, mutant.breaks)(mutant.make(), Case())
    assert torch.equal(torch_before, torch.get_rng_state()) and python_before == python_random.getstate()
