"""SWA, stochastic weight averaging: the mean of the weights over the end of training."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from purecompose._support.messages import warn
from purecompose.algorithms._ema import between
from purecompose.algorithms._parts.checks import Period, Point
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.wrapping import all_finite, map_leaves, settings_of, with_setting
from purecompose.schedule import Hparam, Product, Scalar, Schedule, collect, resolve
from purecompose.schedule.declared import Within, checked
from purecompose.schedule.scalar import factors_of, known_part
from purecompose.surgery.weights import Averages, statistics_of, with_batch, with_weights
from purecompose.time import RunLength, Time, Timestamp, TimeUnit, predicates
from purecompose.time.event import Event
from purecompose.time.predicates import after, first_turn, on, through


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
    PREDICT_START, where the averages replace the weights in a temporary state. Reads parameters and buffers; with
    `swa_lr`, it replaces the optimizer's learning rate at INIT.

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

    averaging = on(Event.BATCH_END) & predicates.every(every, since=start or "0ba")
    # A start at the beginning is left out: as a share of the run it would require the run's length.
    averaging = averaging & after(start) if start else averaging
    match = averaging if is_whole else averaging & through(end) | on(Event.AFTER_TRAIN_BATCH) & after(end)
    settings: dict[str, Any] = {"start": str(start), "end": str(end), "every": str(every)}
    if swa_lr is not None:
        settings |= {"swa_lr": swa_lr, "anneal_strategy": anneal_strategy, "anneal_steps": anneal_steps}
    return Algorithm(
        name,
        on(Event.INIT, Event.EVAL_START, Event.PREDICT_START) | match,
        apply,
        traits=frozenset({Trait.AVERAGES_WEIGHTS}),
        runs_after=(Trait.REQUIRED_ON_LOAD, Trait.SETS_WEIGHTS),
        config=settings,
    )


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
    new = old._replace(
        averages=averages._replace(buffers=buffers), num_batches=num_batches + is_good.to(num_batches.dtype)
    )
    return state.replace(slots={**state.slots, name: new})


def _with_rate(optimizer: Any, annealed: "_Annealed", name: str) -> Any:
    """Return the optimizer with annealed learning rates, including those of its groups."""

    def new_rate(rate: Scalar) -> Scalar:
        if collect(rate, Hparam):
            raise ValueError(
                f"{name}: swa_lr={annealed.last} replaces the learning rate, which is {rate!r}: leave the hparam out "
                "of the rate, or leave swa_lr out"
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


@dataclasses.dataclass(frozen=True)
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
