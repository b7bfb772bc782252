"""Adjusters, which change a scalar according to an evaluation's metrics, such as a learning rate on a plateau.

A schedule is a function of time; an adjuster depends on measurements. Its memory is in the state's slots and it changes
an hparam, so a run resumed from a checkpoint does what the uninterrupted one would have done.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from purecompose._support.checks import check_number, suggests_keywords
from purecompose.core.state import State
from purecompose.run.stopping import UNITS, check_metric, checked_patience, counts, is_better
from purecompose.time import Time


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


@suggests_keywords(monitor='ReduceOnPlateau("eval/loss")')
@dataclass(frozen=True)
class ReduceOnPlateau:
    """An adjuster that multiplies an hparam by a factor when a metric has not improved for a while.

    Use it as `fit(..., adjust=ReduceOnPlateau("eval/loss"))`, with an optimizer such as `optim.sgd(hparam("lr", 0.1))`,
    or `optim.sgd(0.1 * hparam("lr", 1.0) * cosine())` with a schedule as well. In your own loop, call
    `state = reduce.init(state)` at the start, and `state = reduce.see(state, {"eval/loss": loss})` after each
    evaluation. Each member of a population has its own hparam and memory.

    It does what `torch.optim.lr_scheduler.ReduceLROnPlateau` does with `threshold_mode="abs"`. Torch counts
    evaluations and reduces after more than its patience; here the hparam is reduced as soon as the patience is over, as
    in `EarlyStopping`: torch's patience of 2 with an evaluation each epoch is "3ep".

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
        check_metric(self.metric, self.mode, where)
        patience = checked_patience(self.patience, where)
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
        if self.name in state.slots:
            return state
        members = state.key.shape[:-1]
        best = torch.full(members, torch.nan, device=state.device)
        since = counts(state.timestamp).to(state.device).expand(*members, -1).clone()
        return state.replace(slots={**state.slots, self.name: {"best": best, "since": since}})

    def see(self, state: State, metrics: Mapping[str, Any]) -> State:
        """Return the state after an evaluation; NaN is never better."""
        assert isinstance(self.patience, Time) and isinstance(self.cooldown, Time)
        best, since = state.slots[self.name]["best"], state.slots[self.name]["since"]
        value = torch.as_tensor(metrics[self.metric], dtype=torch.float32, device=state.device)
        now, unit = counts(state.timestamp).to(state.device), UNITS.index(self.patience.unit)
        better = is_better(self, value, best)
        since = torch.where(better[..., None], since.maximum(now), since)
        is_due = (now - since)[..., unit] >= self.patience.value
        pause = torch.zeros_like(now)
        pause[unit] = int(self.cooldown.value)
        memory = {
            "best": torch.where(better, value, best),
            "since": torch.where(is_due[..., None], now + pause, since),
        }
        return state.replace(
            slots={**state.slots, self.name: memory},
            hparams={**state.hparams, self.hparam: self._reduced(state.hparams[self.hparam], is_due)},
        )

    def _reduced(self, hparam: Tensor, is_due: Tensor) -> Tensor:
        lower = (hparam * self.factor).maximum(hparam.clamp(max=self.minimum))
        return torch.where(is_due, lower, hparam)
