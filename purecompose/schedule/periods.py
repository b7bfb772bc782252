"""Schedules by periods or milestones, sequences of schedules, and schedulers of torch."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from purecompose._support.specs import check_number, frozen, is_number, shown, suggests_keywords
from purecompose.schedule.curves import half_cosine
from purecompose.schedule.scalar import Product, Scalar, Schedule, collect, made
from purecompose.schedule.shape import Curve, Moment, Shape, checked_time
from purecompose.time import Time, TimeLike, Timestamp, TimeUnit
from purecompose.time.event import snapped


@suggests_keywords
def step(step_size: TimeLike, gamma: float = 0.1, warmup: TimeLike = "0ba") -> Schedule:
    """Return a multiplier that falls by the factor `gamma` after every `step_size`, after a linear warm-up from 0 to 1.

    The multiplier is gamma^floor((t - warmup) / step_size); during the warm-up it is t / warmup.

    Args:
        step_size: Time between falls, counted from the end of the warm-up.
        gamma: The factor, at least 0.
        warmup: Duration of the ramp from 0 to 1. Like `step_size` in any unit except `sec`; both are counted in batches
            if the run can convert them, otherwise both must have the same unit.

    Raises:
        TypeError: `gamma` is not a number.
        ValueError: A time cannot be parsed or is out of range.

    Example:
        >>> from purecompose.time import Timestamp
        >>> [step("2ba", 0.5)(Timestamp(batch=t)) for t in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    gamma = check_number(gamma, "step: gamma", 0)
    period, start = _checked("step", "step_size", step_size, warmup)
    return made("step", _Periodic(Curve(_steps, (gamma,)), period, start), step_size=period, gamma=gamma, warmup=start)


@suggests_keywords
def exponential(gamma: float, decay_period: TimeLike = "1ep", warmup: TimeLike = "0ba") -> Schedule:
    """Return a multiplier that falls by the factor `gamma` in every `decay_period`, after a linear warm-up from 0 to 1.

    The multiplier is gamma^((t - warmup) / decay_period), with fractional exponents; during the warm-up it is
    t / warmup.

    Args:
        gamma: The factor, above 0.
        decay_period: The time in which the multiplier falls by `gamma`, counted from the end of the warm-up.
        warmup: Duration of the ramp from 0 to 1; as for `step`.

    Raises:
        TypeError, ValueError: As for `step`.

    Example:
        >>> from purecompose.time import Timestamp
        >>> [exponential(0.25, "2ba")(Timestamp(batch=t)) for t in range(4)]
        [1.0, 0.5, 0.25, 0.125]
    """
    gamma = check_number(gamma, "exponential: gamma", 0, above=True)
    period, start = _checked("exponential", "decay_period", decay_period, warmup)
    shape = _Periodic(Curve(_decay, (gamma,)), period, start)
    return made("exponential", shape, gamma=gamma, decay_period=period, warmup=start)


@suggests_keywords
def cosine_warm_restarts(
    t_0: TimeLike, t_mult: float = 1.0, alpha_f: float = 0.0, warmup: TimeLike = "0ba"
) -> Schedule:
    """Return repeated half cosines from 1 towards `alpha_f`, after a linear warm-up from 0 to 1.

    The first one takes `t_0`, each later one `t_mult` times as long as the previous one. With tau in [0, 1) the
    elapsed fraction of the current one, the multiplier is alpha_f + (1 - alpha_f) (1 + cos(pi tau)) / 2.

    Args:
        t_0: Duration of the first half cosine, counted from the end of the warm-up.
        t_mult: The factor from one duration to the next, at least 1. Durations are not rounded.
        alpha_f: The value towards which each of them falls.
        warmup: Duration of the ramp from 0 to 1; as for `step`.

    Raises:
        TypeError, ValueError: As for `step`; or `t_mult` is below 1.

    Example:
        >>> from purecompose.time import Timestamp
        >>> [round(cosine_warm_restarts("2ba", 2.0)(Timestamp(batch=t)), 2) for t in range(7)]
        [1.0, 0.5, 1.0, 0.85, 0.5, 0.15, 1.0]

    References:
        Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts, 2017, arXiv:1608.03983.
    """
    t_mult = check_number(t_mult, "cosine_warm_restarts: t_mult", 1)
    alpha_f = check_number(alpha_f, "cosine_warm_restarts: alpha_f")
    period, start = _checked("cosine_warm_restarts", "t_0", t_0, warmup)
    shape = _Periodic(Curve(_restarts, (t_mult, alpha_f)), period, start)
    return made("cosine_warm_restarts", shape, t_0=period, t_mult=t_mult, alpha_f=alpha_f, warmup=start)


@suggests_keywords
def multi_step(milestones: Iterable[TimeLike], gamma: float = 0.1, warmup: TimeLike = "0ba") -> Schedule:
    """Return a multiplier that falls by the factor `gamma` at every milestone, after a linear warm-up from 0 to 1.

    The multiplier is gamma^n, with n the number of milestones that t has reached; during the warm-up it is t / warmup,
    so that a milestone within the warm-up takes effect at its end.

    Args:
        milestones: Points of the run, counted from its start, including the warm-up; each in any unit except `sec`.
        gamma: The factor, at least 0.
        warmup: Duration of the ramp from 0 to 1, in any unit except `sec`.

    Raises:
        TypeError, ValueError: As for `step`; or there are no milestones.

    Example:
        >>> from purecompose.time import Timestamp
        >>> [multi_step(["2ba", "3ba"], 0.5)(Timestamp(batch=t)) for t in range(5)]
        [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    points = checked_times(milestones, "multi_step: milestones")
    if not points:
        raise ValueError("multi_step: expected at least one milestone, got none; use constant() to change nothing")
    gamma, start = check_number(gamma, "multi_step: gamma", 0), checked_time(warmup, "multi_step: warmup")
    return made("multi_step", _Milestones(gamma, points, start), milestones=points, gamma=gamma, warmup=start)


def checked_times(times: Iterable[TimeLike], where: str) -> tuple[Time, ...]:
    """Return several times that a schedule can follow."""
    if isinstance(times, str | Time) or not isinstance(times, Iterable):
        raise TypeError(f"{where}: expected a sequence of times, such as ['30ep', '60ep'], got {shown(times)}")
    return tuple(checked_time(time, f"{where}[{index}]") for index, time in enumerate(times))


# Curves: number of periods since the warm-up -> multiplier.


def _steps(periods: float, gamma: float) -> float:
    return gamma ** math.floor(periods)


def _decay(periods: float, gamma: float) -> float:
    return gamma**periods


def _restarts(periods: float, t_mult: float, alpha_f: float) -> float:
    growth = t_mult - 1.0
    if growth == 0:
        return half_cosine(periods - math.floor(periods), alpha_f)
    number = math.floor(math.log1p(min(periods * growth, sys.float_info.max)) / math.log(t_mult))
    # The logarithms may be off in the last bit, which matters right at a restart.
    while _restart(number, t_mult) > periods:
        number -= 1
    while _restart(number + 1, t_mult) <= periods:
        number += 1
    return half_cosine((periods - _restart(number, t_mult)) / t_mult**number, alpha_f)


def _restart(number: int, t_mult: float) -> float:
    """Return 1 + t_mult + ... + t_mult^(number - 1), or infinity if that is beyond a float's range."""
    try:
        return (t_mult**number - 1.0) / (t_mult - 1.0)
    except OverflowError:
        return math.inf


@dataclasses.dataclass(frozen=True)
class _Periodic(Shape):
    """Warm-up from 0 to 1, then a curve over the number of periods since its end."""

    curve: Curve
    period: Time
    warmup: Time

    def at(self, moment: Moment) -> float:
        t, warmup, period = moment.numbers(self.warmup, "period", self.period)
        if t < warmup:
            return t / warmup
        # The period is 0 if it is a fraction of an empty part of the run, which ends as soon as the part begins.
        return self.curve(snapped((t - warmup) / period) if period else 0.0)

    def times(self, *, with_warmup: bool) -> tuple[Time, ...]:
        return (self.warmup, self.period) if with_warmup else (self.period,)


@dataclasses.dataclass(frozen=True)
class _Milestones(Shape):
    gamma: float
    milestones: tuple[Time, ...]
    warmup: Time

    def at(self, moment: Moment) -> float:
        t, warmup, _ = moment.numbers(self.warmup)
        if t < warmup:
            return t / warmup
        return self.gamma ** sum(moment.has_reached(milestone) for milestone in self.milestones)

    def times(self, *, with_warmup: bool) -> tuple[Time, ...]:
        return (self.warmup, *self.milestones) if with_warmup else self.milestones


def _checked(name: str, role: str, period: TimeLike, warmup: TimeLike) -> tuple[Time, Time]:
    return checked_time(period, f"{name}: {role}", is_positive=True), checked_time(warmup, f"{name}: warmup")


def sequence(schedules: Iterable[Scalar], milestones: Iterable[TimeLike]) -> Schedule:
    """Return schedules in sequence: the first up to the first milestone, the second from there to the next, and so on.

    Each schedule treats its part as a separate run: its time counts from the beginning of its part, and "1dur" is the
    part's length (for the last one, the rest of the run). The value at a milestone is the first of the next schedule.

    Args:
        schedules: Numbers, schedules, or products of them, but no plain functions of the timestamp, which do not
            restart.
        milestones: Beginnings of the parts, from the second on, counted from the start of the run: one fewer than
            schedules, in increasing order, in any unit except `sec`.

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
            "multiply the sequence by it"
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

    The scheduler is run ahead, on a separate optimizer, so runs resume exactly. Settings that torch takes as learning
    rates (`eta_min`, `max_lr`, `base_lr`) are multipliers here. A scheduler's changes of momentum are ignored.

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
