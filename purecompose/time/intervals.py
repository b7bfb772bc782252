"""Intervals, which are due when a multiple of them lies between two times."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast, overload

from purecompose.time import Time, Timestamp, TimeUnit
from purecompose.time.units import named_time


Interval: TypeAlias = Time | Callable[[Timestamp], bool]
"""A time, of which every multiple is due, or a function that returns whether a point of the run is due."""


@overload
def checked_interval(
    value: Any, name: str, default_unit: TimeUnit | None = None, *, seconds: bool = False, functions: Literal[True]
) -> Interval: ...


@overload
def checked_interval(value: Any, name: str, default_unit: TimeUnit | None = None, *, seconds: bool = False) -> Time: ...


def checked_interval(
    value: Any, name: str, default_unit: TimeUnit | None = None, *, seconds: bool = False, functions: bool = False
) -> Interval:
    """Return an interval as a time, or unchanged if it is a function."""
    if functions and callable(value) and not isinstance(value, type):
        return cast(Interval, value)
    interval = named_time(value, name, default_unit)
    if interval.value <= 0 or (interval.unit is TimeUnit.SECOND and not seconds):
        kind = "a positive time" if seconds else "a positive time that is not in seconds"
        raise ValueError(f"{name}={str(interval)!r}: expected {kind}")
    return interval


def has_passed(interval: Interval, before: Timestamp, now: Timestamp) -> bool:
    """Return whether a multiple of the interval lies after `before` and not after `now`; not for seconds.

    Example:
        >>> has_passed(Time.of("10ba"), Timestamp(batch=9), Timestamp(batch=10))
        True
    """
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
