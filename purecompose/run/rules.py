"""Stopping rules and adjusters: decisions of a run that depend on metrics.

They are made after each evaluation and, for a metric that the step's algorithms report ("train/accuracy",
"gradient_norm"), after each epoch, or each period of `training_metrics(reset=...)`. Their memory is in the state, so a
resumed run decides as the uninterrupted one would have.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from purecompose._support.specs import check_number, suggests_keywords
from purecompose.core.state import State
from purecompose.metrics import is_lower_better
from purecompose.time import Time, TimeUnit
from purecompose.time.timestamp import checked_interval


class Adjuster(Protocol):
    """A change of the state after an evaluation, as pure functions of states and metrics."""

    @property
    def metric(self) -> str:
        """Name of the metric that it depends on, such as "eval/loss"."""
        ...

    @property
    def name(self) -> str:
        """Name of its slot in the state; it begins with a dot because it does not belong to an algorithm."""
        ...

    def init(self, state: State) -> State:
        """Return the state with a slot for its memory, unless it has one already."""
        ...

    def see(self, state: State, metrics: Mapping[str, Any]) -> State:
        """Return the state after an evaluation that has measured the metric."""
        ...


class Stopper(Adjuster, Protocol):
    """A stopping rule: it changes only its own slot."""

    def is_over(self, state: State) -> bool:
        """Return whether the run should stop, from the slot only, so that a resumed run gets the same answer."""
        ...


@suggests_keywords
@dataclass(frozen=True)
class EarlyStopping:
    """A stopping rule: a metric has not improved for a while.

    Args:
        metric: Metric of an evaluator, such as `"eval/loss"`, or of an algorithm, such as `"train/accuracy"` of
            `training_metrics`, which is read after each of its periods; others after each epoch.
        patience: Time to wait for a better value, in epochs, batches, samples or tokens.
        min_delta: Minimal difference for a value to count as better.
        mode: "min" if lower values are better, "max" if higher ones are; by default what the evaluator's metric
            declares or its name says, see `metrics.is_lower_better`. If neither does, `fit` raises an error.

    Raises:
        TypeError, ValueError: An argument has the wrong kind or is out of range.

    Example:
        >>> EarlyStopping("eval/loss", patience="2ep").name
        '.early_stopping(eval/loss)'
    """

    metric: str
    patience: Time | str = "3ep"
    min_delta: float = 0.0
    mode: str | None = None

    def __post_init__(self) -> None:
        _check_metric(self.metric, self.mode, "EarlyStopping")
        object.__setattr__(self, "patience", _checked_patience(self.patience, "EarlyStopping"))
        object.__setattr__(self, "min_delta", check_number(self.min_delta, "EarlyStopping: min_delta", 0))

    @property
    def name(self) -> str:
        """See `Stopper`."""
        return f".early_stopping({self.metric})"

    def init(self, state: State) -> State:
        """See `Stopper`: the best value so far (NaN before the first), its time, and that of the last evaluation."""
        now = _counts(state)
        return _with_new_slot(state, self.name, best=torch.full((), torch.nan), at=now, last=now)

    def see(self, state: State, metrics: Mapping[str, Any]) -> State:
        """See `Stopper`. NaN is never better, so it uses up the patience."""
        memory, now = state.slots[self.name], _counts(state)
        value = torch.as_tensor(metrics[self.metric], dtype=torch.float32, device=state.device)
        better = _is_better(self, value, memory["best"])
        best, at = torch.where(better, value, memory["best"]), torch.where(better, now, memory["at"])
        return _with_slot(state, self.name, best=best, at=at, last=now)

    def is_over(self, state: State) -> bool:
        """Return whether the patience was used up at the last evaluation."""
        assert isinstance(self.patience, Time)
        waited = state.slots[self.name]["last"] - state.slots[self.name]["at"]
        return int(waited[_UNITS.index(self.patience.unit)]) >= self.patience.value


@suggests_keywords
@dataclass(frozen=True)
class Threshold:
    """A stopping rule: a metric has reached a value.

    Args:
        metric: Metric of an evaluator, such as `"eval/accuracy"`, or of an algorithm, such as `"train/accuracy"`.
        value: The value to reach.
        mode: "min" to stop at or below it, "max" at or above it; by default as for `EarlyStopping`.

    Raises:
        TypeError, ValueError: An argument has the wrong kind.

    Example::

        fit(step, state, train, evaluate=evaluator, stop=Threshold("eval/accuracy", 0.99))
    """

    metric: str
    value: float
    mode: str | None = None

    def __post_init__(self) -> None:
        _check_metric(self.metric, self.mode, "Threshold")
        object.__setattr__(self, "value", check_number(self.value, "Threshold: value"))

    @property
    def name(self) -> str:
        """See `Stopper`."""
        return f".threshold({self.metric})"

    def init(self, state: State) -> State:
        """See `Stopper`: the last value, which is NaN before the first evaluation."""
        return _with_new_slot(state, self.name, last=torch.full((), torch.nan, dtype=torch.float64))

    def see(self, state: State, metrics: Mapping[str, Any]) -> State:
        """See `Stopper`."""
        return _with_slot(state, self.name, last=torch.tensor(metrics[self.metric], dtype=torch.float64))

    def is_over(self, state: State) -> bool:
        """Return whether the last value has reached the threshold."""
        last = state.slots[self.name]["last"].item()
        return last <= self.value if mode_of(self.metric, self.mode) == "min" else last >= self.value


# Time is stored in all of these units, so that a run may continue with a patience in another unit.
_UNITS = (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN, TimeUnit.UPDATE)


def _counts(state: State) -> Tensor:
    """Return the time in all units, int64 of shape (5,)."""
    return torch.tensor([int(state.timestamp.get(unit)) for unit in _UNITS], device=state.device)


def _with_slot(state: State, name: str, **memory: Tensor) -> State:
    own = {key: value.to(state.device) for key, value in memory.items()}
    return state.replace(slots={**state.slots, name: own})


def _with_new_slot(state: State, name: str, **memory: Tensor) -> State:
    return state if name in state.slots else _with_slot(state, name, **memory)


def _check_metric(metric: Any, mode: Any, where: str) -> None:
    """Raise for a metric that is not a name, or for an unknown mode."""
    if not isinstance(metric, str) or not metric:
        raise TypeError(f"{where}: metric={metric!r}: expected a metric's name, such as 'eval/loss'")
    if mode not in (None, "min", "max"):
        raise ValueError(f"{where}: mode={mode!r}: expected 'min' or 'max'")


def _checked_patience(patience: Any, where: str) -> Time:
    """Return a patience in one of `_UNITS`, or raise."""
    time = checked_interval(patience, f"{where}: patience")
    if time.unit is TimeUnit.DURATION:
        raise ValueError(f"{where}: patience={patience!r}: expected epochs, batches, samples or tokens")
    return time


def _is_better(rule: Any, value: Tensor, best: Tensor) -> Tensor:
    """Return whether a value is better than the best one by more than the rule's `min_delta`; NaN never is."""
    gain = best - value if mode_of(rule.metric, rule.mode) == "min" else value - best
    return ~value.isnan() & (best.isnan() | (gain > rule.min_delta))


def mode_of(metric: str, mode: str | None, reporters: Iterable[Any] = ()) -> str:
    """Return `mode`; by default what one of the reporters says of the metric, or its name: "min" or "max"."""
    if mode is not None:
        return mode
    given = [one.reported[metric] for one in reporters if metric in one.reported]
    is_lower = is_lower_better(metric, given[0] if given else None)
    if is_lower is None:
        raise ValueError(
            f"{metric!r}: are lower or higher values better? Give the rule, adjuster or Checkpoints mode='min' or "
            "mode='max', or the metric higher_is_better=True, as by metrics.from_function"
        )
    return "min" if is_lower else "max"


def rating_of(metrics: Mapping[str, Any], metric: str, mode: str | None) -> float | None:
    """Return the value of a metric with larger numbers being better; `None` if it has none, or is not a number."""
    value = metrics.get(metric)
    if not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return -value if mode_of(metric, mode) == "min" else value


@dataclass
class BestState:
    """The first state of a run with the best value of a metric; no compiled step writes over it.

    `rating` is that of `rating_of`, `None` before the first value.
    """

    metric: str
    mode: str
    rating: float | None = None
    state: State | None = None

    def see(self, state: State, metrics: Mapping[str, Any]) -> None:
        """Keep a state if its metrics are the best so far."""
        rating = rating_of(metrics, self.metric, self.mode)
        if rating is not None and (self.rating is None or rating > self.rating):
            self.rating, self.state = rating, state.unleased()


def with_modes(watchers: Iterable[Any], reporters: Iterable[Any]) -> tuple[Any, ...]:
    """Return rules and adjusters with the `mode` of their metrics, where they have such a setting and lack it."""

    def chosen(one: Any) -> Any:
        lacks_mode = "mode" in getattr(one, "__dataclass_fields__", ()) and one.mode is None
        return replace(one, mode=mode_of(one.metric, None, reporters)) if lacks_mode else one

    return tuple(map(chosen, watchers))


@suggests_keywords
@dataclass(frozen=True)
class ReduceOnPlateau:
    """An adjuster that multiplies an hparam by a factor when a metric has not improved for a while.

    Use it as `fit(..., adjust=ReduceOnPlateau("eval/loss"))`, with an optimizer such as `optim.sgd(hparam("lr", 0.1))`,
    or `optim.sgd(0.1 * hparam("lr", 1.0) * cosine())` with a schedule as well. In your own loop, call
    `state = reduce.init(state)` at the start, and `state = reduce.see(state, {"eval/loss": loss})` after each
    evaluation. Each member of a population has its own hparam and memory.

    It does what `torch.optim.lr_scheduler.ReduceLROnPlateau` does with `threshold_mode="abs"`, but torch reduces after
    more evaluations than its patience: its patience of 2 with an evaluation each epoch is "3ep" here.

    Args:
        metric: Metric of an evaluator, such as `"eval/loss"`.
        hparam: Name of the hparam.
        factor: Factor by which it is multiplied, in (0, 1).
        patience: Time to wait for a better value, in epochs, batches, samples or tokens.
        cooldown: Additional time to wait after a reduction, in the same unit.
        min_delta: Minimal difference for a value to count as better.
        minimum: Lower limit of the hparam.
        mode: "min" if lower values are better, "max" if higher ones are; by default what the evaluator's metric
            declares or its name says, see `metrics.is_lower_better`. If neither does, `fit` raises an error.

    Raises:
        TypeError, ValueError: An argument has the wrong kind or is out of range. In `init`: the state lacks the hparam.

    Example:
        >>> ReduceOnPlateau("eval/loss", patience="5ep").name
        '.reduce_on_plateau(eval/loss, lr)'
    """

    metric: str
    hparam: str = "lr"
    factor: float = 0.1
    patience: Time | str = "10ep"
    cooldown: Time | str | None = None
    min_delta: float = 0.0
    minimum: float = 0.0
    mode: str | None = None

    def __post_init__(self) -> None:
        where = "ReduceOnPlateau"
        _check_metric(self.metric, self.mode, where)
        patience = _checked_patience(self.patience, where)
        cooldown = Time(0, patience.unit) if self.cooldown is None else Time.of(self.cooldown)
        if cooldown.unit is not patience.unit or cooldown.value < 0:
            raise ValueError(f"{where}: cooldown={self.cooldown!r}: expected a time in the unit of patience={patience}")
        if not 0 < check_number(self.factor, f"{where}: factor") < 1:
            raise ValueError(f"{where}: factor={self.factor!r}: expected a number in (0, 1)")
        fixed = {
            "patience": patience,
            "cooldown": cooldown,
            "min_delta": check_number(self.min_delta, f"{where}: min_delta", 0),
            "minimum": check_number(self.minimum, f"{where}: minimum", 0),
        }
        for name, value in fixed.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """See `Adjuster`."""
        return f".reduce_on_plateau({self.metric}, {self.hparam})"

    def init(self, state: State) -> State:
        """Return the state with the memory: the best value (NaN before the first) and the start of the patience."""
        if self.hparam not in state.hparams:
            raise ValueError(
                f"ReduceOnPlateau: the state has no hparam {self.hparam!r}, only {sorted(state.hparams)}; make it part "
                f'of the optimizer, as in optim.sgd(hparam("{self.hparam}", 0.1))'
            )
        members = state.key.shape[:-1]
        since = _counts(state).expand(*members, -1).clone()
        return _with_new_slot(state, self.name, best=torch.full(members, torch.nan), since=since)

    def see(self, state: State, metrics: Mapping[str, Any]) -> State:
        """Return the state after an evaluation; NaN is never better."""
        assert isinstance(self.patience, Time) and isinstance(self.cooldown, Time)
        best, since = state.slots[self.name]["best"], state.slots[self.name]["since"]
        value = torch.as_tensor(metrics[self.metric], dtype=torch.float32, device=state.device)
        now, unit = _counts(state), _UNITS.index(self.patience.unit)
        better = _is_better(self, value, best)
        since = torch.where(better[..., None], since.maximum(now), since)
        is_due = (now - since)[..., unit] >= self.patience.value
        pause = torch.zeros_like(now)
        pause[unit] = int(self.cooldown.value)
        since = torch.where(is_due[..., None], now + pause, since)
        state = _with_slot(state, self.name, best=torch.where(better, value, best), since=since)
        old = state.hparams[self.hparam]
        lower = (old * self.factor).maximum(old.clamp(max=self.minimum))
        return state.replace(hparams={**state.hparams, self.hparam: torch.where(is_due, lower, old)})
