"""Experiments with the values of named scalars: `sweep`, which trains populations with one compiled graph for all
settings, and the learning-rate range test.
"""

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose._support.messages import table
from purecompose._support.specs import check_number, check_whole, shown
from purecompose.analysis.proposing import Range, proposed
from purecompose.core.compose import Step
from purecompose.core.state import State, check_single
from purecompose.data.loaders import StateStream, check_batches, draws_globally, epoch_batches, fixed_batches
from purecompose.observers import History
from purecompose.run.evaluation import Evaluator, Observer
from purecompose.run.fit import fit, start_of_run
from purecompose.run.rules import mode_of
from purecompose.schedule import Hparam, hparam
from purecompose.schedule.scalar import Product, factors_of
from purecompose.transforms.compilation import CompiledStep
from purecompose.transforms.members import stacked
from purecompose.transforms.population import population, stack_states


@dataclass(frozen=True)
class Trial:
    """One setting of a sweep."""

    values: dict[str, float]
    """The named scalars."""
    metric: float
    """The mean of the metric over the seeds, at the last evaluation."""
    by_seed: tuple[float, ...]
    """The metric of each seed."""


@dataclass(frozen=True)
class Sweep:
    """The result of `sweep`; it prints as a table.

    Attributes:
        metric: The metric by which the trials are ranked.
        trials: The settings, the best first.
        state: The state of the population at the end; of several, of the one with the best setting.
        best: The index of the best member in the state.
    """

    metric: str
    trials: tuple[Trial, ...]
    state: State
    best: int

    def __str__(self) -> str:
        names = list(self.trials[0].values)
        rows = [[*(f"{trial.values[name]:.4g}" for name in names), f"{trial.metric:.5g}"] for trial in self.trials]
        return table([*names, self.metric], rows)


def sweep(
    step: Step,
    state: State,
    data: Any,
    values: Mapping[str, Sequence[float] | Range],
    *,
    evaluate: Evaluator,
    metric: str | None = None,
    trials: int | None = None,
    search: str | None = None,
    rounds: int = 4,
    seeds: int = 1,
    chunk_size: int | None = None,
    observers: Observer | Iterable[Observer] = (),
) -> Sweep:
    """Train with different values of named scalars, all combinations or those of a search, and rank them by a metric.

    All members have the same initial weights, batches and draws for the same seed, and are trained at once: a compiled
    step compiles one graph. If the optimizer's learning rate is a number, it can be swept as "lr": it becomes
    `hparam("lr", ...)`, times its schedule if it has one.

    **Search.** "grid" trains all combinations of the lists. "random" draws `trials` settings by the state's key, from
    lists and ranges; with more trials, the first ones stay the same. "optuna" asks Optuna's tree-structured Parzen
    estimator for the settings of each of `rounds` populations, by the metrics of the earlier ones. To end bad settings
    early, train one run per setting: see examples/search.py.

    Args:
        step: The step of one member, as `compose` or `compile` makes it.
        state: The state at the start, with its duration.
        data: Training data, as for `fit`.
        values: For each name a list of values, or a `Range` to search in.
        evaluate: The evaluator.
        metric: The metric, such as "eval/loss"; by default the evaluator's first.
        trials: Number of settings of a search; by default all combinations of the values.
        search: "grid", "random" or "optuna"; by default "random" with `trials`, otherwise "grid".
        rounds: Number of populations one after the other, for Optuna.
        seeds: Number of keys with which each setting is trained: the state's, and others that follow from it.
        chunk_size: Number of members computed at a time; see `population`.
        observers: Observers of the run.

    Returns:
        The trials, ranked by the metric, and the state of the population at the end.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range, or the state has no such hparam.
        ImportError: Optuna is needed and not installed.

    References:
        Bergstra, Bardenet, Bengio, Kégl, Algorithms for hyper-parameter optimization, NeurIPS 2011.
        Bergstra, Bengio, Random search for hyper-parameter optimization, JMLR 13, 2012.

    Example:
        >>> from purecompose import compose, data, loop_events, losses, optim
        >>> inputs = random.normal(random.key(0), (64, 4))
        >>> train = data.arrays(inputs, (inputs[:, 0] > 0).long(), 16)
        >>> net = torch.nn.Linear(4, 2)
        >>> state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="4ep")
        >>> found = sweep(compose(loop_events), state, train, {"lr": [0.001, 0.1, 1.0]}, evaluate=Evaluator(train))
        >>> len(found.trials), found.trials[0].values["lr"] > 0.01
        (3, True)
    """
    check_single(state, "sweep", "give it the state of one member")
    if not isinstance(evaluate, Evaluator):
        raise TypeError(f"sweep: evaluate: expected Evaluator(data, metrics), got {shown(evaluate)}")
    if metric is not None and metric not in evaluate.reported:
        raise ValueError(f"sweep: metric={metric!r}: the evaluator reports {', '.join(evaluate.reported)}")
    check_whole(seeds, "sweep: seeds", 1)
    metric = metric or next(iter(evaluate.reported))
    mode = mode_of(metric, None, [evaluate])
    proposals = proposed(values, search, trials, rounds, state.key, mode == "min")
    settings, names = next(proposals), tuple(values)
    state = step.init(with_named_rate(state, keeps_schedule=True) if "lr" in names else state)
    missing = [name for name in names if name not in state.hparams]
    if missing:
        raise ValueError(
            f"sweep: the state has no hparam {missing[0]!r}, only {sorted(state.hparams)}; write "
            f'hparam("{missing[0]}", 0.1) in place of a number'
        )
    together, done = None, []
    with contextlib.suppress(StopIteration):
        while True:
            members = _members(state, settings, seeds)
            made, start, stacked, evaluator = population_of(step, members, data, evaluate, chunk_size)
            if together is None or together[0] != len(members):  # otherwise its compiled graphs serve again
                together = len(members), made
            history = History()
            watching: list[Any] = [history, *([observers] if callable(observers) else observers)]
            end = fit(together[1], start, stacked, evaluate=evaluator, observers=watching)
            done.append((_trials(settings, history.series(metric)[1][-1]), end))
            settings = proposals.send([trial.metric for trial in done[-1][0]])
    return _ranked(metric, mode, done)


def _members(state: State, settings: Sequence[Mapping[str, float]], seeds: int) -> list[State]:
    """Return the states of the population: the seeds of each setting follow each other."""
    keys = [state.key] + [random.fold_in(state.key, i) for i in range(1, seeds)]
    members = []
    for setting in settings:
        new = {name: torch.tensor(value, dtype=torch.float32, device=state.device) for name, value in setting.items()}
        members += [state.replace(key=key, hparams={**state.hparams, **new}) for key in keys]
    return members


def _trials(settings: Sequence[dict[str, float]], found: Any) -> list[Trial]:
    """Return the trials of a finished population, from the metric of each member."""
    seeds = len(found) // len(settings)
    by_seed = [tuple(found[i : i + seeds]) for i in range(0, len(found), seeds)]
    return [Trial(values, statistics.fmean(one), one) for values, one in zip(settings, by_seed, strict=True)]


def _ranked(metric: str, mode: str, done: Sequence[tuple[list[Trial], State]]) -> Sweep:
    """Return the trials of finished populations, the best first; those whose metric is not finite are the last."""
    sign = 1 if mode == "min" else -1

    def badness(trial: Trial) -> float:
        return sign * trial.metric if math.isfinite(trial.metric) else math.inf

    trials = sorted((trial for some, _ in done for trial in some), key=badness)
    some, end = next(one for one in done if any(trial is trials[0] for trial in one[0]))
    best = next(i for i, trial in enumerate(some) if trial is trials[0])
    return Sweep(metric, tuple(trials), end, best * len(trials[0].by_seed))


def population_of(
    step: Step, states: Sequence[State], data: Any, evaluate: Evaluator, chunk_size: int | None = None
) -> tuple[Step, State, Any, Evaluator]:
    """Return step, state, data and evaluator of a population in which each member has its own order of the data.

    A compiled step becomes a compiled step of the population.
    """
    depends_on_key = callable(getattr(data, "epoch", None)) or draws_globally(data)
    depends_on_key |= isinstance(data, list | tuple) and draws_globally(evaluate.data)
    has_own_order = depends_on_key and any(not torch.equal(state.key, states[0].key) for state in states)
    composed = step.step if isinstance(step, CompiledStep) else step
    together = population(composed, len(states), chunk_size, "each" if has_own_order else "shared")
    if isinstance(step, CompiledStep):
        together = CompiledStep(together, step.options)
    if has_own_order:
        data = _OwnOrders(data, [state.key for state in states])
        evaluate = dataclasses.replace(evaluate, data=_Repeated(evaluate.data, [state.key for state in states]))
    return together, stack_states(states), data, evaluate


class _OwnOrders:
    """Data whose batches are those of each member, stacked."""

    def __init__(self, data: Any, keys: Sequence[Tensor]) -> None:
        self.data, self.keys = data, keys

    def __len__(self) -> int:
        return len(self.data)

    def epoch(self, key: Tensor, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return the batches of an epoch; the order does not depend on `key`, since each member has its own."""
        del key
        orders = [epoch_batches(self.data, own, epoch, start) for own in self.keys]
        return (stacked(members) for members in zip(*orders, strict=True))

    def __iter__(self) -> Iterator[Any]:
        return self.epoch(self.keys[0], 0)


class _Repeated:
    """Evaluation data whose batches are given to each member: without copies, unless they depend on its key."""

    def __init__(self, data: Any, keys: Sequence[Tensor]) -> None:
        self.data, self.keys = data, keys

    def __iter__(self) -> Iterator[Any]:
        if draws_globally(self.data):
            orders = [fixed_batches(self.data, own) for own in self.keys]
            yield from (stacked(members) for members in zip(*orders, strict=True))
            return
        for batch in self.data:
            yield batches.map_tensors(lambda tensor: tensor.expand(len(self.keys), *tensor.shape), batch)


_NAME = "lr"
_STOP = 4.0
"""The test ends when the mean of the last losses is this many times its lowest value, and above the first one."""


@dataclass(frozen=True)
class LearningRateRange:
    """The result of `learning_rate_range`.

    Attributes:
        rates: The learning rate of each batch.
        losses: The loss of each batch, before its update.
        smoothed: The mean of the losses around each batch.
        suggested: The rate at which the smoothed loss falls fastest, per factor of the rate.
        lowest: The rate with the lowest smoothed loss: above it, training becomes unstable.
        has_diverged: True if the loss had grown so much that the test ended before the highest rate.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggested: float
    lowest: float
    has_diverged: bool

    def __str__(self) -> str:
        marked = {self.rates.index(self.suggested): "falls fastest", self.rates.index(self.lowest): "lowest"}
        shown = sorted({*range(0, len(self.rates), max(len(self.rates) // 10, 1)), *marked})
        rows = [[f"{self.rates[i]:.2e}", f"{self.smoothed[i]:.4f}", marked.get(i, "")] for i in shown]
        end = f"the loss diverged at {self.rates[-1]:.2e}" if self.has_diverged else "the loss did not diverge"
        return f"{table(['lr', 'smoothed loss', ''], rows)}\n\nsuggested lr: {self.suggested:.2e}; {end}"


def learning_rate_range(
    step: Step, state: State, data: Any, *, low: float = 1e-5, high: float = 1.0, num_batches: int = 100
) -> LearningRateRange:
    """Train with a learning rate that grows exponentially from batch to batch, and return the losses.

    The rate of the optimizer, its schedule included, is replaced by the growing one; groups keep rates of their own.
    The given state is not changed.

    Args:
        step: The step; a compiled one needs one graph.
        state: The state to start from.
        data: Training data, as for `fit`; read again when they end.
        low: First learning rate, above 0.
        high: Last learning rate, above `low`.
        num_batches: Number of batches, at least 10. The test ends earlier if the loss diverges.

    Returns:
        The rate and the loss of each batch, and the suggested rate.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range, the optimizer has no `lr`, or the loss
            of the first batches is not finite.

    References:
        Smith, Cyclical learning rates for training neural networks, 2017, arXiv:1506.01186, section 3.3.

    Example:
        >>> from purecompose import compose, loop_events, losses, optim, random
        >>> inputs = random.normal(random.key(0), (32, 4))
        >>> net = torch.nn.Linear(4, 2)
        >>> state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="1ep")
        >>> found = learning_rate_range(compose(loop_events), state, [(inputs, (inputs[:, 0] > 0).long())])
        >>> found.rates[0] < found.suggested < found.lowest
        True
    """
    check_single(state, "learning_rate_range", "give it one member, unstack_states(state)[0]")
    check_number(low, "learning_rate_range: low", 0, above=True)
    check_number(high, "learning_rate_range: high", low, above=True)
    check_whole(num_batches, "learning_rate_range: num_batches", 10)
    if not isinstance(data, StateStream):
        check_batches(data, "learning_rate_range: data")
    duration = None if state.timestamp.run.duration is not None else f"{num_batches}ba"
    state = start_of_run(step, with_named_rate(state, keeps_schedule=False).copy(), data, duration=duration)[0]
    rates, losses, recent = list[float](), list[float](), list[float]()
    reach, has_diverged = max(num_batches // 20, 1), False
    given = _endless(data, state)
    for i in range(num_batches):
        rates.append(low * (high / low) ** (i / (num_batches - 1)))
        rate = torch.tensor(rates[-1], dtype=torch.float32, device=state.device)
        state = state.replace(hparams={**state.hparams, _NAME: rate})
        batch = data.batch(state) if isinstance(data, StateStream) else next(given)
        state = step(state, batches.map_tensors(lambda tensor, device=state.device: tensor.to(device), batch))
        assert state.loss is not None
        losses.append(state.loss.item())
        recent.append(statistics.fmean(losses[-reach:]))
        if not math.isfinite(losses[-1]) or recent[-1] > max(_STOP * min(recent), recent[0]):
            has_diverged = True
            break
    return _result(rates, losses, reach, has_diverged)


def with_named_rate(state: State, *, keeps_schedule: bool) -> State:
    """Return the state with the optimizer's learning rate as the hparam "lr", unless it has one.

    With `keeps_schedule` only the number is replaced, as in `hparam("lr", 0.1) * cosine()`, else the whole rate.
    """
    if keeps_schedule and _NAME in state.hparams:
        return state
    optimizer = state.optimizer
    if not hasattr(optimizer, _NAME) or not dataclasses.is_dataclass(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} has no lr to replace: give the optimizer a named scalar, such as "
            'optim.sgd(hparam("lr", 0.1))'
        )
    factors = factors_of(getattr(optimizer, _NAME))
    number = math.prod(float(factor) for factor in factors if isinstance(factor, int | float))
    is_named = (factor for factor in factors if isinstance(factor, Hparam) and factor.name == _NAME)
    named = next(is_named, hparam(_NAME, number))
    rest = [factor for factor in factors if factor is not named and not isinstance(factor, int | float)]
    rate = Product((named, *rest)) if keeps_schedule and rest else named
    changed = state.replace(optimizer=dataclasses.replace(optimizer, **{_NAME: rate}))  # pyright: ignore
    return changed.with_hparams([named])


def _result(rates: list[float], losses: list[float], reach: int, has_diverged: bool) -> LearningRateRange:
    """Return the result of a range test, with the rate at which the smoothed loss falls fastest."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 5:
        raise ValueError(
            f"learning_rate_range: the loss was not finite or grew fourfold after {len(losses)} batches, at "
            f"lr={rates[-1]:.2e}; begin below low={rates[0]:.2e}"
        )
    # The mean around each loss, over as many on either side.
    sides = [min(reach, i, len(finite) - 1 - i) for i in range(len(finite))]
    smoothed = [statistics.fmean(finite[i - side : i + side + 1]) for i, side in enumerate(sides)]
    # The first and last means are over few batches, and so noisy.
    inner = range(reach, len(smoothed) - reach) or range(len(smoothed))
    lowest = min(inner, key=smoothed.__getitem__)
    inner = range(inner.start, lowest + 1)
    steepest = min(inner, key=lambda i: smoothed[min(i + 1, lowest)] - smoothed[max(i - 1, 0)])
    smoothed += [math.nan] * (len(losses) - len(smoothed))
    return LearningRateRange(tuple(rates), tuple(losses), tuple(smoothed), rates[steepest], rates[lowest], has_diverged)


def _endless(data: Any, state: State) -> Iterator[Any]:
    for epoch in itertools.count(state.timestamp.epoch):
        before = None
        for before in epoch_batches(data, state.key, epoch):
            yield before
        if before is None:
            raise ValueError("learning_rate_range: the data has no batch, or ended and cannot be read again")
