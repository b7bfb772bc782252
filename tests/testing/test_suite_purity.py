"""The laws of purity and matching: their reports, what they allow, and that they do not change the process."""

import os
from dataclasses import dataclass

import pytest
import torch

from purecompose import tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Law, LawViolation
from purecompose.testing.process import process_settings
from purecompose.testing.suite.purity import deterministic, global_state_kept, input_untouched, match_pure
from purecompose.time.event import Event
from purecompose.time.predicates import ALWAYS, NEVER, Predicate, every, on
from tests.testing.mutants import purity as wrong
from tests.testing.mutants.mutant import Mutant


LAWS = [deterministic, global_state_kept, input_untouched]


def test_the_values_before_and_after_are_shown() -> None:
    def apply(event, state):
        state.params["3.bias"].data.fill_(2.5)
        return state

    with pytest.raises(LawViolation) as caught:
        input_untouched(Algorithm("filler", on(Event.BATCH_END), apply), Case())
    assert caught.value.path == "params['3.bias']"
    assert caught.value.values["after"] == 2.5 and caught.value.values["before"] != 2.5


CARELESS = [(deterministic, wrong.numpy_mixing), (global_state_kept, wrong.sets_default_dtype)]


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


@dataclass(frozen=True)
class _Forgetful(Predicate):
    """A predicate for every second batch that wrongly reports each stretch of batches as constant."""

    @property
    def is_timed(self) -> bool:
        return True

    def __call__(self, event, state) -> bool:
        return every(2)(event, state)

    def at(self, event) -> Predicate:
        return self if event is Event.BATCH_END else NEVER

    def during(self, timestamp) -> tuple[Predicate, float]:
        return (NEVER if timestamp.batch % 2 else ALWAYS), float("inf")


def test_a_predicate_that_is_wrong_about_the_batches_to_come_is_found() -> None:
    algorithm = Algorithm("forgetful", _Forgetful(), lambda event, state: state)
    with pytest.raises(LawViolation) as caught:
        match_pure(algorithm, Case(num_batches=2, batches_per_epoch=3))
    assert caught.value.event is Event.BATCH_END


def test_match_by_shapes_is_lawful() -> None:
    def match(event, state) -> bool:
        return event is Event.BATCH_START and state.inputs.shape[0] > 2

    algorithm = Algorithm("wide", match, lambda event, state: state)
    assert match_pure(algorithm, Case(batch_size=4)) is True
    assert match_pure(algorithm, Case(batch_size=2)) is False
