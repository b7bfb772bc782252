"""The moments of a run at which an algorithm acts: the run's length and the starts that a case about it needs.

A predicate reports for how long its answer remains the same (`Predicate.during`), so that a run is searched in
intervals and not batch by batch. A plain function is assumed to return True.
"""

import bisect
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from purecompose.core.loop import loop_events
from purecompose.core.program import events_in
from purecompose.schedule import collect
from purecompose.time import RunLength, Time, Timestamp, TimeUnit
from purecompose.time.event import Event
from purecompose.time.predicates import ALWAYS, NEVER, Predicate


_LOOP = events_in(loop_events)
# Maximal length of a run in batches. Even in intervals, an algorithm that acts every 100th batch has too many changes.
_LONGEST = 100_000
# Maximal length in batches while a run is lengthened for conditions without a time, such as every(50, in_epoch=True).
_LONGEST_SEARCH = 1024
# Number of batches up to which every start of a run is considered.
_SHORT = 24


class Moments(NamedTuple):
    """A run, and starts in it."""

    batches_per_epoch: int
    epochs: int
    acting: tuple[int, ...]
    """Batch counts before the steps in which the algorithm acts at the largest number of events."""
    near: tuple[int, ...]
    """All interesting batch counts: one batch before, at, and one after each change; in a short run, all."""


class _Change(NamedTuple):
    start: int
    events: frozenset[Event]


def find_moments(
    predicate: Predicate, *, batches_per_epoch: int, epochs: int, samples: int = 1, tokens: int = 0, room: int = 1
) -> Moments:
    """Return a run that is long enough for the predicate's times, and the starts of steps that act.

    Fractions of the run need no change; "30ep" needs more epochs and "1000ba" longer ones. Times beyond 100 000 batches
    are ignored, and so are iterations, which cases do not have.

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
        (11, (29, 30, 31, 32), (30, 31, 32))
    """
    find = _find if _has_hash(predicate) else _find.__wrapped__
    return find(predicate, batches_per_epoch, max(epochs, -(-room // batches_per_epoch)), samples, tokens, room)


@functools.lru_cache(maxsize=4096)
def _find(predicate: Predicate, batches_per_epoch: int, epochs: int, samples: int, tokens: int, room: int) -> Moments:
    questions = _questions(predicate)
    shape = _reaching(collect(list(questions.values()), Time), batches_per_epoch, epochs, samples, tokens, room)
    changes = _changes(questions, *shape, samples, tokens)
    for longer in () if _shows(changes, questions) else _longer(*shape):
        found = _changes(questions, *longer, samples, tokens)
        if _shows(found, questions):
            shape, changes = longer, found
            break
    moments = _moments(changes, shape)
    if not _has_room(moments, room):
        # A longer run has room for an algorithm that acts at the end of each epoch; for the run's end no run has.
        shape = shape[0], shape[1] + -(-room // shape[0])
        prolonged = _moments(_changes(questions, *shape, samples, tokens), shape)
        moments = prolonged if _has_room(prolonged, room) else moments
    return moments


def _has_room(moments: Moments, room: int) -> bool:
    return not moments.acting or moments.acting[0] + room <= moments.batches_per_epoch * moments.epochs


def _moments(changes: list[_Change], shape: tuple[int, int]) -> Moments:
    near = _near(changes, math.prod(shape))
    starts = [change.start for change in changes]
    counts = {start: len(changes[bisect.bisect(starts, start) - 1].events) for start in near}
    most = max(counts.values())
    return Moments(*shape, tuple(start for start in near if counts[start] == most > 0), near)


def _questions(predicate: Predicate) -> dict[Event, Predicate]:
    """Return the predicate at each event of the loop or, if it never acts there, at the events outside."""
    left = {event: predicate.at(event) for event in Event if event is not Event.INIT}
    left = {event: asked for event, asked in left.items() if asked != NEVER}
    return {event: asked for event, asked in left.items() if event in _LOOP} or left


def _reaching(
    times: tuple[Time, ...], batches_per_epoch: int, epochs: int, samples: int, tokens: int, room: int
) -> tuple[int, int]:
    """Return the batches per epoch and the epochs of a run in which these times are `room` batches before the end."""
    rates = {TimeUnit.BATCH: 1, TimeUnit.SAMPLE: samples, TimeUnit.TOKEN: tokens}
    longest, after = _LONGEST // batches_per_epoch, -(-room // batches_per_epoch)
    epochs = max([epochs, *(int(t.value) + after for t in times if t.unit is TimeUnit.EPOCH and t.value < longest)])
    counted = (math.ceil(time.value / rates[time.unit]) for time in times if rates.get(time.unit))
    batches = max((count + room for count in counted if count < _LONGEST), default=1)
    return max(batches_per_epoch, math.ceil(batches / epochs)), epochs


def _longer(batches_per_epoch: int, epochs: int) -> Iterator[tuple[int, int]]:
    """Yield runs with longer epochs and with more epochs, doubling each time."""
    factor = 2
    while factor * batches_per_epoch * epochs <= _LONGEST_SEARCH:
        yield factor * batches_per_epoch, epochs
        yield batches_per_epoch, factor * epochs
        factor *= 2


def _changes(
    questions: dict[Event, Predicate], batches_per_epoch: int, epochs: int, samples: int, tokens: int
) -> list[_Change]:
    """Return the starts at which the events of a step that act change, with these events; the first start is 0."""
    run, total = RunLength(f"{epochs}ep", batches_per_epoch), epochs * batches_per_epoch
    groups = _grouped(questions)
    found: list[_Change] = []
    start = 0
    now = Timestamp(run=run)
    while start < total:
        now = now.advance_by(start - now.batch, samples, tokens)
        later = now.advance(samples, tokens)
        acting: set[Event] = set()
        following = float(total)
        for asked, lag, events in groups:
            point = later if lag else now
            left, end = asked.during(point)
            if not left.is_timed or left(events[0], _Moment(point)):
                acting.update(events)
            # Only a constant answer is valid for longer, and at most until the end of the epoch.
            end = min(end, (point.epoch + 1) * batches_per_epoch) if left in (ALWAYS, NEVER) else 0
            following = min(following, end - lag)
        if not found or found[-1].events != acting:
            found.append(_Change(start, frozenset(acting)))
        start = max(start + 1, int(following))
    return found


def _grouped(questions: dict[Event, Predicate]) -> list[tuple[Predicate, int, list[Event]]]:
    """Return the predicates, each with all events that share it and the time, to evaluate it only once."""
    groups: list[tuple[Predicate, int, list[Event]]] = []
    for event, asked in questions.items():
        lag = int(event.sees_new_time)
        same = next((events for other, at, events in groups if at == lag and other == asked), None)
        if same is None:
            groups.append((asked, lag, [event]))
        else:
            same.append(event)
    return groups


class _Moment(NamedTuple):
    """The part of a state that a predicate about time reads."""

    timestamp: Timestamp


def _shows(changes: list[_Change], questions: dict[Event, Predicate]) -> bool:
    """Return whether the algorithm acts, somewhere, at each event at which it may act."""
    return frozenset(questions) == frozenset().union(*(change.events for change in changes))


def _near(changes: list[_Change], total: int) -> tuple[int, ...]:
    if total <= _SHORT:
        return tuple(range(total))
    around = {change.start + offset for change in changes for offset in (-1, 0, 1)} | {total - 1}
    return tuple(sorted(start for start in around if 0 <= start < total))


def _has_hash(value: Any) -> bool:
    """Return whether a predicate can be hashed; one from a plain function may contain an unhashable object."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
