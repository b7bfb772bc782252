"""The length of a run, the point that it has reached, and intervals, of which every multiple is due."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from purecompose._support.specs import check_whole
from purecompose.time.event import Time, TimeLike, TimeUnit, named_time, snapped


@dataclasses.dataclass(frozen=True, init=False)
class RunLength:
    """The length of a run, and the lengths needed to count its times in batches.

    Args:
        duration: The time at which the run is finished, in any unit but `dur`; None for never.
        batches_per_epoch: Number of batches in an epoch; None if the loader does not know it.
        batches_per_update: Number of batches for each update of the optimizer, which `gradient_accumulation` sets.

    Raises:
        TypeError, ValueError: A value is not of this kind or not positive.

    Example:
        >>> RunLength("2ep", batches_per_epoch=3).batches_per_epoch
        3
    """

    duration: Time | None = None
    batches_per_epoch: int | None = None
    batches_per_update: int = dataclasses.field(default=1, repr=False)

    def __init__(
        self, duration: TimeLike | None = None, batches_per_epoch: int | None = None, batches_per_update: int = 1
    ) -> None:
        length = None if duration is None else named_time(duration, "duration")
        if length is not None and length.unit is TimeUnit.DURATION:
            raise ValueError(f"duration={length}: a run cannot be a fraction of itself; write '20ep' or '500ba'")
        if length is not None and length.value <= 0:
            raise ValueError(f"duration: expected a time > 0, got {length}")
        object.__setattr__(self, "duration", length)
        if batches_per_epoch is not None:
            batches_per_epoch = check_whole(batches_per_epoch, "batches_per_epoch", 1)
        object.__setattr__(self, "batches_per_epoch", batches_per_epoch)
        batches_per_update = check_whole(batches_per_update, "batches_per_update", 1)
        object.__setattr__(self, "batches_per_update", batches_per_update)

    @functools.cached_property
    def total_batches(self) -> float | None:
        """The run's duration in batches; None without a duration or if it is not known."""
        return None if self.duration is None else self.in_batches(self.duration)

    def in_batches(self, time: TimeLike) -> float | None:
        """Return a time as a number of batches from the start of the run.

        Returns:
            Batches, not rounded; None if it is not known (samples, tokens and seconds; epochs of unknown
            length; a `dur` of a duration of these kinds).

        Example:
            >>> RunLength("4ep", batches_per_epoch=5).in_batches("0.25dur")
            5.0
        """
        time = Time.of(time)
        if time.unit is TimeUnit.BATCH:
            return float(time.value)
        if time.unit is TimeUnit.UPDATE:
            return float(time.value * self.batches_per_update)
        if time.unit is TimeUnit.EPOCH and self.batches_per_epoch is not None:
            return float(time.value * self.batches_per_epoch)
        if time.unit is TimeUnit.DURATION and self.total_batches is not None:
            return snapped(time.value * self.total_batches)
        return None


_COUNTERS = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.UPDATE: "update",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
}


@dataclasses.dataclass(frozen=True)
class Timestamp:
    """The point that a run has reached: its counters so far, and the run's length. Immutable.

    Samples and tokens are sums over ranks. Wall-clock time is not counted: a training step reads no clock.

    Args:
        epoch, batch, sample, token: Whole epochs, batches, samples and tokens so far.
        batch_in_epoch, sample_in_epoch, token_in_epoch: Batches, samples and tokens since the start of the epoch.
        run: The length of the run.

    Raises:
        TypeError: A counter is not an int, or `run` is not a RunLength.
        ValueError: A counter is negative.

    Example:
        >>> Timestamp(run=RunLength("2ep", batches_per_epoch=3)).advance(samples=8)
        Timestamp(batch=1, sample=8, batch_in_epoch=1, sample_in_epoch=8, run=RunLength(duration=Time(2, \
TimeUnit.EPOCH), batches_per_epoch=3))
    """

    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    run: RunLength = RunLength()

    def __post_init__(self) -> None:
        if not isinstance(self.run, RunLength):
            raise TypeError(f"run: expected a RunLength, got {self.run!r} ({type(self.run).__name__})")
        for name, value in list(vars(self).items()):
            if name != "run":
                object.__setattr__(self, name, check_whole(value, name, 0))

    def __repr__(self) -> str:
        changed = (f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(Timestamp, name))
        return f"Timestamp({', '.join(changed)})"

    def advance(self, samples: int = 0, tokens: int = 0) -> Timestamp:
        """Return the point after one more batch, with which an epoch of known length may end.

        Raises:
            ValueError: `samples` or `tokens` is negative.
        """
        if samples < 0 or tokens < 0:
            raise ValueError(f"expected counts >= 0, got samples={samples}, tokens={tokens}")
        new = self._changed(
            batch=self.batch + 1,
            sample=self.sample + samples,
            token=self.token + tokens,
            batch_in_epoch=self.batch_in_epoch + 1,
            sample_in_epoch=self.sample_in_epoch + samples,
            token_in_epoch=self.token_in_epoch + tokens,
        )
        length = self.run.batches_per_epoch
        return new.advance_epoch() if length is not None and new.batch_in_epoch >= length else new

    def advance_by(self, batches: int, samples: int = 0, tokens: int = 0) -> Timestamp:
        """Return the point after `batches` more batches of `samples` and `tokens` each; see `advance`.

        Raises:
            TypeError: `batches` is not a whole number.
            ValueError: `batches`, `samples` or `tokens` is negative.

        Example:
            >>> point = Timestamp(run=RunLength(batches_per_epoch=10)).advance_by(1_000_005, samples=8)
            >>> point.epoch, point.batch_in_epoch, point.sample
            (100000, 5, 8000040)
        """
        batches = check_whole(batches, "advance_by: batches", 0)
        if not batches:
            return self
        # After one batch a point is within its epoch, wherever it was before.
        point, batches = self.advance(samples, tokens), batches - 1
        in_epoch, length = point.batch_in_epoch + batches, self.run.batches_per_epoch
        epochs, in_epoch = (0, in_epoch) if length is None else divmod(in_epoch, length)
        since = in_epoch if epochs else batches
        return point._changed(
            epoch=point.epoch + epochs,
            batch=point.batch + batches,
            sample=point.sample + batches * samples,
            token=point.token + batches * tokens,
            batch_in_epoch=in_epoch,
            sample_in_epoch=since * samples + (0 if epochs else point.sample_in_epoch),
            token_in_epoch=since * tokens + (0 if epochs else point.token_in_epoch),
        )

    def advance_epoch(self) -> Timestamp:
        """Return the point after the end of an epoch, for loops in which only the loader knows where an epoch ends."""
        return self._changed(epoch=self.epoch + 1, batch_in_epoch=0, sample_in_epoch=0, token_in_epoch=0)

    def get(self, unit: TimeUnit | str) -> int:
        """Return the counter of a unit.

        Raises:
            ValueError: The unit is `dur` or `sec`, which have no counter.
        """
        unit = unit if isinstance(unit, TimeUnit) else TimeUnit(unit)
        if unit not in _COUNTERS:
            raise ValueError(
                f"{unit.value} has no counter: timestamp.elapsed() is the fraction of the run gone by, and wall-clock "
                "time is not part of the state"
            )
        return getattr(self, _COUNTERS[unit])

    @property
    def update(self) -> int:
        """Updates of the optimizer so far."""
        return self.batch // self.run.batches_per_update

    def elapsed(self) -> float | None:
        """Return the elapsed fraction of the run; above 1 if training continues.

        None for a run without a duration, or with one in seconds.

        It changes with every batch if the duration can be counted in batches, otherwise with the counter of its unit.
        """
        total = self.run.total_batches
        if total is not None:
            return self.batch / total
        duration = self.run.duration
        if duration is None or duration.unit is TimeUnit.SECOND:
            return None
        return self.get(duration.unit) / duration.value

    def reached(self, time: TimeLike) -> bool:
        """Return whether the run has reached this point, given in any unit but `sec`, including `dur`.

        Raises:
            ValueError: The time is in seconds, or a fraction of a run that has no duration or is limited in seconds.

        Example:
            >>> Timestamp(batch=5, run=RunLength("10ba")).reached("0.5dur")
            True
        """
        unit, value = self._point(time)
        return self.get(unit) >= value

    def passed(self, time: TimeLike) -> bool:
        """Return whether the run is beyond this point by at least a batch; otherwise as `reached`.

        Example:
            >>> [Timestamp(batch=batch).passed("5ba") for batch in (5, 6)]
            [False, True]
            >>> [Timestamp(epoch=1, batch_in_epoch=batch).passed("1ep") for batch in (0, 1)]
            [False, True]
        """
        unit, value = self._point(time)
        if unit is TimeUnit.EPOCH:
            return (self.epoch, self.batch_in_epoch) > (value, 0)
        return self.get(unit) > value

    def _point(self, time: TimeLike) -> tuple[TimeUnit, float]:
        """Return a point of the run as a counter and its value; see `reached`."""
        time = Time.of(time)
        unit, value, duration = time.unit, time.value, self.run.duration
        if unit is TimeUnit.DURATION:
            if duration is None:
                raise ValueError(
                    f"{time} is a fraction of a run that has no duration; State.create(duration=...) sets it"
                )
            total = self.run.total_batches
            unit = duration.unit if total is None else TimeUnit.BATCH
            value = snapped(value * (duration.value if total is None else total))
        if unit is TimeUnit.UPDATE:
            return TimeUnit.BATCH, value * self.run.batches_per_update
        if unit is TimeUnit.SECOND:
            raise ValueError(
                f"{time}: wall-clock time is not part of the state, so no step can wait for it; "
                "to stop a run after some seconds, use fit(duration='60sec')"
            )
        return unit, value

    def is_finished(self) -> bool:
        """Return whether the run has reached its duration; always False without one, or with one in seconds."""
        duration = self.run.duration
        if duration is None or duration.unit is TimeUnit.SECOND:
            return False
        return self.get(duration.unit) >= duration.value

    def replace(self, **changes: Any) -> Timestamp:
        """Return a copy with new values in some fields.

        Raises:
            TypeError: A timestamp has no such field; otherwise as at construction.
        """
        return dataclasses.replace(self, **changes)

    def _changed(self, **counters: int) -> Timestamp:
        # Every training step makes a copy; __init__, with its checks and guarded assignments, costs ten times as much.
        new = object.__new__(Timestamp)
        new.__dict__.update(self.__dict__, **counters)
        return new


Interval: TypeAlias = Time | Callable[[Timestamp], bool]
"""A time, of which every multiple is due, or a function that returns whether a point of the run is due."""


def checked_interval(value: Any, name: str, default_unit: TimeUnit | None = None, *, seconds: bool = False) -> Time:
    """Return an interval as a time; it is positive, and in seconds only where these are allowed."""
    interval = named_time(value, name, default_unit)
    if interval.value <= 0 or (interval.unit is TimeUnit.SECOND and not seconds):
        kind = "a positive time" if seconds else "a positive time that is not in seconds"
        raise ValueError(f"{name}={str(interval)!r}: expected {kind}")
    return interval


def interval_or_function(value: Any, name: str, *, seconds: bool = False) -> Interval:
    """Return a function unchanged, and any other value as an interval."""
    if callable(value) and not isinstance(value, type):
        return cast(Interval, value)
    return checked_interval(value, name, seconds=seconds)


def has_passed(interval: Interval, before: Timestamp, now: Timestamp) -> bool:
    """Return whether a multiple of the interval lies after `before` and not after `now`; not for seconds."""
    if not isinstance(interval, Time):
        is_due = interval(now)
        if not isinstance(is_due, bool):
            raise TypeError(f"interval {interval!r}: expected a function Timestamp -> bool, got {is_due!r} from it")
        return is_due
    unit = interval.unit
    if unit is not TimeUnit.DURATION:
        return before.get(unit) // interval.value != now.get(unit) // interval.value
    past, present = before.elapsed(), now.elapsed()
    if past is None or present is None:
        raise ValueError(f"interval {str(interval)!r}: fractions of the run need a run with a duration")
    # Multiples of a fraction have rounding errors: 3 * 0.1 is above 0.3.
    return math.floor(past / interval.value + 1e-9) != math.floor(present / interval.value + 1e-9)
