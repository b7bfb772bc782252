"""The laws of matching: what they find, and that shipped algorithms keep them."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from purecompose.algorithm import Algorithm, identity
from purecompose.context import SealedTimeError
from purecompose.event import Event
from purecompose.matching import MatchError
from purecompose.predicate import ALWAYS, NEVER, Predicate, every, on
from purecompose.testing.case import Case
from purecompose.testing.law import Law, LawViolation
from purecompose.testing.mutants.matching import MUTANTS
from purecompose.testing.mutants.mutant import Mutant
from purecompose.testing.strategies import cases
from purecompose.testing.suite import matching
from purecompose.testing.suite.matching import match_pure, time_from_clock
from purecompose.testing.tasks import TASKS


LAWS = [match_pure, time_from_clock]
FOUND = {
    "counts_matches": (Event.BATCH_END, "match"),
    "acts_once": (Event.BATCH_START, "match"),
    "matches_by_loss": (Event.AFTER_TRAIN_BATCH, ""),
    "matches_by_kept_loss": (Event.BATCH_END, "match"),
    "matches_by_key": (Event.BATCH_END, "match"),
    "matches_by_global_draw": (Event.BATCH_END, "the process's ['random generator']"),
    "host_match_writes": (Event.BATCH_END, "metrics"),
    "reads_timestamp": (Event.AFTER_TRAIN_BATCH, ""),
    "opens_the_seal": (Event.AFTER_TRAIN_BATCH, "params['0.weight']"),
    "time_by_match": (Event.BATCH_START, "params['0.weight']"),
    "warms_up_by_match": (Event.AFTER_TRAIN_BATCH, "grads['0.weight']"),
}


@pytest.mark.parametrize("law", LAWS, ids=repr)
@settings(max_examples=4)
@given(data=st.data())
def test_shipped_algorithms_keep_the_law(law: Law, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["mixup(0.2)", "label_smoothing(0.1)", "selective_backprop(0, 1.0, 0.5)"]))
    tasks = [task for task in TASKS.values() if not (text.startswith("mixup") and task.name == "tokens")]
    assert law(text, data.draw(cases(tasks)))


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name != "matches_by_kept_loss"], ids=lambda m: m.name)
@settings(max_examples=3)
@given(data=st.data())
def test_a_mutant_breaks_its_law(mutant: Mutant, data: st.DataObject) -> None:
    law: Law = getattr(matching, mutant.breaks)
    with pytest.raises(LawViolation) as caught:
        law(mutant.make(), data.draw(cases([TASKS[mutant.task]])))
    violation = caught.value
    assert (violation.event, violation.path) == FOUND[mutant.name]
    text = str(violation)
    assert text.startswith(f"the law {mutant.breaks} is broken: ") and mutant.name in text and law.remedy in text


def test_a_match_by_kept_losses_is_found_once_a_loss_rises() -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "matches_by_kept_loss")
    algorithm, found = mutant.make(), 0
    for seed in range(6):
        try:
            match_pure(algorithm, Case(seed=seed, num_batches=3))
        except LawViolation as violation:
            found += 1
            assert (violation.event, violation.path) == FOUND[mutant.name]
    assert found >= 2


def test_every_mutant_names_a_law_of_the_file() -> None:
    assert {mutant.breaks for mutant in MUTANTS} == {law.name for law in LAWS}
    assert {mutant.name for mutant in MUTANTS} == FOUND.keys()


def test_a_read_value_is_told_by_the_librarys_own_errors() -> None:
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    for law, name, error in [
        (match_pure, "matches_by_loss", MatchError),
        (time_from_clock, "reads_timestamp", SealedTimeError),
    ]:
        with pytest.raises(LawViolation) as caught:
            law(by_name[name].make(), Case())
        assert isinstance(caught.value.__cause__, error)


def test_answers_are_shown_with_what_they_are() -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "matches_by_key")
    with pytest.raises(LawViolation) as caught:
        match_pure(mutant.make(), Case(seed=4))
    assert caught.value.values == {"for one state": True, "for another seed's, of equal shapes": False}
    assert "the answer for the step after 0 batches" in str(caught.value)


@dataclass(frozen=True)
class _Forgetful(Predicate):
    """Every second batch; but it says of any stretch that nothing changes in it."""

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


@given(case=cases([TASKS["vectors"]]))
@settings(max_examples=4)
def test_time_by_schedule_predicates_and_clock_is_lawful(case: Case) -> None:
    def apply(event, state):
        factor = 1 - 0.01 * state.clock.elapsed.float()
        return state.replace(params={name: param * factor for name, param in state.params.items()})

    algorithm = Algorithm("lawful", on(Event.AFTER_TRAIN_BATCH, Event.BATCH_END) & every(2), apply)
    assert match_pure(algorithm, case) == (case.epochs * case.batches_per_epoch > 1)
    time_from_clock(algorithm, case)  # raises nothing; a case of one step may lie between the times


def test_match_by_shapes_is_lawful() -> None:
    def match(event, state) -> bool:
        return event is Event.BATCH_START and state.inputs.shape[0] > 2

    algorithm = Algorithm("wide", match, lambda event, state: state)
    assert match_pure(algorithm, Case(batch_size=4)) is True
    assert match_pure(algorithm, Case(batch_size=2)) is False


def test_who_is_exempt() -> None:
    host = Algorithm("host", on(Event.BATCH_END), lambda event, state: state, host=True)
    assert match_pure.exempt(host) is None and "host" in (time_from_clock.exempt(host) or "")
    assert all(law.exempt(identity()) is not None for law in LAWS)
    assert time_from_clock(Algorithm("idle", on(Event.FIT_END), lambda event, state: state), Case()) is False
