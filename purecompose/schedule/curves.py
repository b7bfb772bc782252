"""Schedules of the shapes in common use. Each is a curve over the run, after a linear warm-up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from purecompose._checks import check_number
from purecompose.schedule.scalar import Schedule
from purecompose.time import RunLength, Time, TimeLike, Timestamp, TimeUnit, UnitError


__all__ = ["constant", "cosine", "linear"]


def constant(alpha: float = 1.0, warmup: TimeLike = "0ba", *, t_max: TimeLike | None = None) -> Schedule:
    """The multiplier `alpha`, after a linear warm-up from 0.

    Args:
        alpha: the multiplier.
        warmup: how long the ramp from 0 to `alpha` takes, in any unit but `sec`.
        t_max: where given, the multiplier is 1 from this point on; by default `alpha` holds for good.

    Raises:
        TypeError, ValueError: a setting that is no number or no time; see also `linear`.

    Example:
        >>> [constant(warmup="4ba")(Timestamp(batch=t)) for t in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]
    """
    alpha = check_number(alpha, "constant: alpha")
    curve = _Constant(alpha, 1.0 if t_max is not None else alpha)
    return _annealed("constant", {"alpha": alpha}, curve, t_max, warmup)


def linear(
    alpha_i: float = 1.0,
    alpha_f: float = 0.0,
    t_max: TimeLike = "1dur",
    warmup: TimeLike = "0ba",
) -> Schedule:
    """A straight line from `alpha_i` to `alpha_f`, after a linear warm-up from 0 to `alpha_i`.

    With tau = clip((t - warmup) / (t_max - warmup), 0, 1) the multiplier is alpha_i + tau (alpha_f -
    alpha_i); during the warm-up it is alpha_i t / warmup.

    Args:
        alpha_i: the multiplier at the end of the warm-up.
        alpha_f: the multiplier from `t_max` on.
        t_max: when `alpha_f` is reached, counted from the start of the run, warm-up included.
        warmup: how long the ramp from 0 takes. Like `t_max` in any unit but `sec`; both count in batches
            where the run can tell, otherwise both must have one unit (and in epochs of unknown length, the
            multiplier moves at their ends alone).

    Raises:
        TypeError: an alpha that is no number.
        ValueError: a time that cannot be read, is negative or in seconds, or a warm-up longer than `t_max`.

    Example:
        >>> from purecompose.time import RunLength
        >>> run = RunLength("8ba")
        >>> [linear()(Timestamp(batch=t, run=run)) for t in (0, 2, 8)]
        [1.0, 0.75, 0.0]
    """
    alphas = {"alpha_i": check_number(alpha_i, "linear: alpha_i"), "alpha_f": check_number(alpha_f, "linear: alpha_f")}
    return _annealed("linear", alphas, _Linear(**alphas), t_max, warmup)


def cosine(alpha_f: float = 0.0, t_max: TimeLike = "1dur", warmup: TimeLike = "0ba") -> Schedule:
    """Half a cosine from 1 to `alpha_f`, after a linear warm-up from 0 to 1.

    With tau as in `linear`, the multiplier is alpha_f + (1 - alpha_f) (1 + cos(pi tau)) / 2.

    Args:
        alpha_f: the multiplier from `t_max` on.
        t_max: when `alpha_f` is reached, counted from the start of the run, warm-up included.
        warmup: how long the ramp from 0 to 1 takes.

    Raises:
        TypeError, ValueError: as for `linear`.

    Example:
        >>> round(cosine(t_max="50ba")(Timestamp(batch=20)), 6)
        0.654508

    References:
        Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts, 2017, arXiv:1608.03983.
    """
    alphas = {"alpha_f": check_number(alpha_f, "cosine: alpha_f")}
    return _annealed("cosine", alphas, _Cosine(**alphas), t_max, warmup)


# Curves: tau in [0, 1] -> multiplier. Every schedule with a warm-up is a curve in `_Annealed`.


@dataclasses.dataclass(frozen=True)
class _Constant:
    alpha: float
    afterwards: float

    def __call__(self, tau: float) -> float:
        return self.alpha if tau < 1.0 else self.afterwards


@dataclasses.dataclass(frozen=True)
class _Linear:
    alpha_i: float
    alpha_f: float

    def __call__(self, tau: float) -> float:
        # Weighted, not alpha_i + tau * difference, so that tau = 1 gives alpha_f to the last bit.
        return (1.0 - tau) * self.alpha_i + tau * self.alpha_f


@dataclasses.dataclass(frozen=True)
class _Cosine:
    alpha_f: float

    def __call__(self, tau: float) -> float:
        return self.alpha_f + (1.0 - self.alpha_f) * (1.0 + math.cos(math.pi * tau)) / 2.0


@dataclasses.dataclass(frozen=True)
class _Annealed:
    """Warm-up from 0 to curve(0), then the curve over the rest up to `t_max` (None: tau stays 0 for ever)."""

    curve: Callable[[float], float]
    t_max: Time | None
    warmup: Time

    def __call__(self, timestamp: Timestamp) -> float:
        t, warmup, t_max = _on_one_axis(timestamp, self.warmup, self.t_max)
        if warmup > t_max:
            raise ValueError(
                f"warmup={self.warmup} is longer than t_max={self.t_max}, which includes it: "
                f"{warmup:g} against {t_max:g} in this run; shorten the one or lengthen the other"
            )
        if t < warmup:
            return self.curve(0.0) * t / warmup
        return self.curve(_tau(t - warmup, t_max - warmup))


def _tau(t: float, length: float) -> float:
    """The fraction of `length` gone by, at most 1. Of a length of 0, all is gone as soon as t > 0."""
    if t >= length:
        return 1.0 if t > 0 else 0.0
    return t / length


def _on_one_axis(timestamp: Timestamp, warmup: Time, t_max: Time | None) -> tuple[float, float, float]:
    """Now, the warm-up and t_max as numbers of one unit: batches where the run can tell, else their own."""
    run = timestamp.run
    warmup_in_batches = run.in_batches(warmup) if warmup else 0.0
    t_max_in_batches = math.inf if t_max is None else run.in_batches(t_max)
    if warmup_in_batches is not None and t_max_in_batches is not None:
        return timestamp.batch, warmup_in_batches, t_max_in_batches
    # Zero is zero in every unit, so an absent warm-up takes no part in the choice; nor does an absent t_max.
    absolute = {time: _without_dur(time, run) for time in (warmup, t_max) if time}
    units = {unit for _, unit in absolute.values()}
    if len(units) > 1:
        raise UnitError(
            f"warmup={warmup} and t_max={t_max} have no unit in common in a run of {run}; write both in one "
            "unit, or tell the run its batches_per_epoch and count its duration in epochs or batches"
        )
    warmup_value = absolute[warmup][0] if warmup else 0.0
    t_max_value = absolute[t_max][0] if t_max is not None else math.inf
    return timestamp.get(units.pop()), warmup_value, t_max_value


def _without_dur(time: Time, run: RunLength) -> tuple[float, TimeUnit]:
    """A time as value and unit, a fraction of the run in the unit of the run's duration."""
    if time.unit is not TimeUnit.DURATION:
        return time.value, time.unit
    if run.duration is None:
        raise ValueError(
            f"{time} is a fraction of a run that has no duration; "
            "give the run one (State.create(..., duration='20ep')), or the schedule a time such as '500ba'"
        )
    if run.duration.unit is TimeUnit.SECOND:
        raise ValueError(
            f"{time} of {run.duration} is wall-clock time, which is not part of the state; "
            "in a run of limited seconds, give the schedule an absolute time such as '500ba'"
        )
    return time.value * run.duration.value, run.duration.unit


def _annealed(
    where: str, alphas: dict[str, float], curve: Callable[[float], float], t_max: TimeLike | None, warmup: TimeLike
) -> Schedule:
    end = None if t_max is None else _time(t_max, f"{where}: t_max")
    start = _time(warmup, f"{where}: warmup")
    if end is not None and not end:
        raise ValueError(f"{where}: expected t_max > 0, got {end}")
    if end is not None and end.unit is start.unit and start > end:
        raise ValueError(f"{where}: warmup={start} is longer than t_max={end}, which includes it")
    settings = {**alphas, "warmup": str(start), "t_max": None if end is None else str(end)}
    call = f"{where}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"
    return Schedule(_Annealed(curve, end, start), call)


def _time(time: TimeLike, where: str) -> Time:
    try:
        checked = Time.of(time)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error
    if checked.unit is TimeUnit.SECOND:
        raise ValueError(
            f"{where}={checked}: a schedule cannot follow wall-clock time, which is not part of the state; "
            "use batches, epochs, samples, tokens or a fraction of the run ('0.1dur')"
        )
    if checked < 0:
        raise ValueError(f"{where}: expected a time >= 0, got {checked}")
    return checked
