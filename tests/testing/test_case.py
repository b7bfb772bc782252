"""Search for the times at which algorithms act."""

import pytest
from hypothesis import given, settings, strategies as st

import purecompose as pc
from purecompose import Event, after, algorithms as alg, before, between, compose, every, loop_events, on
from purecompose.testing.case import find_moments
from purecompose.time import RunLength, Timestamp
from purecompose.time.predicates import NEVER, epoch_ends
from tests.time.predicate_strategies import predicates


EVENTS = compose(loop_events).events
LOADED = on(Event.AFTER_DATALOADER)


def acting_at(predicate, now):
    """Return the events at which a step that begins at `now` acts."""
    times = {event: now.advance(1) if event is Event.BATCH_END else now for event in EVENTS}
    return {event for event in EVENTS if predicate(event, type("Moment", (), {"timestamp": times[event]}))}


@settings(max_examples=60)
@given(predicates(), st.integers(1, 3), st.integers(1, 4))
def test_starts_equal_those_of_a_search_batch_by_batch(predicate, batches_per_epoch, epochs):
    found = find_moments(predicate, batches_per_epoch=batches_per_epoch, epochs=epochs)
    assert found.batches_per_epoch >= batches_per_epoch and found.epochs >= epochs
    now, total = Timestamp(run=RunLength(f"{found.epochs}ep", found.batches_per_epoch)), found[0] * found[1]
    acting = [acting_at(predicate, now.advance_by(start, 1)) for start in range(total)]
    best = max(map(len, acting))
    assert set(found.acting) == {start for start in found.near if len(acting[start]) == best > 0}
    changes = [start for start in range(1, total) if acting[start] != acting[start - 1]]
    assert {start for change in changes for start in (change - 1, change)} <= set(found.near)
    assert bool(found.acting) == bool(best)


@pytest.mark.parametrize(
    ("predicate", "first"),
    [
        (LOADED & after("500ba"), 500),
        (LOADED & every("3ep"), 2),
        (on(Event.BATCH_END) & every(7), 6),
        (on(Event.BATCH_END) & after("20ba"), 19),
        (LOADED & epoch_ends(), 0),
        (LOADED & between("10ep", "12ep") & every("3ep"), 11),
        (LOADED & after("30ep") & before("0.1dur"), 30),
        (LOADED & every(50, in_epoch=True), 49),
        (LOADED & after("64sp"), 64),
        (on(Event.BATCH_START) | (LOADED & after("900ba")), 900),
        (on(Event.EPOCH_END) & after("5ba"), 4),
    ],
    ids=repr,
)
def test_the_run_is_long_enough(predicate, first):
    found = find_moments(predicate, batches_per_epoch=1, epochs=1)
    assert found.acting[0] == first


def test_samples_and_tokens_are_counted_by_batches():
    assert find_moments(LOADED & after("64sp"), batches_per_epoch=2, epochs=1, samples=4).acting[0] == 16
    assert find_moments(LOADED & after("64tok"), batches_per_epoch=2, epochs=1, samples=4, tokens=20).acting[0] == 4


@pytest.mark.parametrize("predicate", [LOADED & between(0.5, 0.5), NEVER, on(Event.INIT), LOADED & after("9999999ba")])
def test_a_time_that_never_comes_does_not_change_the_run(predicate):
    assert find_moments(predicate, batches_per_epoch=2, epochs=2) == (2, 2, (), (0, 1, 2, 3))


class Unhashable:
    __hash__ = None  # pyright: ignore

    def __call__(self, event, state):
        raise AssertionError("a plain function is not asked")


@pytest.mark.parametrize("function", [Unhashable(), lambda event, state: Unhashable()(event, state)])
def test_plain_functions_are_never_called_and_every_start_is_allowed(function):
    algorithm = pc.Algorithm("custom", function, lambda event, state: state)
    assert find_moments(algorithm.predicate, batches_per_epoch=2, epochs=2).acting == (0, 1, 2, 3)
    late = algorithm.predicate & LOADED & after("20ep")
    assert find_moments(late, batches_per_epoch=2, epochs=2).acting[0] == 40


def test_a_window_given_as_a_fraction_does_not_prolong_the_run():
    found = find_moments(
        alg.selective_backprop(start=0.5, end=0.9, full_every=0).predicate, batches_per_epoch=10, epochs=10
    )
    assert found == (10, 10, (50, 51, 89), (0, 49, 50, 51, 89, 90, 91, 99))
