"""Averages of weights for evaluation and export: exponential moving averages, and SWA, the mean at the end."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from purecompose._support.device import as_scalar
from purecompose._support.messages import warn
from purecompose.algorithms._parts import Patterns, Period, Point, Where, checked_period
from purecompose.core.algorithm import Algorithm, Apply, Trait, factory
from purecompose.core.state import State
from purecompose.nn.model import STATISTICS
from purecompose.optim.base import matched_or_raise
from purecompose.optim.wrapping import all_finite, map_leaves, settings_of, with_setting
from purecompose.schedule import Hparam, Product, Scalar, Schedule, collect, resolve
from purecompose.schedule.declared import Within, checked
from purecompose.schedule.scalar import factors_of, known_part
from purecompose.surgery.weights import Averages, statistics_of, with_batch, with_weights
from purecompose.time import RunLength, Time, TimeLike, Timestamp, TimeUnit, predicates
from purecompose.time.event import Event, named_time
from purecompose.time.predicates import Predicate, after, first_turn, on, through


@checked
def compute_ema(
    averages: Mapping[str, Tensor], weights: Mapping[str, Tensor], smoothing: float | Tensor
) -> dict[str, Tensor]:
    """Update averages with new weights: `smoothing * average + (1 - smoothing) * weight`, element by element.

    Args:
        averages: Tensors by name, such as a `state_dict`. Integers, as batch norm's counts, become those of `weights`.
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
        half_life: The time after which the contribution of a weight is halved, such as "100ba", "2ep" or "0.01dur"; by
            default "1000ba" unless `smoothing` is given.
        smoothing: The factor s in [0, 1] for each update, instead of a half-life; an `hparam` or a schedule may be
            given.
        warmup: The number of updates in which s rises to 63 % of its value; 2000 is common. By default it does not.
        power: The exponent of the upper bound of s; by default there is none.
        start: The time at which averaging begins, a share of the run or a time.
        every: The interval between updates, counted from the beginning of the run: batches, epochs or a share of the
            run; by default every batch.
        buffers: Patterns (`fnmatch`) of the names of buffers to average; by default running means and variances.
            `("*",)` averages all floating buffers, `()` none.
        where: Pattern or patterns of the names of parameters and buffers to average, such as "student.*"; by default
            all.
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
        Boris T. Polyak, Anatoli B. Juditsky: Acceleration of Stochastic Approximation by Averaging. SIAM Journal on
        Control and Optimization 30(4), 1992.
        Antti Tarvainen, Harri Valpola: Mean Teachers Are Better Role Models. NeurIPS 2017.
        https://arxiv.org/abs/1703.01780
    """
    start, every = Time.of(start, TimeUnit.DURATION), Time.of(every, TimeUnit.BATCH)
    factor = _factor(half_life, smoothing, every)

    def init(state: State) -> State:
        if buffers != STATISTICS:
            floating = [key for key, buffer in state.buffers.items() if buffer.is_floating_point()]
            matched_or_raise(buffers, floating, f"{name}: buffers", "floating buffer")
        matched_or_raise(where or (), state.context.trainable, f"{name}: where", "trainable parameter")
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

    config = {"half_life" if smoothing is None else "smoothing": factor, "start": str(start), "every": str(every)}
    others = {"warmup": warmup, "power": power, "buffers": None if buffers == STATISTICS else buffers, "where": where}
    config |= {key: value for key, value in others.items() if value is not None}
    return _averaging(name, _from(start, on(Event.BATCH_END) & predicates.every(every)), apply, config)


def _from(start: Time, match: Predicate) -> Predicate:
    # A start at the beginning is left out: as a share of the run it would require the run's length.
    return match & after(start) if start else match


def _averaging(name: str, updates: Predicate, apply: Apply, config: Mapping[str, Any]) -> Algorithm:
    """Return a method that makes averages at INIT, updates them, and replaces the weights by them in evaluation."""
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

    Tensors that are not floating, which have nothing in between, are those of `high`.
    The share, a number or a 0-d tensor, is rounded to each dtype as late as possible: pass a small share in float64.
    """
    kinds = dict.fromkeys((value.dtype, value.device) for value in low.values() if value.is_floating_point())
    shares = {kind: as_scalar(share, *kind) for kind in kinds}
    return {
        name: torch.lerp(value, high[name].to(value.dtype), shares[value.dtype, value.device])
        if value.is_floating_point()
        else high[name]
        for name, value in low.items()
    }


def _with_infinities(averages: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the averages with the buffers' infinities, as in masks; averaging inf with inf would be NaN."""
    return {name: torch.where(buffers[name].isinf(), buffers[name].to(a.dtype), a) for name, a in averages.items()}


class SwaState(NamedTuple):
    """Slot of `swa`."""

    averages: Averages
    num_batches: Tensor
    """Number of batches in the statistics since `end`, 0-d int64."""


@checked
def add_to_mean(means: Mapping[str, Tensor], weights: Mapping[str, Tensor], num: int | Tensor) -> dict[str, Tensor]:
    """Return the means including one more weight: `mean + (weight - mean) / (num + 1)`, element by element.

    Args:
        means: Floating means of `num` weights each, by name.
        weights: Tensors with at least the same names, of the same shapes.
        num: The number of weights in the means, at least 0; a number or a 0-d tensor. With 0 the means are ignored.

    Returns:
        New tensors in the means' dtypes.

    Example:
        >>> add_to_mean({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([4.0, 2.0])}, 2)["w"]
        tensor([2., 2.])
    """
    return between(means, weights, 1 / ((num.double() if isinstance(num, Tensor) else num) + 1))


@factory
def swa(
    start: Point = 0.7,
    end: Point = 0.97,
    every: Period = "1ep",
    swa_lr: Annotated[float | None, Within(0)] = None,
    anneal_strategy: Literal["linear", "cosine"] = "linear",
    anneal_steps: Annotated[int, Within(1)] = 10,
    *,
    name: str = "swa",
) -> Algorithm:
    """Average the weights at the end of training.

        A_n = A_{n-1} + (W_n - A_{n-1}) / n

    with W_n the weights at the n-th update: the first update is at the first batch from `start` on (for an interval in
    epochs, the first that ends an epoch), and updates follow at intervals of `every`, up to and including `end`. The
    trainable parameters are averaged. With `swa_lr` the learning rate changes from its schedule to this constant, over
    `anneal_steps` intervals from `start` on; also for each group that has a separate rate:

        lr(t) <- (1 - w) lr(t) + w swa_lr,   w from 0 to 1, linearly or as half a cosine

    Only the schedule of the rate is changed, so a weight decay that follows the schedule still follows it. A rate of 0
    is replaced by `swa_lr` with a schedule that begins at 0.

    BatchNorm's statistics are those of the live weights, and wrong for the average. From `end` on each batch is
    therefore also passed through the averaged network, forward only and in one pass, and they become means over these
    batches; a batch whose statistics are not finite is ignored. If no batches are left at the end of the run, use
    `with_statistics(state, data, weights="swa")`. All other buffers are the live ones.

    The slot contains the averages, an `Averages`. Evaluation and prediction with `step=` use them, as in `fit`;
    `to_module(state, weights="swa")` and `with_weights(state, "swa")` return them. Until the first update they are the
    live weights. The live weights are never overwritten.

    Events: INIT; BATCH_END in every interval from `start` to `end`; AFTER_TRAIN_BATCH from `end` on; EVAL_START and
    PREDICT_START, where the averages replace the weights in a temporary state. With `swa_lr`, it replaces the
    optimizer's learning rate at INIT.

    Args:
        start: The time at which averaging begins, a share of the run or a time.
        end: The time of the last update, later than `start`; with a share of 1 no batches follow.
        every: The interval between updates, in batches, epochs or as a share of the run.
        swa_lr: The final learning rate, at least 0; by default the learning rate is not changed.
        anneal_strategy: The shape of the change to `swa_lr`, "linear" or "cosine".
        anneal_steps: The number of intervals over which the rate changes, at least 1.
        name: Name of the algorithm, of its slot, and of the weights for `to_module`.

    Raises:
        TypeError, ValueError: At INIT, with `swa_lr`: an optimizer without a learning rate, or with an `hparam` in it.
            In the step: an interval or a time that cannot be determined in this run.

    Warns:
        UserWarning: At INIT: the run or the averaging ends before the first update.

    Example:
        >>> swa(0.75, every="2ep", swa_lr=0.01)
        swa(start='0.75dur', end='0.97dur', every='2ep', swa_lr=0.01, anneal_strategy='linear', ...)

    References:
        Pavel Izmailov et al.: Averaging Weights Leads to Wider Optima and Better Generalization. UAI 2018.
        https://arxiv.org/abs/1803.05407
    """
    start, end = Time.of(start, TimeUnit.DURATION), Time.of(end, TimeUnit.DURATION)
    if start.unit is end.unit and end <= start:
        raise ValueError(f"swa: expected end after start, got {start} and {end}")
    every = Time.of(every, TimeUnit.BATCH)
    is_whole = end == Time(1.0, TimeUnit.DURATION)

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            _warn_if_unused(name, state.timestamp.run, start, end, every)
            zero = torch.zeros((), dtype=torch.int64, device=state.device)
            state = state.replace(slots={**state.slots, name: SwaState(Averages.empty(state), zero)})
            if swa_lr is None:
                return state
            annealed = _Annealed(1.0, 1.0, swa_lr, start, anneal_steps * every, anneal_strategy)
            return state.replace(optimizer=_with_rate(state.optimizer, annealed, name))
        if event in (Event.EVAL_START, Event.PREDICT_START):
            return with_weights(state, name)
        if event is Event.AFTER_TRAIN_BATCH:
            return _with_statistics(state, name)
        old = state.slots[name]
        averages = old.averages
        params = add_to_mean(averages.params, state.params, averages.num)
        buffers = {key: state.buffers[key].to(buffer.dtype) for key, buffer in averages.buffers.items()}
        new = old._replace(averages=Averages(params, buffers, averages.num + 1))
        return state.replace(slots={**state.slots, name: new})

    averaging = _from(start, on(Event.BATCH_END) & predicates.every(every, since=start or "0ba"))
    match = averaging if is_whole else averaging & through(end) | on(Event.AFTER_TRAIN_BATCH) & after(end)
    settings: dict[str, Any] = {"start": str(start), "end": str(end), "every": str(every)}
    if swa_lr is not None:
        settings |= {"swa_lr": swa_lr, "anneal_strategy": anneal_strategy, "anneal_steps": anneal_steps}
    return _averaging(name, match, apply, settings)


def _warn_if_unused(name: str, run: RunLength, start: Time, end: Time, every: Time) -> None:
    """Warn if it is known that the run averages no weights."""
    first, last = first_turn(start, every, run), run.in_batches(end)
    if first is None or last is None:
        return
    last = last if run.total_batches is None else min(last, run.total_batches)
    if first > last:
        warn(
            f"{name}: averages no weights in this run: from start={start} on, the first batch to average with "
            f"every={every} is {first}, but end={end} or the run's end is at batch {last:g}. Set every to fewer "
            "batches, such as '1ba', or start and end further apart"
        )


def _with_statistics(state: State, name: str) -> State:
    """Return the state with the batch included in the statistics of the averages, if it is finite."""
    found = statistics_of(state.model)
    if not found.names:
        return state
    old = state.slots[name]
    averages, num_batches = old.averages, old.num_batches
    measured = found.of(with_weights(state, name), state.inputs)
    is_good = all_finite(measured.values())
    both = with_batch(averages.buffers, measured, num_batches)
    buffers = {
        key: torch.where(is_good, both[key], own) if key in found.names else own
        for key, own in averages.buffers.items()
    }
    new = SwaState(averages._replace(buffers=buffers), num_batches + is_good.to(num_batches.dtype))
    return state.replace(slots={**state.slots, name: new})


def _with_rate(optimizer: Any, annealed: "_Annealed", name: str) -> Any:
    """Return the optimizer with annealed learning rates, including those of its groups."""

    def new_rate(rate: Scalar) -> Scalar:
        if collect(rate, Hparam):
            raise ValueError(
                f"{name}: swa_lr={annealed.last} replaces the learning rate, which is {rate!r}: leave the hparam out "
                "of the rate"
            )
        schedules = tuple(one for one in factors_of(rate) if isinstance(one, Schedule))
        earlier = next((one.fn for one in schedules if isinstance(one.fn, _Annealed)), None)
        if earlier is None:
            return annealed.put_into(known_part(rate), schedules, name)
        if dataclasses.replace(earlier, own=annealed.own, goal=annealed.goal) != annealed:
            raise ValueError(f"{name}: swa_lr={annealed.last}: expected one method that changes the rate, got {rate!r}")
        return rate  # INIT runs again

    def with_new_rate(leaf: Any) -> Any:
        if settings_of(leaf).get("lr") is None:
            raise ValueError(f"{name}: expected an optimizer with a learning rate, a setting lr, got {leaf!r}")
        return with_setting(leaf, "lr", new_rate)

    return map_leaves(with_new_rate, optimizer)


@dataclass(frozen=True)
class _Annealed:
    """Schedule that changes a learning rate to another constant; the rate's number is multiplied by its value."""

    own: Scalar
    """Previous factor: 1, a schedule, or a product of several."""
    goal: float
    """Final factor: the last rate divided by the number."""
    last: float
    start: Time
    length: Time
    strategy: str

    def put_into(self, number: float, schedules: tuple[Schedule, ...], name: str) -> Scalar:
        """Return the rate, a number times schedules, with this change: a number, times one schedule."""
        own = Product(schedules) if len(schedules) > 1 else schedules[0] if schedules else 1.0
        if number == 0:
            number, own = self.last, 0.0
        way = dataclasses.replace(self, own=own, goal=self.last / number if number else 1.0)
        return number * Schedule(way, f"({own!r}, to a rate of {self.last} by {name})")

    def __call__(self, timestamp: Timestamp) -> float:
        own = float(resolve(self.own, hparams={}, scheduled=lambda schedule: schedule(timestamp)))
        start, length = (timestamp.run.in_batches(time) for time in (self.start or "0ba", self.length))
        if start is None or length is None:
            raise ValueError(
                f"swa: start={self.start} and {self.length} of annealing cannot be counted in batches in this run; "
                "give State.create batches_per_epoch, or write start and every in batches"
            )
        share = min(max((timestamp.batch - start) / length, 0.0), 1.0)
        if self.strategy == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return (1 - share) * own + share * self.goal
