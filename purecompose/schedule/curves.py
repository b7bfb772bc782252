"""Schedules with an end: a curve up to `t_max`, after a linear warm-up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from purecompose._support.specs import check_number, suggests_keywords
from purecompose.schedule.scalar import Schedule, made
from purecompose.schedule.shape import Curve, Moment, Shape, checked_time
from purecompose.time import Time, TimeLike


@suggests_keywords
def constant(alpha: float = 1.0, warmup: TimeLike = "0ba") -> Schedule:
    """Return the multiplier `alpha`, after a linear warm-up from 0.

    Args:
        alpha: The multiplier.
        warmup: Duration of the ramp from 0 to `alpha`, in any unit except `sec`.

    Raises:
        TypeError, ValueError: A setting is neither a number nor a time; see also `linear`.

    Example:
        >>> from purecompose.time import Timestamp
        >>> [constant(warmup="4ba")(Timestamp(batch=t)) for t in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]
    """
    alpha = check_number(alpha, "constant: alpha")
    start = checked_time(warmup, "constant: warmup")
    return made("constant", _Annealed(Curve(_line, (alpha, alpha)), None, start), alpha=alpha, warmup=start)


@suggests_keywords
def linear(alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: TimeLike = "1dur", warmup: TimeLike = "0ba") -> Schedule:
    """Return a straight line from `alpha_i` to `alpha_f`, after a linear warm-up from 0 to `alpha_i`.

    With tau = clip((t - warmup) / (t_max - warmup), 0, 1) the multiplier is alpha_i + tau (alpha_f -
    alpha_i); during the warm-up it is alpha_i t / warmup.

    Args:
        alpha_i: The multiplier at the end of the warm-up.
        alpha_f: The multiplier from `t_max` on.
        t_max: Time at which `alpha_f` is reached, counted from the start of the run, including the warm-up.
        warmup: Duration of the ramp from 0. Like `t_max` in any unit except `sec`; both are counted in batches if the
            run can convert them, otherwise both must have the same unit.

    Raises:
        TypeError: An alpha is not a number.
        ValueError: A time cannot be parsed, is negative or in seconds, or the warm-up is longer than `t_max`.

    Example:
        >>> from purecompose.time import RunLength, Timestamp
        >>> run = RunLength("8ba")
        >>> [linear()(Timestamp(batch=t, run=run)) for t in (0, 2, 8)]
        [1.0, 0.75, 0.0]
    """
    alphas = {"alpha_i": check_number(alpha_i, "linear: alpha_i"), "alpha_f": check_number(alpha_f, "linear: alpha_f")}
    return _annealed("linear", alphas, _line, t_max, warmup)


@suggests_keywords
def cosine(*, alpha_f: float = 0.0, t_max: TimeLike = "1dur", warmup: TimeLike = "0ba") -> Schedule:
    """Return half a cosine from 1 to `alpha_f`, after a linear warm-up from 0 to 1.

    With tau as in `linear`, the multiplier is alpha_f + (1 - alpha_f) (1 + cos(pi tau)) / 2. It begins at 1, so that a
    rate of 0.1 is `0.1 * cosine()`; settings need their names, since elsewhere the first is a rate or a duration.

    Args:
        alpha_f: The multiplier from `t_max` on.
        t_max: Time at which `alpha_f` is reached, counted from the start of the run, including the warm-up.
        warmup: Duration of the ramp from 0 to 1.

    Raises:
        TypeError, ValueError: As for `linear`.

    Example:
        >>> from purecompose.time import Timestamp
        >>> round(cosine(t_max="50ba")(Timestamp(batch=20)), 6)
        0.654508

    References:
        Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts, 2017, arXiv:1608.03983.
    """
    alphas = {"alpha_f": check_number(alpha_f, "cosine: alpha_f")}
    return _annealed("cosine", alphas, half_cosine, t_max, warmup)


@suggests_keywords
def polynomial(power: float, t_max: TimeLike = "1dur", alpha_f: float = 0.0, warmup: TimeLike = "0ba") -> Schedule:
    """Return a power of the remaining time, from 1 to `alpha_f`, after a linear warm-up from 0 to 1.

    With tau as in `linear`, the multiplier is alpha_f + (1 - alpha_f) (1 - tau)^power.

    Args:
        power: The exponent, above 0; 1 gives a straight line.
        t_max: Time at which `alpha_f` is reached, counted from the start of the run, including the warm-up.
        alpha_f: The multiplier from `t_max` on.
        warmup: Duration of the ramp from 0 to 1.

    Raises:
        TypeError, ValueError: As for `linear`; or the power is not above 0.

    Example:
        >>> from purecompose.time import Timestamp
        >>> polynomial(2, t_max="10ba")(Timestamp(batch=5))
        0.25
    """
    settings = {
        "power": check_number(power, "polynomial: power", 0, above=True),
        "alpha_f": check_number(alpha_f, "polynomial: alpha_f"),
    }
    return _annealed("polynomial", settings, _power, t_max, warmup)


@suggests_keywords
def one_cycle(
    alpha_i: float = 0.04, alpha_f: float = 4e-6, peak: TimeLike = "0.3dur", t_max: TimeLike = "1dur"
) -> Schedule:
    """Return half a cosine from `alpha_i` up to 1 at the peak, and another one down to `alpha_f`.

    Before the peak the multiplier is alpha_i + (1 - alpha_i) (1 - cos(pi t / peak)) / 2, after it the `cosine` from 1
    to `alpha_f`. The defaults are those of `torch.optim.lr_scheduler.OneCycleLR`, relative to its `max_lr`. For its
    momentum use a `one_cycle` whose ends are above 1: `momentum=0.85 * one_cycle(0.95 / 0.85, 0.95 / 0.85)`.

    Args:
        alpha_i: The multiplier at the start.
        alpha_f: The multiplier from `t_max` on.
        peak: Time at which the multiplier is 1, counted from the start of the run. Like `t_max` in any unit except
            `sec`.
        t_max: Time at which `alpha_f` is reached.

    Raises:
        TypeError, ValueError: As for `linear`.

    Example:
        >>> from purecompose.time import Timestamp
        >>> curve = one_cycle(0.5, 0.0, "2ba", "6ba")
        >>> [round(curve(Timestamp(batch=t)), 2) for t in range(7)]
        [0.5, 0.75, 1.0, 0.85, 0.5, 0.15, 0.0]

    References:
        Smith and Topin, Super-convergence: very fast training of neural networks using large learning rates, 2018,
        arXiv:1708.07120.
    """
    first, last = check_number(alpha_i, "one_cycle: alpha_i"), check_number(alpha_f, "one_cycle: alpha_f")
    top, end = (
        checked_time(time, f"one_cycle: {role}", is_positive=True) for time, role in ((peak, "peak"), (t_max, "t_max"))
    )
    if top.unit is end.unit and top > end:
        raise ValueError(f"one_cycle: peak={top} comes after t_max={end}")
    shape = _OneCycle(first, last, top, end)
    return made("one_cycle", shape, alpha_i=first, alpha_f=last, peak=top, t_max=end)


# Curves: tau in [0, 1] -> multiplier.


def _line(tau: float, alpha_i: float, alpha_f: float) -> float:
    # A weighted sum, not alpha_i + tau * difference, so that tau = 1 returns exactly alpha_f.
    return (1.0 - tau) * alpha_i + tau * alpha_f


def half_cosine(tau: float, alpha_f: float) -> float:
    """Return half a cosine from 1 to `alpha_f`."""
    return alpha_f + (1.0 - alpha_f) * (1.0 + math.cos(math.pi * tau)) / 2.0


def _power(tau: float, power: float, alpha_f: float) -> float:
    return alpha_f + (1.0 - alpha_f) * (1.0 - tau) ** power


@dataclasses.dataclass(frozen=True)
class _Annealed(Shape):
    """Warm-up from 0 to curve(0), then the curve over the rest up to `t_max` (if None, tau remains 0)."""

    curve: Curve
    t_max: Time | None
    warmup: Time

    def at(self, moment: Moment) -> float:
        t, warmup, t_max = moment.numbers(self.warmup, "t_max", self.t_max)
        if warmup > t_max > 0:  # in a part of a sequence that begins at the run's end, t_max may be 0
            is_left = moment.ratio != moment.warmup_ratio
            hint = "scale_warmup=True scales both" if is_left else "shorten the warmup or increase t_max"
            raise ValueError(
                f"warmup={self.warmup} is longer than t_max={self.t_max}, which includes it: "
                f"{warmup:g} against {t_max:g} in this run; {hint}"
            )
        if t < warmup:
            return self.curve(0.0) * t / warmup
        return self.curve(_tau(t - warmup, t_max - warmup))

    def times(self, *, with_warmup: bool) -> tuple[Time, ...]:
        end = () if self.t_max is None else (self.t_max,)
        return (self.warmup, *end) if with_warmup else end


@dataclasses.dataclass(frozen=True)
class _OneCycle(Shape):
    """A reversed curve up to the peak, then another one."""

    alpha_i: float
    alpha_f: float
    peak: Time
    t_max: Time

    def at(self, moment: Moment) -> float:
        # Both phases are stretched; the peak is not treated as a warm-up, which would keep its length.
        t, peak, end = moment._replace(warmup_ratio=moment.ratio).numbers(self.peak, "t_max", self.t_max)
        if t < peak:
            return half_cosine(1.0 - t / peak, self.alpha_i)
        return half_cosine(_tau(t - peak, end - peak), self.alpha_f)

    def times(self, *, with_warmup: bool) -> tuple[Time, ...]:
        del with_warmup
        return self.peak, self.t_max


def _tau(t: float, length: float) -> float:
    """Return the elapsed fraction of `length`, at most 1. A length of 0 has fully elapsed as soon as t > 0."""
    if t >= length:
        return 1.0 if t > 0 else 0.0
    return t / length


def _annealed(
    where: str, settings: dict[str, float], fn: Callable[..., float], t_max: TimeLike, warmup: TimeLike
) -> Schedule:
    end, start = checked_time(t_max, f"{where}: t_max", is_positive=True), checked_time(warmup, f"{where}: warmup")
    if end.unit is start.unit and start > end:
        raise ValueError(f"{where}: warmup={start} is longer than t_max={end}, which includes it")
    shape = _Annealed(Curve(fn, tuple(settings.values())), end, start)
    return made(where, shape, **settings, warmup=start, t_max=end)
