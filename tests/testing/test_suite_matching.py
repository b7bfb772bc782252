"""The laws of matching: their reports, and what they allow."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from purecompose.core.algorithm import Algorithm, identity
from purecompose.core.context import SealedTimeError
from purecompose.errors import MatchError
from purecompose.testing.case import Case
from purecompose.testing.law import Law, LawViolation
from purecompose.testing.strategies import cases
from purecompose.testing.suite.matching import match_pure, time_from_clock
from purecompose.testing.tasks import TASKS
from purecompose.time.event import Event
from purecompose.time.predicates import ALWAYS, NEVER, Predicate, every, on
from tests.testing.mutants.matching import (
    matches_by_kept_loss,
    matches_by_key,
    matches_by_loss,
    reads_timestamp,
)
from tests.testing.mutants.mutant import Mutant


LAWS = [match_pure, time_from_clock]


def test_a_match_by_kept_losses_is_found_once_a_loss_rises() -> None:
    algorithm, found = matches_by_kept_loss(), 0
    for seed in range(6):
        try:
            match_pure(algorithm, Case(seed=seed, num_batches=3))
        except LawViolation as violation:
            found += 1
            assert (violation.event, violation.path) == (Event.BATCH_END, "match")
    assert found >= 2


@pytest.mark.parametrize(
    ("law", "wrong", "error"),
    [(match_pure, matches_by_loss, MatchError), (time_from_clock, reads_timestamp, SealedTimeError)],
    ids=["match", "apply"],
)
def test_reading_a_value_is_reported_by_the_librarys_errors(law: Law, wrong: Mutant, error: type[Exception]) -> None:
    with pytest.raises(LawViolation) as caught:
        law(wrong(), Case())
    assert isinstance(caught.value.__cause__, error)


def test_answers_are_shown_with_their_meaning() -> None:
    with pytest.raises(LawViolation) as caught:
        match_pure(matches_by_key(), Case(seed=4))
    assert caught.value.values == {"for one state": True, "for another seed's, of equal shapes": False}
    assert "the answer for the step after 0 batches" in str(caught.value)


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


@given(case=cases([TASKS["vectors"]]))
@settings(max_examples=4)
def test_time_by_schedule_predicates_and_clock_is_lawful(case: Case) -> None:
    def apply(event, state):
        factor = 1 - 0.01 * state.clock.elapsed.float()
        return state.replace(params={name: param * factor for name, param in state.params.items()})

    algorithm = Algorithm("lawful", on(Event.AFTER_TRAIN_BATCH, Event.BATCH_END) & every(2), apply)
    assert match_pure(algorithm, case) == (case.epochs * case.batches_per_epoch > 1)
    time_from_clock(algorithm, case)  # raises nothing; a case of one step may be between the times


def test_match_by_shapes_is_lawful() -> None:
    def match(event, state) -> bool:
        return event is Event.BATCH_START and state.inputs.shape[0] > 2

    algorithm = Algorithm("wide", match, lambda event, state: state)
    assert match_pure(algorithm, Case(batch_size=4)) is True
    assert match_pure(algorithm, Case(batch_size=2)) is False


def test_host_and_neutral_algorithms_are_exempt() -> None:
    host = Algorithm("host", on(Event.BATCH_END), lambda event, state: state, host=True)
    assert match_pure.exempt(host) is None and "host" in (time_from_clock.exempt(host) or "")
    assert all(law.exempt(identity()) is not None for law in LAWS)
    assert time_from_clock(Algorithm("idle", on(Event.EVAL_START), lambda event, state: state), Case()) is False
