"""Sequences of schedules, each of which starts at its milestone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from purecompose._support.checks import is_number, shown
from purecompose.schedule.axis import Moment
from purecompose.schedule.periods import checked_times
from purecompose.schedule.scalar import Product, Scalar, Schedule, made
from purecompose.schedule.shape import Shape
from purecompose.schedule.trees import collect
from purecompose.time import Time, TimeLike


def sequence(schedules: Iterable[Scalar], milestones: Iterable[TimeLike]) -> Schedule:
    """Return schedules in sequence: the first up to the first milestone, the second from there to the next, and so on.

    Each schedule treats its part as a separate run: its time counts from the beginning of its part, and "1dur" is the
    part's length (for the last one, the rest of the run). So `linear(0.0, 1.0)` fills its part, and a `cosine()`
    after it decreases over all the rest; `linear(0.0, 1.0, t_max="100ba")` ends 100 batches after its part begins,
    and keeps its last value up to the next milestone. The value at a milestone is the first of the next schedule.

    Args:
        schedules: Numbers, schedules, or products of them, such as `[linear(0.0, 1.0), 0.5 * cosine()]`. A sequence
            may be one of them; a plain function of the timestamp cannot, since it does not restart.
        milestones: Beginnings of the parts, from the second on, counted from the start of the run: one fewer than
            schedules, in increasing order, in any unit except `sec`. A "dur" is a fraction of the run. A milestone that
            is reached before its predecessor takes effect only together with it.

    Milestones and the times in a part are counted in batches if the run can convert them, otherwise both must have the
    same unit.

    Raises:
        TypeError: An item is none of these, or an hparam, whose value a schedule does not know.
        ValueError: A time cannot be parsed or is out of range, or the milestones do not increase or do not match the
            number of schedules.

    Example:
        >>> from purecompose.time import RunLength, Timestamp
        >>> from purecompose.schedule import cosine, linear
        >>> curve, run = sequence([linear(0.0, 1.0), cosine()], ["4ba"]), RunLength("8ba")
        >>> [round(curve(Timestamp(batch=t, run=run)), 2) for t in range(9)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 0.85, 0.5, 0.15, 0.0]
    """
    parts, points = _checked_parts(schedules), checked_times(milestones, "sequence: milestones")
    if not parts or len(points) != len(parts) - 1:
        raise ValueError(
            f"sequence: expected one schedule more than milestones, got {len(parts)} and {len(points)}: the first "
            "begins with the run, each other one at a milestone"
        )
    for earlier, later in zip(points, points[1:], strict=False):
        if earlier.unit is later.unit and later <= earlier:
            raise ValueError(f"sequence: expected increasing milestones, got {later} after {earlier}")
    return made("sequence", _Sequence(parts, points), schedules=parts, milestones=points)


@dataclasses.dataclass(frozen=True)
class _Sequence(Shape):
    parts: tuple[Scalar, ...]
    milestones: tuple[Time, ...]

    def at(self, moment: Moment) -> float:
        begin = ()
        for part, milestone in zip(self.parts, self.milestones, strict=False):
            end = moment.length(milestone)
            if not moment.has_reached(milestone):
                return _value(part, moment.part(begin, end))
            begin = end
        return _value(self.parts[-1], moment.part(begin, moment.whole))

    def times(self, *, with_warmup: bool) -> tuple[Time, ...]:
        inner = [_shape(schedule).times(with_warmup=with_warmup) for schedule in collect(self.parts, Schedule)]
        return (*self.milestones, *(time for times in inner for time in times))


def _value(scalar: Scalar, moment: Moment) -> float:
    if isinstance(scalar, Product):
        return math.prod(_value(factor, moment) for factor in scalar.factors)
    return _shape(scalar).at(moment) if isinstance(scalar, Schedule) else float(scalar)  # pyright: ignore[reportArgumentType]


def _shape(schedule: Schedule) -> Shape:
    if not isinstance(schedule.fn, Shape):
        raise TypeError(
            f"sequence: {schedule!r} is a plain function of the timestamp, which does not start again at a milestone; "
            "multiply the sequence by it, or handle the parts inside the function"
        )
    return schedule.fn


def _checked_parts(schedules: Iterable[Scalar]) -> tuple[Scalar, ...]:
    if isinstance(schedules, str) or not isinstance(schedules, Iterable):
        raise TypeError(f"sequence: expected several schedules, got {shown(schedules)}")
    parts = tuple(schedules)
    for part in parts:
        for factor in part.factors if isinstance(part, Product) else (part,):
            if isinstance(factor, Schedule):
                _shape(factor)
            elif not is_number(factor):
                raise TypeError(f"sequence: expected numbers, schedules and products of them, got {shown(factor)}")
    return parts
