"""What methods that average weights have in common: times at which they do, how far a run has come, and rates."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purecompose.intervals import checked_interval
from purecompose.schedule import Scalar, Schedule
from purecompose.time import Time, TimeLike, Timestamp, TimeUnit


__all__ = ["as_scalar", "checked_every", "gone", "point", "time_in", "with_rate"]

_COUNTED = (TimeUnit.BATCH, TimeUnit.EPOCH, TimeUnit.DURATION)


def as_scalar(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number or a 0-d tensor as a tensor; a number is filled in, not copied from the host, which would wait."""
    if isinstance(value, Tensor):
        return value.to(dtype=dtype, device=device)
    return torch.full((), value, dtype=dtype, device=device)


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


def time_in(unit_of_time: Time) -> Schedule:
    """How many times this time has gone by: a number for each point of the run.

    Example:
        >>> time_in(Time.of("2ep"))(Timestamp(batch=30, epoch=3))
        1.5
    """
    return Schedule(_Gone(unit_of_time), repr(str(unit_of_time)))


def gone(timestamp: Timestamp, time: Time) -> float:
    """How often a time, positive and not in seconds, has gone by at a point of a run.

    Raises:
        ValueError: A share of a run without a duration.
    """
    in_batches = timestamp.run.in_batches(time)
    if in_batches is not None:
        return timestamp.batch / in_batches
    if time.unit is not TimeUnit.DURATION:
        return timestamp.get(time.unit) / time.value
    elapsed = timestamp.elapsed()
    if elapsed is None:
        raise ValueError(f"{time} is a share of a run that has no duration; give State.create one")
    return elapsed / time.value


def with_rate(optimizer: Any, change: Callable[[Scalar], Scalar], name: str) -> Any:
    """An optimizer with other learning rates, its own and those of its groups.

    Args:
        optimizer: A frozen dataclass with a field `lr`, or with one in its field `inner`.
        change: Makes a rate of a rate.
        name: The algorithm's, for errors.

    Raises:
        ValueError: It has no `lr`.
    """
    if hasattr(optimizer, "inner"):
        return dataclasses.replace(optimizer, inner=with_rate(optimizer.inner, change, name))
    if not hasattr(optimizer, "lr"):
        raise ValueError(f"{name}: expected an optimizer with a learning rate, a field lr, got {optimizer!r}")
    grouped = tuple(
        (pattern, tuple((option, change(value) if option == "lr" else value) for option, value in options))
        for pattern, options in getattr(optimizer, "groups", ())
    )
    changed: dict[str, Any] = {"lr": change(optimizer.lr), **({"groups": grouped} if grouped else {})}
    return dataclasses.replace(optimizer, **changed)


@dataclasses.dataclass(frozen=True)
class _Gone:
    time: Time

    def __call__(self, timestamp: Timestamp) -> float:
        return gone(timestamp, self.time)
