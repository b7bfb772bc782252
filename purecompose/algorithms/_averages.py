"""What methods that average weights have in common: means, and times at which they are taken."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from purecompose.intervals import checked_interval
from purecompose.schedule import Schedule
from purecompose.time import Time, TimeLike, Timestamp, TimeUnit


__all__ = ["Measure", "as_scalar", "between", "checked_every", "gone", "measure", "point"]

_COUNTED = (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION)


def as_scalar(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number or a 0-d tensor as a tensor; a number is filled in, not copied from the host, which would wait."""
    if isinstance(value, Tensor):
        return value.to(dtype=dtype, device=device)
    return torch.full((), value, dtype=dtype, device=device)


def between(low: Mapping[str, Tensor], high: Mapping[str, Tensor], share: float | Tensor) -> dict[str, Tensor]:
    """`low + share * (high - low)`, element by element, in the dtypes of `low`; with 0 and 1 exactly these two.

    The share, a number or a 0-d tensor, is rounded to each dtype as late as possible: give a small one in float64.

    Raises:
        KeyError: `high` lacks a name.
    """
    kinds = dict.fromkeys((value.dtype, value.device) for value in low.values())
    shares = {kind: as_scalar(share, *kind) for kind in kinds}
    return {
        name: torch.lerp(value, high[name].to(value.dtype), shares[value.dtype, value.device])
        for name, value in low.items()
    }


# Times


def checked_every(value: TimeLike, where: str) -> Time:
    """An interval that batches count.

    Raises:
        TypeError, ValueError: It is no time, not positive, or in another unit than batches, epochs or `dur`.
    """
    interval = checked_interval(Time.of(value, TimeUnit.BATCH), where)
    if interval.unit not in _COUNTED:
        raise ValueError(f"{where}={value!r}: expected batches (ba), epochs (ep) or a share of the run (dur)")
    return interval


def point(value: TimeLike | float, where: str) -> Time:
    """A point of the run: a share of it, or a time.

    Raises:
        TypeError, ValueError: It is no time, negative, a share above 1, or in seconds.
    """
    time = Time.of(value, TimeUnit.DURATION)
    if time.unit is TimeUnit.SECOND:
        raise ValueError(f"{where}={value!r}: wall-clock time is no part of a state; use batches, epochs or a share")
    if not 0 <= time.value <= (1 if time.unit is TimeUnit.DURATION else time.value):
        raise ValueError(f"{where}={value!r}: expected a share of the run in [0, 1], or a time from 0 on")
    return time


@dataclasses.dataclass(frozen=True)
class Measure:
    """A time by which traced code measures others: two numbers that the host tells in every step, in one counter.

    Both are needed: what a slot remembers in `now` stays true where another run goes on with another `length`.
    """

    time: Time
    now: Schedule
    """What the counter stands at: batches where the time can be told in them, else samples, tokens, epochs."""
    length: Schedule
    """How long the time is."""

    def __repr__(self) -> str:
        return repr(str(self.time))


def measure(time: Time) -> Measure:
    """Makes a measure of a time, positive and not in seconds.

    Example:
        >>> two = measure(Time.of("2ep"))
        >>> two.now(Timestamp(batch=30, epoch=3)), two.length(Timestamp(batch=30, epoch=3))
        (3.0, 2.0)
    """
    words = repr(str(time))
    return Measure(time, Schedule(_Counted(time, 0), words), Schedule(_Counted(time, 1), words))


def gone(timestamp: Timestamp, time: Time) -> float:
    """How often a time, positive and not in seconds, has gone by at a point of a run.

    Raises:
        ValueError: A share of a run without a duration, or with one in seconds.
    """
    now, length = _counted(timestamp, time)
    return now / length


def _counted(timestamp: Timestamp, time: Time) -> tuple[float, float]:
    """What a counter stands at, and how long the time is by it."""
    in_batches = timestamp.run.in_batches(time)
    if in_batches is not None:
        return timestamp.batch, in_batches
    if time.unit is not TimeUnit.DURATION:
        return timestamp.get(time.unit), time.value
    duration = timestamp.run.duration
    if duration is None or duration.unit is TimeUnit.SECOND:
        has = "no duration" if duration is None else f"a duration of {duration}"
        raise ValueError(f"{time} is a share of a run that has {has}; give State.create one in batches or epochs")
    return timestamp.get(duration.unit), time.value * duration.value


@dataclasses.dataclass(frozen=True)
class _Counted:
    time: Time
    index: int

    def __call__(self, timestamp: Timestamp) -> float:
        return float(_counted(timestamp, self.time)[self.index])
