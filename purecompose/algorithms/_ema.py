"""EMA: an exponential moving average of the weights, for evaluation and export; training is not affected."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from purecompose._support.device import as_scalar
from purecompose.algorithms._parts.checks import Patterns, Period, Point, Where, checked_period
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.model import STATISTICS
from purecompose.optim.base import match_or_raise
from purecompose.schedule import Scalar, Schedule
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import Averages, with_weights
from purecompose.time import Time, TimeLike, Timestamp, TimeUnit, predicates
from purecompose.time.event import Event
from purecompose.time.predicates import after, on
from purecompose.time.units import named_time


@checked
def compute_ema(
    averages: Mapping[str, Tensor], weights: Mapping[str, Tensor], smoothing: float | Tensor
) -> dict[str, Tensor]:
    """Update averages with new weights: `smoothing * average + (1 - smoothing) * weight`, element by element.

    Args:
        averages: Floating tensors, by name.
        weights: Tensors with at least the same names, of the same shapes.
        smoothing: The factor s in [0, 1], a number or a 0-d tensor. 1 returns exactly the averages, 0 the weights.

    Returns:
        New tensors in the averages' dtypes.

    Example:
        >>> compute_ema({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 2.0])}, 0.75)["w"]
        tensor([1.5000, 2.0000])
    """
    # Compute 1 - s before rounding to the averages' dtype: for s = 0.999999, float32 keeps one digit of the difference.
    share = 1 - (smoothing.double() if isinstance(smoothing, Tensor) else smoothing)
    return between(averages, weights, share)


@factory
def ema(
    half_life: TimeLike | None = None,
    *,
    smoothing: Annotated[Scalar | None, Within(0, 1)] = None,
    warmup: Annotated[int | None, Within(1, hint="it counts updates of the average")] = None,
    power: Annotated[float | None, Within(0, above=True, hint="2/3 and 3/4 are common")] = None,
    start: Point = 0.0,
    every: Period = "1ba",
    buffers: Patterns = STATISTICS,
    where: Where = None,
    name: str = "ema",
) -> Algorithm:
    """Average the weights for evaluation and export.

        E <- s E + (1 - s) W,   s = 2^(-u / h)

    with W the weights after a step, u the interval between updates and h the half-life, in the same unit; or with a
    given number s. The first update sets E = W. With `warmup`, s is multiplied by 1 - exp(-n / warmup) after n updates;
    with `power` it is at most 1 - (1 + n)^(-power). The trainable parameters and the running statistics of
    normalization layers are averaged. Parameters that are frozen at INIT, and all other buffers, are those of the live
    network.

    The slot contains the averages, an `Averages`. Evaluation and prediction with `step=` use them, as in `fit`;
    `to_module(state, weights="ema")` and `with_weights(state, "ema")` return them. Until the first update they are the
    live weights. Training is the same with and without this method, bit for bit.

    Events: INIT; BATCH_END at each averaging step from `start` on; EVAL_START and PREDICT_START, where the averages
    replace the weights in a temporary state. Reads parameters and buffers.

    Args:
        half_life: The time after which the contribution of a weight is halved, in batches, epochs or as a share of the
            run: "100ba", "2ep", "0.01dur"; by default "1000ba" unless `smoothing` is given.
        smoothing: The factor s in [0, 1] for each update, instead of a half-life. An `hparam` or a schedule may be
            given, and gradients flow to an hparam.
        warmup: The number of updates in which s rises to 63 % of its value; 2000 is common.
        power: The exponent of the upper bound of s.
        start: The time at which averaging begins, a share of the run or a time.
        every: The interval between updates, counted from the beginning of the run, in the same units.
        buffers: Patterns (`fnmatch`) of the names of buffers to average; by default running means and variances.
            `("*",)` averages all floating buffers, `()` none.
        where: Pattern or patterns of the names of parameters and buffers to average, such as "student.*"; by default
            all. The others are those of the live network.
        name: Name of the algorithm, of its slot, and of the weights for `to_module`.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range, or both half-life and smoothing. At INIT: a
            pattern that matches no floating buffer, or in `where` no trainable parameter. In the step: an interval or a
            start that cannot be determined in this run.

    Example:
        >>> ema("100ba")
        ema(half_life='100ba', start='0.0dur', every='1ba')
        >>> ema(smoothing=0.99).config["smoothing"]
        0.99

    References:
        Boris T. Polyak, Anatoli B. Juditsky: Acceleration of Stochastic Approximation by Averaging. SIAM 30(4), 1992.
        Antti Tarvainen, Harri Valpola: Mean Teachers Are Better Role Models. NeurIPS 2017.
        https://arxiv.org/abs/1703.01780
    """
    start, every = Time.of(start, TimeUnit.DURATION), Time.of(every, TimeUnit.BATCH)
    factor = _factor(half_life, smoothing, every)

    def init(state: State) -> State:
        if buffers != STATISTICS:
            floating = [key for key, buffer in state.buffers.items() if buffer.is_floating_point()]
            for pattern in buffers:
                match_or_raise(pattern, floating, f"{name}: buffers: {pattern!r}", "floating buffer")
        for pattern in where or ():
            match_or_raise(pattern, state.context.trainable, f"{name}: where: {pattern!r}", "trainable parameter")
        averages = Averages.empty(state, tuple(buffers), tuple(where or ("*",)))
        return state.replace(slots={**state.slots, name: averages})

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return init(state)
        if event is not Event.BATCH_END:
            return with_weights(state, name)
        old = state.slots[name]
        # The first update takes the weights themselves.
        s = as_scalar(state.scalar(factor), torch.float64, state.device)
        if warmup is not None:
            s = s * (1 - torch.exp(-old.num.double() / warmup))
        if power is not None:
            s = torch.minimum(s, 1 - (1 + old.num.double()) ** -power)
        s = torch.where(old.num > 0, s, 0.0)
        params = compute_ema(old.params, state.params, s)
        statistics = compute_ema(old.buffers, state.buffers, s)
        new = Averages(params, _with_infinities(statistics, state.buffers), old.num + 1)
        return state.replace(slots={**state.slots, name: new})

    updates = on(Event.BATCH_END) & predicates.every(every)
    # A start at the beginning is left out: as a share of the run it would require the run's length.
    updates = updates & after(start) if start else updates
    config = {"half_life" if smoothing is None else "smoothing": factor, "start": str(start), "every": str(every)}
    config |= {key: value for key, value in (("warmup", warmup), ("power", power)) if value is not None}
    config |= {} if buffers == STATISTICS else {"buffers": buffers}
    config |= {} if where is None else {"where": where}
    return Algorithm(
        name,
        on(Event.INIT, Event.EVAL_START, Event.PREDICT_START) | updates,
        apply,
        traits=frozenset({Trait.AVERAGES_WEIGHTS}),
        runs_after=(Trait.REQUIRED_ON_LOAD, Trait.SETS_WEIGHTS),
        config=config,
    )


def _factor(half_life: TimeLike | None, smoothing: Scalar | None, every: Time) -> Scalar:
    """Return s, the share of the averages that an update keeps."""
    if half_life is not None and smoothing is not None:
        raise ValueError(f"ema: expected a half_life or a smoothing, got {half_life=} and {smoothing=}")
    if smoothing is not None:
        return smoothing
    given, share = "1000ba" if half_life is None else half_life, "a share that each update keeps is smoothing="
    time = checked_period(named_time(given, "ema: half_life", TimeUnit.BATCH, share=share), "ema: half_life")
    return Schedule(_Halving(time, every), repr(str(time)))


@dataclass(frozen=True)
class _Halving:
    """The share that is left after an interval; a function of time, since shares of the run depend on its length."""

    half_life: Time
    every: Time

    def __call__(self, timestamp: Timestamp) -> float:
        half_life, every = (timestamp.run.in_batches(time) for time in (self.half_life, self.every))
        if half_life is None or every is None:
            raise ValueError(
                f"ema: half_life={str(self.half_life)!r} and every={str(self.every)!r} cannot be counted in batches in "
                "this run: give State.create batches_per_epoch (and a duration, for shares of it), or give batches"
            )
        return 2 ** (-every / half_life)


def between(low: Mapping[str, Tensor], high: Mapping[str, Tensor], share: float | Tensor) -> dict[str, Tensor]:
    """Return `low + share * (high - low)` element by element, in the dtypes of `low`; exact for shares of 0 and 1.

    The share, a number or a 0-d tensor, is rounded to each dtype as late as possible: pass a small share in float64.

    Raises:
        KeyError: `high` lacks a name.
    """
    kinds = dict.fromkeys((value.dtype, value.device) for value in low.values())
    shares = {kind: as_scalar(share, *kind) for kind in kinds}
    return {
        name: torch.lerp(value, high[name].to(value.dtype), shares[value.dtype, value.device])
        for name, value in low.items()
    }


def _with_infinities(averages: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the averages with the buffers' infinities, as in masks; averaging inf with inf would be NaN."""
    return {name: torch.where(buffers[name].isinf(), buffers[name].to(a.dtype), a) for name, a in averages.items()}
