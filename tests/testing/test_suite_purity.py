"""The laws of purity: their reports, and that they do not change the process."""

import os

import pytest
import torch

from purecompose import tree
from purecompose.core.algorithm import Algorithm, identity
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Law, LawViolation
from purecompose.testing.process import process_settings
from purecompose.testing.suite.purity import deterministic, global_state_kept, input_untouched
from purecompose.time.event import Event
from purecompose.time.predicates import on
from tests.testing.mutants import purity as wrong
from tests.testing.mutants.mutant import Mutant


LAWS = [deterministic, global_state_kept, input_untouched]


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_neutral_algorithms_are_exempt_and_inactive_ones_give_no_evidence(law: Law) -> None:
    assert law.exempt(identity()) is not None
    assert law.exempt(Algorithm("idle", on(Event.FIT_END), lambda event, state: state)) is None
    assert law(Algorithm("idle", on(Event.EVAL_START), lambda event, state: state), Case()) is False


def test_the_values_before_and_after_are_shown() -> None:
    def apply(event, state):
        state.params["3.bias"].data.fill_(2.5)
        return state

    with pytest.raises(LawViolation) as caught:
        input_untouched(Algorithm("filler", on(Event.BATCH_END), apply), Case())
    assert caught.value.path == "params['3.bias']"
    assert caught.value.values["after"] == 2.5 and caught.value.values["before"] != 2.5


CARELESS = [
    (deterministic, wrong.torch_noise),
    (deterministic, wrong.python_coin),
    (deterministic, wrong.numpy_mixing),
    (global_state_kept, wrong.seeds_in_apply),
    (global_state_kept, wrong.seeds_python_in_apply),
    (global_state_kept, wrong.sets_default_dtype),
    (global_state_kept, wrong.leaves_grad_mode),
    (global_state_kept, wrong.switches_grad_off),
]


@pytest.mark.parametrize(("law", "mutant"), CARELESS, ids=lambda value: value.name)
def test_the_process_is_not_changed(law: Law, mutant: Mutant) -> None:
    before = process_settings()
    with pytest.raises(LawViolation):
        law(mutant(), Case())
    assert tree.equal(before, process_settings())


def test_the_environment_is_reported_by_names_only_and_restored() -> None:
    def setting(event: Event, state: State) -> State:
        del event
        os.environ["A_NEW_VARIABLE"] = "a secret"
        return state

    def hooking(event: Event, state: State) -> State:
        del event
        torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
        return state

    before = process_settings()
    for apply, said in ((setting, "it was changed in A_NEW_VARIABLE"), (hooking, "a hook for every module")):
        with pytest.raises(LawViolation) as caught:
            global_state_kept(Algorithm("subject", on(Event.BATCH_END), apply), Case())
        text = str(caught.value)
        assert said in text and "secret" not in text and "PATH" not in text
    assert process_settings() == before
