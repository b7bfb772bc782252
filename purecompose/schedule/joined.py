"""Schedules joined from others: sequences of schedules, and schedulers of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from purecompose._support.checks import frozen, is_number, shown
from purecompose.schedule.periods import checked_times
from purecompose.schedule.scalar import Product, Scalar, Schedule, collect, made
from purecompose.schedule.shape import Moment, Shape, checked_time
from purecompose.time import Time, TimeLike, Timestamp, TimeUnit


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


def from_torch(make: Callable[..., Any], *, every: TimeLike = "1ep", **settings: Any) -> Schedule:
    """Return the multiplier that a scheduler of torch sets on an optimizer whose learning rate is 1.

    The scheduler is run ahead, on a separate optimizer, and its values are stored: the schedule is a function of
    time, so runs resume exactly from any batch. Settings that torch takes as learning rates (`eta_min`, `max_lr`,
    `base_lr`) are multipliers here. A scheduler's changes of momentum are ignored.

    Args:
        make: A class of `torch.optim.lr_scheduler`, or a function `(optimizer, **settings) -> scheduler`.
        every: Interval between the scheduler's steps, in epochs or batches: "1ep", "1ba".
        **settings: Settings of the scheduler.

    Raises:
        TypeError: The scheduler steps by a metric; use `purecompose.ReduceOnPlateau` instead.
        ValueError: The interval is not positive, or in another unit. Also raised by torch at a time past the end of a
            scheduler that has a fixed number of steps.

    Example:
        >>> halving = from_torch(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
        >>> [halving(Timestamp(epoch=epoch)) for epoch in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    if make is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise TypeError(
            "schedule.from_torch: ReduceLROnPlateau steps by a metric, and a schedule is a function of time: use "
            'fit(..., adjust=purecompose.ReduceOnPlateau("eval/loss"))'
        )
    every = checked_time(every, "schedule.from_torch: every", is_positive=True)
    if every.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH):
        raise ValueError(f"schedule.from_torch: every={every}: expected epochs or batches")
    if not callable(make):
        raise TypeError(f"schedule.from_torch: expected a class of torch.optim.lr_scheduler, got {shown(make)}")
    values = _Values(make, tuple((name, frozen(value)) for name, value in sorted(settings.items())), every)
    values.at(0)  # raises here if a setting is wrong
    given = "".join(f", {name}={value!r}" for name, value in settings.items())
    return Schedule(values, f"from_torch({getattr(make, '__name__', make)}, every={str(every)!r}{given})")


@dataclasses.dataclass(frozen=True)
class _Values:
    make: Callable[..., Any]
    settings: tuple[tuple[str, Any], ...]
    every: Time
    _known: list[float] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def __call__(self, timestamp: Timestamp) -> float:
        return self.at(int(timestamp.get(self.every.unit) // self.every.value))

    def at(self, num_steps: int) -> float:
        """Return the value after `num_steps` steps. The scheduler runs from its start, twice as far as needed."""
        if num_steps >= len(self._known):
            self._known[:] = self._run(num_steps, 2 * num_steps + 1)
        return self._known[num_steps]

    def _run(self, needed: int, num: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
        scheduler = self.make(optimizer, **dict(self.settings))
        values = [float(optimizer.param_groups[0]["lr"])]
        while len(values) < num:
            optimizer.step()
            try:
                scheduler.step()
            except ValueError:  # a scheduler with a fixed number of steps, such as OneCycleLR, has ended
                if len(values) <= needed:
                    raise
                break
            values.append(float(optimizer.param_groups[0]["lr"]))
        return values
