"""Successive halving of a population: at some points of a run, the worst members are replaced by variants of the best.

    at each rung: rank the settings by the metric, and eliminate the worst fraction, 1 - keep
    the place of an eliminated setting is filled by a copy of one of the others, with each value multiplied by
    exp(u log(spread) / 2^rung), u uniform in [-1, 1], and reflected at the ends of the initial values' range

The number of members is constant, so a compiled step has one graph. The result of a copy depends on all the values it
has been trained with, so the memory records them.

References:
    Jamieson and Talwalkar, Non-stochastic best arm identification and hyperparameter optimization, 2016,
    arXiv:1502.07943. Jaderberg et al., Population based training of neural networks, 2017, arXiv:1711.09846, for the
    replacement.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purecompose import random, tree
from purecompose._support.checks import check_number, check_whole
from purecompose.core.state import State
from purecompose.run.rules import check_metric, mode_of
from purecompose.time import Time, TimeUnit


_SALT = random.salt("successive halving")
_COPIED = ("params", "buffers", "opt_state", "slots", "hparams", "loss")


@dataclass(frozen=True)
class SuccessiveHalving:
    """An adjuster that replaces the worst settings of a population, as `fit(..., adjust=SuccessiveHalving(...))`.

    A rung is evaluated at the first evaluation at or after its time. Members of one setting with several seeds follow
    each other, and are ranked by their mean. A metric that is not finite is the worst.

    Args:
        metric: Metric of an evaluator, such as "eval/loss".
        names: The hparams that make up a setting.
        rungs: Points of the run, such as ("0.25dur", "0.5dur"), in one unit: fractions of the run, batches or epochs.
        keep: Fraction of the settings that survive each rung, in (0, 1).
        spread: Largest factor by which a value of a replacement differs at the first rung, at least 1.
        seeds: Number of members of each setting.
        mode: "min" if lower values are better, "max" if higher ones are; by default as for `EarlyStopping`.

    Raises:
        TypeError, ValueError: An argument has the wrong kind or is out of range. In `init`: the state is not a
            population's, lacks an hparam, or its members cannot be divided by `seeds`.

    Example:
        >>> SuccessiveHalving("eval/loss", ("lr",), ("0.25dur", "0.5dur")).name
        '.successive_halving(eval/loss)'
    """

    metric: str
    names: tuple[str, ...]
    rungs: tuple[str | Time, ...]
    keep: float = 0.5
    spread: float = 2.0
    seeds: int = 1
    mode: str | None = None

    def __post_init__(self) -> None:
        where = "SuccessiveHalving"
        check_metric(self.metric, self.mode, where)
        times = tuple(Time.of(rung) for rung in self.rungs)
        if not times or len({time.unit for time in times}) > 1 or list(times) != sorted(set(times)):
            raise ValueError(
                f"{where}: rungs={self.rungs!r}: expected increasing times in one unit, such as ('0.25dur', '0.5dur')"
            )
        if times[0].unit not in (TimeUnit.DURATION, TimeUnit.BATCH, TimeUnit.EPOCH) or times[0].value <= 0:
            raise ValueError(f"{where}: rungs={self.rungs!r}: expected times > 0 in dur, ba or ep")
        check_number(self.keep, f"{where}: keep", 0, 1, above=True, below=True)
        check_number(self.spread, f"{where}: spread", 1)
        check_whole(self.seeds, f"{where}: seeds", 1)
        object.__setattr__(self, "rungs", times)
        object.__setattr__(self, "names", tuple(self.names))

    @property
    def name(self) -> str:
        """See `Adjuster`."""
        return f".successive_halving({self.metric})"

    def init(self, state: State) -> State:
        """Return the state with the memory of the rungs.

        For each member: `rung`, the number of rungs so far; `values` (rungs + 1, names), its values from the start and
        from each rung on; `out` (rungs, names + 1), the values and the metric of the setting eliminated at a rung, NaN
        where it continued; `low` and `high` (names), the range of the first values.
        """
        if state.key.ndim < 2:
            raise ValueError("SuccessiveHalving: expected the state of a population: use stack_states and population")
        num = len(state.key)
        if num % self.seeds or num < 2 * self.seeds:
            raise ValueError(
                f"SuccessiveHalving: {num} members are not two or more settings with {self.seeds} seeds each"
            )
        missing = [name for name in self.names if name not in state.hparams]
        if missing:
            raise ValueError(f"SuccessiveHalving: the state has no hparam {missing[0]!r}, only {sorted(state.hparams)}")
        if self.name in state.slots:
            return state
        first = self._values(state)
        values = first.new_full((num, len(self.rungs) + 1, len(self.names)), math.nan)
        values[:, 0] = first
        memory = {
            "rung": torch.zeros(num, dtype=torch.int64, device=state.device),
            "values": values,
            "out": first.new_full((num, len(self.rungs), len(self.names) + 1), math.nan),
            "low": first.amin(0).expand_as(first).clone(),
            "high": first.amax(0).expand_as(first).clone(),
        }
        return state.replace(slots={**state.slots, self.name: memory})

    def see(self, state: State, metrics: Mapping[str, Any]) -> State:
        """Return the state after an evaluation: with replaced members if a rung is due, otherwise unchanged."""
        rung = int(state.slots[self.name]["rung"][0])
        if rung == len(self.rungs) or not self._is_due(state, rung):
            return state
        found = torch.as_tensor(metrics[self.metric], dtype=torch.float32, device=state.device)
        sources, is_out = self._ranked(found)
        before, earlier = self._values(state), state.slots[self.name]["out"]
        # Each member becomes a copy of another one; keys stay in their places.
        state = state.replace(**{name: tree.map(lambda leaf: leaf[sources], getattr(state, name)) for name in _COPIED})
        memory = dict(state.slots[self.name])
        out = torch.cat([before, found[:, None]], 1).where(is_out[:, None], torch.nan)
        values = self._varied(self._values(state), memory, is_out, state.key[0], rung)
        memory["out"] = _with_row(earlier, rung, out)  # of the place, not of the member that it now holds
        memory["values"] = _with_row(memory["values"], rung + 1, values)
        memory["rung"] = memory["rung"] + 1
        hparams = dict(zip(self.names, values.unbind(1), strict=True))
        return state.replace(slots={**state.slots, self.name: memory}, hparams={**state.hparams, **hparams})

    def _is_due(self, state: State, rung: int) -> bool:
        due, now = Time.of(self.rungs[rung]), state.timestamp
        elapsed = now.elapsed() if due.unit is TimeUnit.DURATION else now.get(due.unit)
        return elapsed is not None and elapsed >= due.value - 1e-9

    def _ranked(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each member the one that it continues from, and whether it was eliminated."""
        means = found.reshape(-1, self.seeds).mean(1)
        badness = (means if mode_of(self.metric, self.mode) == "min" else -means).nan_to_num(math.inf, posinf=math.inf)
        order = badness.argsort(stable=True)
        num_kept = max(1, min(math.ceil(self.keep * len(means)), len(means) - 1))
        sources = torch.arange(len(means), device=found.device)
        losers = order[num_kept:]
        sources[losers] = order[torch.arange(len(losers), device=found.device) % num_kept]
        own = torch.arange(self.seeds, device=found.device)
        members = (sources[:, None] * self.seeds + own).flatten()
        return members, members != torch.arange(len(found), device=found.device)

    def _varied(self, values: Tensor, memory: Mapping[str, Tensor], is_out: Tensor, key: Tensor, rung: int) -> Tensor:
        """Return the values, with those of replacements multiplied by a factor: one for all seeds of a setting."""
        num = len(values) // self.seeds
        shares = random.uniform(random.Rng(random.fold_in(key, rung), _SALT), (num, len(self.names)))
        factors = ((2 * shares - 1) * (math.log(self.spread) / 2**rung)).exp().repeat_interleave(self.seeds, 0)
        low, high, varied = memory["low"], memory["high"], values * factors
        # Reflected at the range's ends, where many would otherwise be equal.
        varied = torch.where(varied > high, high * high / varied, varied)
        varied = torch.where(varied < low, low * low / varied, varied)
        return torch.where(is_out[:, None], varied.clamp(low, high), values)

    def _values(self, state: State) -> Tensor:
        """Return the settings of all members, (members, names)."""
        return torch.stack([state.hparams[name] for name in self.names], 1)


def _with_row(memory: Tensor, index: int, row: Tensor) -> Tensor:
    """Return the memory with one row of each member replaced."""
    memory = memory.clone()
    memory[:, index] = row
    return memory
