"""Adjusters: change a scalar by an evaluation's metrics, such as a learning rate on a plateau.

A schedule is a function of time; this depends on what has been measured. What it remembers is in the state's slots, and
what it moves is an hparam, so a run resumed from a checkpoint does what the uninterrupted one would have done.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from purecompose._support.checks import check_number
from purecompose.core.state import State
from purecompose.losses.metrics import is_lower_better
from purecompose.run.stopping import UNITS, check_metric, counts
from purecompose.time import Time, TimeUnit
from purecompose.time.intervals import checked_interval


__all__ = ["Adjuster", "ReduceOnPlateau"]


class Adjuster(Protocol):
    """Changes the state after an evaluation; pure functions of states and metrics."""

    @property
    def metric(self) -> str:
        """The metric that it looks at, such as "eval/loss"."""
        ...

    @property
    def name(self) -> str:
        """Names its memory in the state's slots; with a dot in front, as what belongs to no algorithm."""
        ...

    def init(self, state: State) -> State:
        """Return the state with a slot for its memory, if it has none yet."""
        ...

    def see(self, state: State, metrics: Mapping[str, Any]) -> State:
        """Return the state after an evaluation that has measured the metric."""
        ...


@dataclass(frozen=True)
class ReduceOnPlateau:
    """Multiplies an hparam by a factor when a metric has not become better for a while.

    For `fit(..., adjust=ReduceOnPlateau("eval/loss"))`, with an optimizer such as `optim.sgd(hparam("lr", 0.1))`, or
    `optim.sgd(0.1 * hparam("lr", 1.0) * cosine())` beside a schedule. In your own loop, `state = reduce.init(state)` at
    the start, and `state = reduce.see(state, {"eval/loss": loss})` after each evaluation. Each member of a population
    has its own.

    It does what `torch.optim.lr_scheduler.ReduceLROnPlateau` does with `threshold_mode="abs"`. Torch counts
    evaluations and reduces after more than its patience; here the hparam is reduced once the patience is over, as
    `EarlyStopping` stops: torch's patience of 2 with an evaluation each epoch is "3ep".

    Args:
        metric: Of an evaluator, such as `"eval/loss"`.
        hparam: The name of the hparam.
        factor: By what it is multiplied, in (0, 1).
        patience: How long to wait for a better value, in epochs, batches, samples or tokens.
        cooldown: How much longer to wait after it has been reduced, in the same unit.
        min_delta: By how much a value must be better to count.
        minimum: What it does not fall below.
        mode: "min" or "max", what better means; by default lower for losses, errors and perplexities, else higher.

    Raises:
        TypeError, ValueError: An argument of the wrong kind or out of range. In `init`: the state lacks the hparam.

    Example:
        >>> ReduceOnPlateau("eval/loss", patience="5ep").mode
        'min'
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
        check_metric(self.metric, self.mode, where)
        patience = checked_interval(self.patience, f"{where}: patience")
        if patience.unit is TimeUnit.DURATION:
            raise ValueError(f"{where}: patience={self.patience!r}: expected epochs, batches, samples or tokens")
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
            "mode": self.mode or ("min" if is_lower_better(self.metric) else "max"),
        }
        for name, value in fixed.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """As in `Adjuster`."""
        return f".reduce_on_plateau({self.metric}, {self.hparam})"

    def init(self, state: State) -> State:
        """Return the state with its memory: the best value (NaN before the first) and the start of the patience."""
        if self.hparam not in state.hparams:
            raise ValueError(
                f"ReduceOnPlateau: the state has no hparam {self.hparam!r}, only {sorted(state.hparams)}; make it part "
                f'of the optimizer, as in optim.sgd(hparam("{self.hparam}", 0.1))'
            )
        if self.name in state.slots:
            return state
        members = state.key.shape[:-1]
        best = torch.full(members, torch.nan, device=state.device)
        since = counts(state.timestamp).to(state.device).expand(*members, -1).clone()
        return state.replace(slots={**state.slots, self.name: {"best": best, "since": since}})

    def see(self, state: State, metrics: Mapping[str, Any]) -> State:
        """Return the state after an evaluation; a value that is NaN is never better."""
        assert isinstance(self.patience, Time) and isinstance(self.cooldown, Time)
        best, since = state.slots[self.name]["best"], state.slots[self.name]["since"]
        value = torch.as_tensor(metrics[self.metric], dtype=torch.float32, device=state.device)
        now, unit = counts(state.timestamp).to(state.device), UNITS.index(self.patience.unit)
        gain = best - value if self.mode == "min" else value - best
        is_better = ~value.isnan() & (best.isnan() | (gain > self.min_delta))
        since = torch.where(is_better[..., None], since.maximum(now), since)
        is_due = (now - since)[..., unit] >= self.patience.value
        pause = torch.zeros_like(now)
        pause[unit] = int(self.cooldown.value)
        memory = {
            "best": torch.where(is_better, value, best),
            "since": torch.where(is_due[..., None], now + pause, since),
        }
        return state.replace(
            slots={**state.slots, self.name: memory},
            hparams={**state.hparams, self.hparam: self._reduced(state.hparams[self.hparam], is_due)},
        )

    def _reduced(self, hparam: Tensor, is_due: Tensor) -> Tensor:
        lower = (hparam * self.factor).maximum(hparam.clamp(max=self.minimum))
        return torch.where(is_due, lower, hparam)
