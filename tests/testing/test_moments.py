"""Search for the times at which algorithms act, against a step-by-step search with whole matchers."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

import purecompose as pc
from purecompose import Event, after, algorithms as alg, before, between, compose, every, loop_events, on
from purecompose.testing.case import Case
from purecompose.testing.moments import find_moments
from purecompose.testing.strategies import predicates
from purecompose.time import RunLength, Timestamp
from purecompose.time.predicates import ALWAYS, NEVER, Predicate, epoch_ends


EVENTS = compose(loop_events).events
LOADED = on(Event.AFTER_DATALOADER)


def acting_at(predicate, now):
    """Return the events at which a step that begins at `now` acts, by evaluating only the predicate."""
    later = now.advance(1)
    return {e for e in EVENTS if predicate(e, at(later if e is Event.BATCH_END else now))}


def walk(run, num_batches):
    """Yield the points in time of a run, from batch to batch."""
    points = [Timestamp(run=run)]
    while len(points) < num_batches:
        points.append(points[-1].advance(1))
    return points


def at(timestamp):
    return type("Moment", (), {"timestamp": timestamp})


@settings(max_examples=60)
@given(predicates(), st.integers(1, 3), st.integers(1, 4))
def test_starts_equal_those_of_a_search_batch_by_batch(predicate, batches_per_epoch, epochs):
    found = find_moments(predicate, batches_per_epoch=batches_per_epoch, epochs=epochs)
    assert found.batches_per_epoch >= batches_per_epoch and found.epochs >= epochs
    run = RunLength(f"{found.epochs}ep", found.batches_per_epoch)
    total = found.epochs * found.batches_per_epoch
    counts = [len(acting_at(predicate, now)) for now in walk(run, total)]
    best = max(counts)
    assert set(found.acting) == {start for start in found.near if counts[start] == best > 0}
    changes = [start for start in range(1, total) if counts[start] != counts[start - 1]]
    assert {start for change in changes for start in (change - 1, change)} <= set(found.near)
    assert bool(found.acting) == bool(best)


@pytest.mark.parametrize(
    ("predicate", "first", "least_epochs"),
    [
        (LOADED & after("1000ba"), 1000, 1),
        (LOADED & between("10ep", "12ep"), 10, 12),
        (LOADED & every("3ep"), 2, 4),
        (on(Event.BATCH_END) & every(7), 6, 1),
        (on(Event.BATCH_END) & after("20ba"), 19, 1),
        (LOADED & epoch_ends(), 0, 1),
        (LOADED & between("10ep", "12ep") & every("3ep"), 11, 13),
        (LOADED & after("30ep") & before("0.1dur"), 30, 300),
        (LOADED & every(50, in_epoch=True), 49, 1),
        (LOADED & after("64sp"), 64, 1),
        (on(Event.BATCH_START) | (LOADED & after("90000ba")), 90000, 1),
    ],
    ids=repr,
)
def test_the_run_is_long_enough(predicate, first, least_epochs):
    found = find_moments(predicate, batches_per_epoch=1, epochs=1)
    run = RunLength(f"{found.epochs}ep", found.batches_per_epoch)
    assert found.epochs >= least_epochs
    assert found.acting[0] == first
    assert acting_at(predicate, Timestamp(run=run).advance_by(first, 1)) == {
        event for event in EVENTS if predicate.at(event) != NEVER
    }
    assert {first - 1, first} - {-1} <= set(found.near)


def test_samples_and_tokens_are_counted_by_batches():
    assert find_moments(LOADED & after("64sp"), batches_per_epoch=2, epochs=1, samples=4).acting[0] == 16
    found = find_moments(LOADED & after("64tok"), batches_per_epoch=2, epochs=1, samples=4, tokens=20)
    assert found.acting[0] == 4
    # Batches of vectors have no tokens, so the run stays short.
    found = find_moments(LOADED & after("64tok"), batches_per_epoch=2, epochs=1, samples=4)
    assert (found.batches_per_epoch, found.epochs, found.acting) == (2, 1, ())


@pytest.mark.parametrize("predicate", [LOADED & after("5iter"), LOADED & between(0.5, 0.5), NEVER, after("9999999ba")])
def test_a_time_that_never_comes_does_not_change_the_run(predicate):
    found = find_moments(predicate, batches_per_epoch=2, epochs=2)
    assert found == (2, 2, (), (0, 1, 2, 3))


def test_outer_events_are_used_if_the_predicate_has_no_others():
    assert find_moments(on(Event.EPOCH_END) & after("5ba"), batches_per_epoch=2, epochs=2).acting[0] == 4
    assert find_moments(on(Event.EVAL_START), batches_per_epoch=2, epochs=2).acting == (0, 1, 2, 3)
    assert find_moments(on(Event.INIT), batches_per_epoch=2, epochs=2).acting == ()


class Unhashable:
    __hash__ = None  # pyright: ignore

    def __call__(self, event, state):
        raise AssertionError("a plain function is not asked")


@pytest.mark.parametrize("function", [Unhashable(), lambda event, state: Unhashable()(event, state)])
def test_plain_functions_are_never_called_and_every_start_is_allowed(function):
    algorithm = pc.Algorithm("custom", function, lambda event, state: state)
    assert find_moments(algorithm.predicate, batches_per_epoch=2, epochs=2).acting == (0, 1, 2, 3)
    late = algorithm.predicate & LOADED & after("20ep")
    found = find_moments(late, batches_per_epoch=2, epochs=2)
    assert (found.epochs, found.acting[0]) == (21, 40)


def test_a_window_given_as_a_fraction_does_not_prolong_the_run():
    predicate = alg.selective_backprop(start=0.5, end=0.9, full_every=0).predicate
    found = find_moments(predicate, batches_per_epoch=10, epochs=10)
    assert (found.batches_per_epoch, found.epochs) == (10, 10)
    assert found.near == (0, 1, 49, 50, 51, 89, 90, 91, 99)
    assert found.acting == (50, 51, 89)


@dataclass(frozen=True)
class Counted(Predicate):
    """A wrapper of a predicate with a list of its evaluations."""

    inner: Predicate
    asked: list

    @property
    def is_timed(self):
        return self.inner.is_timed

    def __call__(self, event, state):
        self.asked.append(state.timestamp.batch)
        return self.inner(event, state)

    def at(self, event):
        left = self.inner.at(event)
        return left if left in (ALWAYS, NEVER) else Counted(left, self.asked)

    def during(self, timestamp):
        self.asked.append(timestamp.batch)
        return self.inner.during(timestamp)


@pytest.mark.parametrize(("time", "first", "most"), [(after("80000ba"), 80000, 100), (every("90ep"), 269, 2000)])
def test_a_far_start_is_found_with_few_evaluations(time, first, most):
    asked = []
    found = find_moments(Counted(LOADED & time, asked), batches_per_epoch=3, epochs=4)
    assert found.acting[0] == first
    assert 0 < len(asked) < most


def test_cases_reach_the_start_that_was_found():
    algorithm = pc.Algorithm("late", LOADED & after("1000ba"), lambda event, state: state)
    found = find_moments(algorithm.predicate, batches_per_epoch=3, epochs=2, samples=4)
    case = Case(start=found.acting[0], batches_per_epoch=found.batches_per_epoch, epochs=found.epochs)
    assert case.state().timestamp.batch == 1000
    assert "late" in str(case.step(algorithm).plan(case.state()))
