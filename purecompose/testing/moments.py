"""The moments of a run at which an algorithm acts: the run's length and the starts that a case about it needs."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from purecompose.core.loop import loop_events
from purecompose.core.program import events_in
from purecompose.time import RunLength, Timestamp
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, Predicate


_LOOP = events_in(loop_events)
_LONGEST = 1024
"""Maximal length of a run in batches, unless a longer one is requested."""
_SHORT = 24
"""Number of batches up to which every start of a run is considered."""


class Moments(NamedTuple):
    """A run, and starts in it."""

    batches_per_epoch: int
    epochs: int
    acting: tuple[int, ...]
    """Batch counts before the steps in which the algorithm acts at the largest number of events."""
    near: tuple[int, ...]
    """All interesting batch counts: one batch before, at, and one after each change; in a short run, all."""


def find_moments(
    predicate: Predicate, *, batches_per_epoch: int, epochs: int, samples: int = 1, tokens: int = 0, room: int = 1
) -> Moments:
    """Return a run that is long enough for the predicate, and the starts of steps that act.

    Lengths are doubled until the algorithm acts at each event at which it may act, and at the first time early enough;
    a run has at most 1024 batches. A plain function is assumed to return True.

    Args:
        predicate: The predicate of an algorithm. INIT does not count, nor do events outside the loop if it acts within.
        batches_per_epoch: Minimal length of the epoch.
        epochs: Minimal length of the run in epochs.
        samples: Number of examples in a batch.
        tokens: Number of tokens in a batch.
        room: Number of batches that the run should have after a start at which it acts. An algorithm that acts only in
            the last batches of any run has no such start.

    Example:
        >>> from purecompose import after, on
        >>> found = find_moments(on("batch_start") & after("10ep"), batches_per_epoch=3, epochs=4)
        >>> found.epochs, found.near[-4:], found.acting
        (16, (29, 30, 31, 47), (30, 31, 47))
    """
    find = _find if _has_hash(predicate) else _find.__wrapped__
    return find(predicate, batches_per_epoch, max(epochs, -(-room // batches_per_epoch)), samples, tokens, room)


@functools.lru_cache(maxsize=4096)
def _find(predicate: Predicate, batches_per_epoch: int, epochs: int, samples: int, tokens: int, room: int) -> Moments:
    asked = _asked(predicate)
    runs: list[tuple[tuple[bool, bool], Moments]] = []
    for shape in _shapes(batches_per_epoch, epochs):
        acting = _acting(asked, *shape, samples, tokens)
        found = _moments(acting, *shape)
        is_complete = frozenset(asked) == frozenset().union(*acting)
        has_room = bool(found.acting) and found.acting[0] + room <= len(acting)
        runs.append(((is_complete, has_room or not asked), found))
        if all(runs[-1][0]):
            break
    return max(runs, key=lambda run: run[0])[1]  # the shortest of the best


def _asked(predicate: Predicate) -> dict[Event, Predicate]:
    """Return the predicate at each event of the loop or, if it never acts there, at the events outside."""
    left = {event: predicate.at(event) for event in Event if event is not Event.INIT}
    left = {event: asked for event, asked in left.items() if asked != NEVER}
    return {event: asked for event, asked in left.items() if event in _LOOP} or left


def _shapes(batches_per_epoch: int, epochs: int) -> Iterator[tuple[int, int]]:
    """Yield runs with longer epochs and with more epochs, doubling each time."""
    yield batches_per_epoch, epochs
    factor = 2
    while factor * batches_per_epoch * epochs <= _LONGEST:
        yield batches_per_epoch, factor * epochs
        yield factor * batches_per_epoch, epochs
        factor *= 2


def _acting(
    asked: dict[Event, Predicate], batches_per_epoch: int, epochs: int, samples: int, tokens: int
) -> list[frozenset[Event]]:
    """Return the events at which each step of a run acts."""
    now, found = Timestamp(run=RunLength(f"{epochs}ep", batches_per_epoch)), []
    for _ in range(batches_per_epoch * epochs):
        later = now.advance(samples, tokens)
        times = {event: later if event.sees_new_time else now for event in asked}
        found.append(frozenset(event for event, one in asked.items() if _answer(one, event, times[event])))
        now = later
    return found


def _answer(asked: Predicate, event: Event, now: Timestamp) -> bool:
    left, _ = asked.during(now)
    return not left.is_timed or left(event, _Moment(now))


class _Moment(NamedTuple):
    """The part of a state that a predicate about time reads."""

    timestamp: Timestamp


def _moments(acting: list[frozenset[Event]], batches_per_epoch: int, epochs: int) -> Moments:
    total = len(acting)
    changes = [start for start in range(1, total) if acting[start] != acting[start - 1]]
    near = {0, total - 1, *(change + offset for change in changes for offset in (-1, 0, 1))}
    starts = tuple(range(total)) if total <= _SHORT else tuple(sorted(near & set(range(total))))
    most = max(len(acting[start]) for start in starts)
    return Moments(
        batches_per_epoch, epochs, tuple(start for start in starts if len(acting[start]) == most > 0), starts
    )


def _has_hash(value: Any) -> bool:
    """Return whether a predicate can be hashed; one from a plain function may contain an unhashable object."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
