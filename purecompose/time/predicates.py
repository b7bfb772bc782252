"""Predicates over events and time, which decide when an algorithm acts; they combine with `&`, `|` and `~`.

A predicate is a function `(event, state) -> bool` that can also be simplified in two ways: for a known event (`at`),
and for the next batches (`during`). A training step evaluates only predicates that are not constant.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from purecompose._support import publish
from purecompose.time.event import Event, Time, TimeUnit, named_point, named_time, snapped
from purecompose.time.timestamp import RunLength, Timestamp


publish(__name__)


__all__ = [
    "ALWAYS",
    "Custom",
    "NEVER",
    "Predicate",
    "after",
    "as_predicate",
    "before",
    "between",
    "epoch_ends",
    "every",
    "on",
    "through",
]


class Moment(Protocol):
    """Anything with a time, such as a state."""

    @property
    def timestamp(self) -> Timestamp:
        """The host's counters."""
        ...


class Predicate:
    """The base class of predicates, with the operators and conservative defaults of the other methods."""

    @property
    def is_timed(self) -> bool:
        """True if it reads only the event and `state.timestamp`, and nothing else of the state."""
        return False

    def __call__(self, event: Event, state: Moment) -> bool:
        """Return whether the predicate is true at this event, for a state (any object with a `timestamp`)."""
        raise NotImplementedError

    def at(self, event: Event) -> "Predicate":
        """Return the predicate simplified for a known event."""
        del event
        return self

    def during(self, timestamp: Timestamp) -> "tuple[Predicate, float]":
        """Return the predicate simplified from `timestamp` on, and the batch count at which this ends.

        The simplified predicate agrees with this one at every timestamp of the same run and epoch whose `batch` is at
        least `timestamp.batch` and below the second result.
        """
        del timestamp
        return self, math.inf

    def negated_words(self) -> str:
        """Return the text of the negation."""
        return f"~{self!r}"

    def __and__(self, other: "Predicate | Callable[[Event, Any], bool]") -> "Predicate":
        return _both(self, as_predicate(other))

    def __rand__(self, other: Callable[[Event, Any], bool]) -> "Predicate":
        return _both(as_predicate(other), self)

    def __or__(self, other: "Predicate | Callable[[Event, Any], bool]") -> "Predicate":
        return ~(~self & ~as_predicate(other))

    def __ror__(self, other: Callable[[Event, Any], bool]) -> "Predicate":
        return as_predicate(other) | self

    def __invert__(self) -> "Predicate":
        return _Not(self)


class Timed(Predicate):
    """A predicate about event and time only."""

    @property
    def is_timed(self) -> bool:
        return True


@dataclass(frozen=True, repr=False)
class _Constant(Timed):
    """A predicate that always gives the same answer: `ALWAYS`, `NEVER`."""

    value: bool

    def __call__(self, event: Event, state: Moment) -> bool:
        del event, state
        return self.value

    def __invert__(self) -> Predicate:
        return NEVER if self.value else ALWAYS

    def __repr__(self) -> str:
        return "always" if self.value else "never"


ALWAYS: Predicate = _Constant(True)
"""Predicate that is always true."""

NEVER: Predicate = _Constant(False)
"""Predicate that is never true; the `match` of algorithms with neutral settings."""


@dataclass(frozen=True, repr=False)
class _And(Predicate):
    first: Predicate
    second: Predicate

    @property
    def is_timed(self) -> bool:
        return self.first.is_timed and self.second.is_timed

    def __call__(self, event: Event, state: Moment) -> bool:
        return self.first(event, state) and self.second(event, state)

    def at(self, event: Event) -> Predicate:
        return _both(self.first.at(event), self.second.at(event))

    def during(self, timestamp: Timestamp) -> tuple[Predicate, float]:
        # Both are asked, so that what has no answer in this run is an error from the first batch on.
        (first, end), (second, second_end) = self.first.during(timestamp), self.second.during(timestamp)
        if first == NEVER:
            return first, end
        return _both(first, second), second_end if second == NEVER else min(end, second_end)

    def __repr__(self) -> str:
        return f"{self.first!r} & {self.second!r}"

    def negated_words(self) -> str:
        if isinstance(self.first, _Not) and isinstance(self.second, _Not):
            return f"({~self.first!r} | {~self.second!r})"
        return f"~({self!r})"


@dataclass(frozen=True, repr=False)
class _Not(Predicate):
    inner: Predicate

    @property
    def is_timed(self) -> bool:
        return self.inner.is_timed

    def __call__(self, event: Event, state: Moment) -> bool:
        return not self.inner(event, state)

    def at(self, event: Event) -> Predicate:
        return ~self.inner.at(event)

    def during(self, timestamp: Timestamp) -> tuple[Predicate, float]:
        inner, end = self.inner.during(timestamp)
        return ~inner, end

    def __invert__(self) -> Predicate:
        return self.inner

    def __repr__(self) -> str:
        return self.inner.negated_words()


@dataclass(frozen=True, repr=False)
class Custom(Predicate):
    """A plain function `(event, state) -> bool`; its answer may depend on more than time.

    Args:
        fn: The function, called in every step.

    Example:
        >>> Custom(lambda event, state: True)(None, None)
        True
    """

    fn: Callable[[Event, Any], bool]

    def __call__(self, event: Event, state: Moment) -> bool:
        return bool(self.fn(event, state))

    def __repr__(self) -> str:
        return getattr(self.fn, "__qualname__", repr(self.fn))


def as_predicate(match: Predicate | Callable[[Event, Any], bool]) -> Predicate:
    """Return a predicate from a plain function `(event, state) -> bool`; a predicate is returned unchanged.

    Args:
        match: A predicate, or a function of time and shapes.

    Raises:
        TypeError: `match` is neither a predicate nor callable.

    Example:
        >>> predicate = as_predicate(lambda event, state: state.timestamp.batch > 3)
        >>> type(predicate).__name__
        'Custom'
    """
    if isinstance(match, Predicate):
        return match
    if not callable(match):
        raise TypeError(f"match={match!r}: expected a predicate or a function (event, state) -> bool")
    return Custom(match)


def _both(first: Predicate, second: Predicate) -> Predicate:
    if NEVER in (first, second):
        return NEVER
    if first == ALWAYS:
        return second
    return first if second == ALWAYS else _And(first, second)


_LAG = {event: 0 if event.sees_new_time else 1 for event in Event}
"""Number of batches by which an event's timestamp is behind its own batch, which is counted from 1."""


@dataclass(frozen=True, repr=False)
class _On(Timed):
    events: frozenset[Event]

    def __call__(self, event: Event, state: Moment) -> bool:
        del state
        return event in self.events

    def at(self, event: Event) -> Predicate:
        return ALWAYS if event in self.events else NEVER

    def __repr__(self) -> str:
        return f"on({', '.join(event.name for event in Event if event in self.events)})"


@dataclass(frozen=True, repr=False)
class _From(Timed):
    """A predicate that is true from the first batch at which `time` is reached or, with `is_strict`, passed.

    With `is_batch_later`, it is true at BATCH_END in the batches in which `time` was reached at their start.
    """

    time: Time
    is_strict: bool = False
    is_batch_later: bool = False

    def __call__(self, event: Event, state: Moment) -> bool:
        del event
        return self._holds(state.timestamp)

    def during(self, timestamp: Timestamp) -> tuple[Predicate, float]:
        unit = _counter(self.time, timestamp.run)
        if unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN):
            return self, math.inf  # any batch may bring any number of them
        if self._holds(timestamp):
            return ALWAYS, math.inf
        if unit is not TimeUnit.BATCH and self.is_strict and timestamp.reached(self.time):
            return self, math.inf  # the next batch decides
        is_plain = self.time.unit is TimeUnit.BATCH
        turn = self.time.value if is_plain else timestamp.run.in_batches(self.time)
        if unit is not TimeUnit.BATCH or turn is None:
            return NEVER, math.inf
        if self.is_batch_later:
            return NEVER, math.ceil(turn) + 1
        return NEVER, math.floor(turn) + 1 if self.is_strict else math.ceil(turn)

    def _holds(self, timestamp: Timestamp) -> bool:
        turn = timestamp.run.in_batches(self.time) if self.is_batch_later else None
        if turn is not None:
            return timestamp.batch >= turn + 1
        return timestamp.passed(self.time) if self.is_strict else timestamp.reached(self.time)

    def __repr__(self) -> str:
        return f"~{self.negated_words()}" if self.is_strict else f"after({str(self.time)!r})"

    def negated_words(self) -> str:
        return f"{'through' if self.is_strict else 'before'}({str(self.time)!r})"


@dataclass(frozen=True, repr=False)
class _Every(Timed):
    interval: Time
    in_epoch: bool
    since: Time | None = None

    def during(self, timestamp: Timestamp) -> tuple[Predicate, float]:
        self._length(timestamp.run)  # an interval that has no length in this run is an error from the first batch on
        return self, math.inf

    def __call__(self, event: Event, state: Moment) -> bool:
        timestamp: Timestamp = state.timestamp
        length = self._length(timestamp.run)
        # The first turn, or if it is not known in batches, the end of the first interval.
        first = length if self.since is None else first_turn(self.since, self.interval, timestamp.run) or length
        number = _number(event, timestamp, self.in_epoch)
        if number < first:
            return False
        if type(length) is int:
            return (number - first) % length == 0
        # Snapped, so that the last of three thirds is passed at the end, not a batch later.
        number += length - first
        return math.floor(snapped(number / length)) != math.floor(snapped((number - 1) / length))

    def _length(self, run: RunLength) -> int | float:
        if self.interval.unit is TimeUnit.BATCH:
            return self.interval.value
        length = run.in_batches(self.interval)
        if length is None:
            raise ValueError(
                f"{self!r} cannot be counted in batches in this run: give State.create batches_per_epoch "
                "(and a duration, for fractions of it), or give the interval in batches"
            )
        return int(length) if length.is_integer() else length

    def __repr__(self) -> str:
        since = "" if self.since is None else f", since={str(self.since)!r}"
        return f"every({str(self.interval)!r}{', in_epoch=True' if self.in_epoch else ''}{since})"


def _number(event: Event, timestamp: Timestamp, in_epoch: bool) -> int:
    """Return the number of the batch that the event belongs to, counted from 1; 0 before the first batch ends."""
    lag = _LAG[event]
    if not in_epoch:
        return timestamp.batch + lag
    if lag or timestamp.batch_in_epoch or not timestamp.batch:
        return timestamp.batch_in_epoch + lag
    return timestamp.run.batches_per_epoch or 0  # the epoch has just been closed


@dataclass(frozen=True, repr=False)
class _EpochEnds(Timed):
    def __call__(self, event: Event, state: Moment) -> bool:
        timestamp: Timestamp = state.timestamp
        length = timestamp.run.batches_per_epoch
        if length is None:
            raise ValueError(f"{self!r} needs to know the epoch's length: State.create(..., batches_per_epoch=...)")
        if _LAG[event] == 0:
            return timestamp.batch > 0 and timestamp.batch_in_epoch == 0
        return timestamp.batch_in_epoch + 1 == length

    def __repr__(self) -> str:
        return "epoch_ends()"


def on(*events: Event | str) -> Predicate:
    """Return a predicate that is true at these events.

    Args:
        *events: Events, or their names in any case; at least one.

    Raises:
        ValueError: No event is given, or a name is not the name of an event.

    Example:
        >>> on(Event.BATCH_END, "init")
        on(INIT, BATCH_END)
    """
    if not events:
        raise ValueError("on() needs at least one event")
    return _On(frozenset(Event(event) for event in events))


def after(time: float | Time | str) -> Predicate:
    """Return a predicate that is true from this point of the run on, the point included.

    Args:
        time: A fraction of the run in [0, 1], or a time such as `"10ep"` or `"0.5dur"`.

    Raises:
        TypeError, ValueError: `time` is not a time, negative, a fraction above 1, or in seconds, which are not part of
            a state.

    Example:
        >>> on(Event.BATCH_START) & after('1ep')
        on(BATCH_START) & after('1ep')
    """
    return _From(named_point(time, "after: time"))


def before(time: float | Time | str) -> Predicate:
    """Return a predicate that is true up to this point of the run, the point excluded; see `after`.

    Args:
        time: A point of the run, as for `after`.

    Example:
        >>> before(0.5)
        before('0.5dur')
    """
    return ~_From(named_point(time, "before: time"))


def through(time: float | Time | str) -> Predicate:
    """Return a predicate that is true up to this point of the run, the point included; see `after`.

    Args:
        time: A point of the run, as for `after`.

    Example:
        >>> through("10ba"), ~through("10ba")
        (through('10ba'), ~through('10ba'))
    """
    return ~_From(named_point(time, "through: time"), is_strict=True)


def between(start: float | Time | str, end: float | Time | str) -> Predicate:
    """Return a predicate that is true from `start` (included) to `end` (excluded); never if both are the same.

    Args:
        start: The first point of the run, as for `after`.
        end: The point after the last, in the same form.

    Raises:
        ValueError: As `after`; or `end` is before `start`, in the same unit.

    Example:
        >>> on(Event.AFTER_DATALOADER) & between(0.5, 0.9) & ~every(2)
        on(AFTER_DATALOADER) & after('0.5dur') & before('0.9dur') & ~every('2ba')
    """
    first, last = named_point(start, "between: start"), named_point(end, "between: end")
    if first.unit is last.unit and last < first:
        raise ValueError(f"between({start!r}, {end!r}): expected the start before the end")
    return _From(first) & ~_From(last)


def during(start: float | Time | str, end: float | Time | str | None, *, is_batch_later: bool) -> Predicate:
    """Return a predicate that is true from a point of the run up to another, or without end.

    Args:
        start, end: Points of the run, as for `between`.
        is_batch_later: For events at which the time is one batch later: it selects the same batches there.
    """
    between(start, start if end is None else end)  # raises for points in the wrong order
    first = named_point(start, "during: start")
    # A share of 0 would require the run's length.
    begun = _From(first, is_batch_later, is_batch_later) if first else ALWAYS
    if end is None:
        return begun
    return begun & ~_From(named_point(end, "during: end"), is_batch_later, is_batch_later)


def every(interval: int | Time | str, *, in_epoch: bool = False, since: float | Time | str | None = None) -> Predicate:
    """Return a predicate that is true in every n-th batch: in the n-th, the 2n-th and so on, counted from 1.

    It selects the same batches at events before and after the time advances.

    Args:
        interval: A number of batches, or a time in batches, epochs or fractions of the run. A fractional number of
            batches selects the batches in which a multiple of it is passed.
        in_epoch: True to count from the start of each epoch instead of the start of the run.
        since: A point of the run, as for `after`, from which to count. The first turn is the first batch that reaches
            it or, if the interval is in epochs, the first end of an epoch from there on. A point that the run cannot
            express in batches is its start.

    Raises:
        ValueError: The interval is not positive, or in a unit that cannot be counted in batches, or `since` is given
            together with `in_epoch`.

    Example:
        >>> every("2ep", since=0.7)
        every('2ep', since='0.7dur')
    """
    if isinstance(interval, float):
        raise TypeError(f"every({interval!r}): expected a number of batches; write '{interval}dur' for a fraction")
    time = named_time(interval, "every: interval", TimeUnit.BATCH)
    if time.value <= 0:
        raise ValueError(f"every({interval!r}): expected a positive interval")
    if time.unit not in (TimeUnit.BATCH, TimeUnit.UPDATE, TimeUnit.EPOCH, TimeUnit.DURATION):
        raise ValueError(
            f"every({interval!r}): expected batches (ba), updates (up), epochs (ep) or a fraction of the run (dur)"
        )
    if since is not None and in_epoch:
        raise ValueError(f"every({interval!r}): expected in_epoch or since={since!r}, got both")
    return _Every(time, in_epoch, None if since is None else named_point(since, "every: since"))


def first_turn(since: Time, interval: Time, run: RunLength) -> int | None:
    """Return the first turn of an interval from a point of the run on, as a batch counted from 1.

    It is the first batch that reaches the point or, if the interval is in epochs, the first end of an epoch from there
    on; `None` if this is not a number of batches.
    """
    start = run.in_batches(since)
    one = 1.0 if interval.unit is TimeUnit.DURATION else run.in_batches(Time(1, interval.unit))
    return None if start is None or one is None else int(max(1, math.ceil(snapped(start / one))) * one)


def epoch_ends() -> Predicate:
    """Return a predicate that is true in the last batch of each epoch; the run must have `batches_per_epoch`.

    Example:
        >>> on(Event.BATCH_END) & epoch_ends()
        on(BATCH_END) & epoch_ends()
    """
    return _EpochEnds()


def _counter(time: Time, run: RunLength) -> TimeUnit:
    """Return the unit of the counter by which `Timestamp.reached` decides about a time."""
    if time.unit is not TimeUnit.DURATION:
        return TimeUnit.BATCH if time.unit is TimeUnit.UPDATE else time.unit
    if run.duration is None or run.total_batches is not None:
        return TimeUnit.BATCH
    return run.duration.unit
