"""Shapes, the functions of time behind schedules, and the time axis on which they lie.

A schedule may apply to a part of a run (`sequence`) and be stretched (`Schedule.scaled`). Lengths in batches are known
only in a run. Until then a length is a sum of times with factors, and nothing is rounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from purecompose.time import RunLength, Time, TimeLike, Timestamp, TimeUnit, UnitError
from purecompose.time.event import named_time, snapped


Length: TypeAlias = tuple[tuple[float, Time], ...]
"""A sum of times, each with a factor; the empty sum is the length 0, which has no unit."""

_RUN: Length = ((1.0, Time(1.0, TimeUnit.DURATION)),)


class Moment(NamedTuple):
    """A point of a run as a schedule sees it."""

    timestamp: Timestamp
    start: Length = ()
    """Start of the schedule's time, from the start of the run."""
    whole: Length = _RUN
    """Length of "1dur": the run, or the part of it that belongs to the schedule."""
    ratio: float = 1.0
    """Factor by which absolute times are stretched; fractions of the run (`dur`) never are."""
    warmup_ratio: float = 1.0
    """Factor by which the times of warm-ups are stretched."""

    def length(self, time: Time) -> Length:
        """Return a time as a length."""
        return self._length(time, self.ratio)

    def numbers(self, warmup: Time, role: str = "", time: Time | None = None) -> tuple[float, float, float]:
        """Return the current time, a warm-up and a time, in batches if the run can convert them, else in a common unit.

        The current time counts from the schedule's start. `role` names the time in messages; without a time, infinity
        is returned for it.
        """
        if self[1:] == _PLAIN:  # the usual case, needed twice in every step: the same result in a third of the time
            run = self.timestamp.run
            ramp = run.in_batches(warmup) if warmup else 0.0
            end = math.inf if time is None else run.in_batches(time)
            if ramp is not None and end is not None:
                return self.timestamp.batch, ramp, end
        lengths = {"warmup": self._length(warmup, self.warmup_ratio)}
        if time is None:
            now, ramp = self._on_one_axis(lengths)
            return now, ramp, math.inf
        now, ramp, end = self._on_one_axis({**lengths, role: self.length(time)})
        return now, ramp, end

    def has_reached(self, time: Time) -> bool:
        """Return whether the current time has reached a point, counted from the start; see `numbers`."""
        if self[1:] == _PLAIN and (point := self.timestamp.run.in_batches(time)) is not None:
            return self.timestamp.batch >= point
        # Computed in the same way as the time in a part that begins there, so that rounding cannot make it negative.
        begun = Moment(self.timestamp, (*self.start, *self.length(time)))
        return begun._on_one_axis({})[0] >= 0

    def part(self, first: Length, last: Length) -> Moment:
        """Return the same moment for a schedule that occupies the time from `first` to `last`."""
        whole = (*last, *((-factor, time) for factor, time in first))
        return Moment(self.timestamp, (*self.start, *first), whole, self.ratio, self.warmup_ratio)

    def _on_one_axis(self, lengths: dict[str, Length]) -> list[float]:
        """Return the current time, counted from the start, and these lengths as numbers; see `numbers`."""
        run, now = self.timestamp.run, self.timestamp.batch
        given = (self.start, *lengths.values())
        found = [batches for length in given if (batches := _in_batches(length, run)) is not None]
        if len(found) < len(given):
            unit, found = _in_own_unit({"start": self.start, **lengths}, run)
            now = self.timestamp.get(unit)
        found[0] = now - found[0]
        if min(found) < 0 and (negative := [name for name, value in zip(lengths, found[1:], strict=True) if value < 0]):
            name = negative[0]
            raise ValueError(
                f"{name}={_shown(lengths[name])} is negative in this run: in a sequence, the milestone that begins "
                "this part lies after the end"
            )
        return found

    def _length(self, time: Time, ratio: float) -> Length:
        if not time:  # zero is the same in every unit, so it does not affect the choice of one
            return ()
        if time.unit is TimeUnit.DURATION:
            return tuple((time.value * factor, part) for factor, part in self.whole)
        return ((ratio, time),)


_PLAIN = ((), _RUN, 1.0, 1.0)


def checked_time(time: TimeLike, where: str, *, is_positive: bool = False) -> Time:
    """Return a time that a schedule can follow."""
    checked = named_time(time, where)
    if checked.unit is TimeUnit.SECOND:
        raise ValueError(
            f"{where}={checked}: a schedule cannot follow wall-clock time, which is not part of the state; "
            "use batches, epochs or a fraction of the run ('0.1dur')"
        )
    if checked < 0 or (is_positive and not checked):
        raise ValueError(f"{where}: expected a time {'>' if is_positive else '>='} 0, got {checked}")
    return checked


def _in_batches(length: Length, run: RunLength) -> float | None:
    if not length:
        return 0.0
    total = 0.0
    for factor, time in length:
        batches = run.in_batches(time)
        if batches is None:
            return None
        total += factor * batches
    return snapped(total)


def _in_own_unit(lengths: dict[str, Length], run: RunLength) -> tuple[TimeUnit, list[float]]:
    """Return the unit shared by all times, and their values in it; fractions of the run have its duration's unit."""
    units: set[TimeUnit] = set()
    values = []
    for length in lengths.values():
        parts = [(factor, *_without_dur(time, run)) for factor, time in length]
        units.update(unit for _, _, unit in parts)
        values.append(snapped(sum(factor * value for factor, value, _ in parts)))
    if len(units) > 1:
        raise UnitError(
            f"{' and '.join(f'{name}={_shown(length)}' for name, length in lengths.items() if length)} have no unit in "
            f"common in a run of {run}; write both in one unit, or give the run batches_per_epoch and a duration in "
            "epochs or batches"
        )
    return units.pop(), values


def _without_dur(time: Time, run: RunLength) -> tuple[float, TimeUnit]:
    """Return a time as value and unit; a fraction of the run is converted to the unit of the run's duration."""
    if time.unit is not TimeUnit.DURATION:
        return time.value, time.unit
    if run.duration is None:
        raise ValueError(
            f"{time} is a fraction of a run that has no duration; give it one, State.create(..., duration='20ep')"
        )
    if run.duration.unit is TimeUnit.SECOND:
        raise ValueError(
            f"{time} of {run.duration} is wall-clock time, which is not part of the state; "
            "in a run of limited seconds, give the schedule an absolute time such as '500ba'"
        )
    return time.value * run.duration.value, run.duration.unit


def _shown(parts: Iterable[tuple[float, Time]]) -> str:
    return " + ".join(str(time) if factor == 1 else f"{factor:g} * {time}" for factor, time in parts)


class Shape:
    """A multiplier at a moment; unlike a plain function of the timestamp, it may apply to a part of a run.

    The shapes are frozen dataclasses of numbers and times, so that schedules with equal settings are equal.
    """

    def __call__(self, timestamp: Timestamp) -> float:
        """Return the multiplier at a point of a run, where the schedule applies to the whole run."""
        return self.at(Moment(timestamp))

    def at(self, moment: Moment) -> float:
        """Return the multiplier at a moment."""
        raise NotImplementedError

    def times(self, *, with_warmup: bool) -> tuple[Time, ...]:
        """Return all times that the shape depends on, with or without those of warm-ups."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Curve:
    """A function of an elapsed fraction, or a number of periods, with settings; equal to others with the same ones."""

    fn: Callable[..., float]
    settings: tuple[float, ...]

    def __call__(self, elapsed: float) -> float:
        """Return the multiplier."""
        return self.fn(elapsed, *self.settings)


@dataclasses.dataclass(frozen=True)
class Stretched(Shape):
    """A shape whose absolute times are multiplied by these factors."""

    shape: Shape
    ratio: float
    warmup_ratio: float

    def at(self, moment: Moment) -> float:
        timestamp, start, whole, ratio, warmup_ratio = moment
        return self.shape.at(Moment(timestamp, start, whole, ratio * self.ratio, warmup_ratio * self.warmup_ratio))

    def times(self, *, with_warmup: bool) -> tuple[Time, ...]:
        return self.shape.times(with_warmup=with_warmup)


def stretched(shape: Shape, ratio: float, *, scale_warmup: bool) -> Shape:
    """Return the shape with its absolute times multiplied by a factor, or the shape itself if none would change."""
    if not any(time and time.unit is not TimeUnit.DURATION for time in shape.times(with_warmup=scale_warmup)):
        return shape
    inner, own = (shape.shape, shape) if isinstance(shape, Stretched) else (shape, Stretched(shape, 1.0, 1.0))
    ratios = own.ratio * ratio, own.warmup_ratio * (ratio if scale_warmup else 1.0)
    return inner if ratios == (1.0, 1.0) else Stretched(inner, *ratios)
