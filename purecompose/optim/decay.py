"""Weight decay: how it enters an update, and its factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from purecompose._support.shards import local, place_of, placed
from purecompose.optim.base import ByGroup, Optimizer, Value, cells, matched, read
from purecompose.optim.lists import add
from purecompose.optim.wrapping import leaves, settings_of
from purecompose.schedule import Scalar, Schedule, number
from purecompose.schedule.scalar import factors_of


Decay: TypeAlias = Literal["coupled", "by rate", "by schedule"]
"""How the decay is applied: "coupled" adds it to the gradient; "by rate" subtracts it from the parameter, times the
learning rate; "by schedule" does so times only the learning rate's schedule."""


def decayed(
    how: Decay, grads: list[Tensor], params: list[Tensor], weight_decay: Scalar, lr: Scalar, value: Value
) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients and parameters with the decay applied; a decay that is the number 0 costs nothing.

    A parameter's decay is computed as p - factor * p rather than (1 - factor) * p: in float32, 1 - 1e-5 loses two
    of the factor's digits.

    Example:
        >>> import torch
        >>> from purecompose.schedule import number
        >>> decayed("by rate", [torch.ones(1)], [torch.full((1,), 4.0)], 0.5, 0.5, number)
        ([tensor([1.])], [tensor([3.])])
    """
    if weight_decay == 0.0:
        return grads, params
    if how == "coupled":
        return add(grads, params, read(weight_decay, value)), params
    return grads, add(params, params, -shrinkage(how, weight_decay, lr, value))


def shrinkage(how: Decay, weight_decay: Scalar, lr: Scalar, value: Value) -> float | Tensor:
    """Return the part of a parameter that decoupled decay subtracts; 0 if the decay is coupled."""
    if how == "coupled" or weight_decay == 0.0:
        return 0.0
    return read(weight_decay, value) * (read(lr, value) if how == "by rate" else progress(lr, value))


def progress(scalar: Scalar, value: Value) -> float | Tensor:
    """Return the product of a scalar's schedules, or 1 without schedules.

    Example:
        >>> from purecompose.schedule import cosine, hparam
        >>> progress(0.1 * cosine() * hparam("lr", 3.0), lambda schedule: 0.25)
        0.25
    """
    return math.prod((read(one, value) for one in factors_of(scalar) if isinstance(one, Schedule)), start=1.0)


class DecayRule(NamedTuple):
    """Rule for which parameters decay, and by how much."""

    name: str
    """Name of the algorithm that added the rule."""
    weight_decay: Scalar
    """Fraction of a weight removed per step, before multiplication by the learning rate's schedule."""
    min_dims: int = 0
    """Smallest number of dimensions of a parameter that decays."""
    exclude: tuple[str, ...] = ()
    """Patterns (`fnmatch`) for the names of parameters that do not decay."""
    where: tuple[str, ...] = ("*",)
    """Patterns for the names of parameters that decay."""

    def held(self, names: tuple[str, ...], params: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the parameters that decay."""
        chosen = matched(self.where, names) - matched(self.exclude, names)
        return [name for name in names if name in params and params[name].ndim >= self.min_dims and name in chosen]


@dataclass(frozen=True)
class Decaying:
    """Optimizer that first decays each weight, p <- p - s weight_decay p, and then updates as the inner optimizer does.

    s is the product of the schedules of the inner optimizer's learning rate, 1 without any. Only parameters with a
    gradient decay.

    Args:
        inner: The optimizer.
        rules: The decay rules, applied one after the other.

    Raises:
        ValueError: The inner optimizer consists of several, each with its own learning rate.

    Example:
        >>> import torch
        >>> from purecompose.optim import sgd
        >>> optimizer, params = Decaying(sgd(0.5), (DecayRule("mine", 0.1),)), {"w": torch.tensor([1.0, 2.0])}
        >>> optimizer.update({"w": torch.ones(2)}, {}, params)[0]["w"]
        tensor([0.4000, 1.3000])
    """

    inner: Optimizer
    rules: tuple[DecayRule, ...]

    def __post_init__(self) -> None:
        if len(leaves(self.inner)) > 1:
            raise ValueError(
                f"Decaying: expected one optimizer, whose learning rate the decay follows, got {self.inner!r}: use it "
                "inside by_pattern, around each optimizer that should decay: by_pattern({'*': Decaying(muon(0.02), "
                "rules)}, Decaying(adam(1e-3), rules))"
            )

    def init(self, params: Mapping[str, Tensor]) -> Any:
        """Return the inner optimizer's state."""
        return self.inner.init(params)

    def update(
        self, grads: Mapping[str, Tensor], opt_state: Any, params: Mapping[str, Tensor], value: Value = number
    ) -> tuple[dict[str, Tensor], Any]:
        """Return the inner optimizer's update of the decayed parameters; see `Optimizer.update`."""
        smaller = dict(params)
        for rule in self.rules:
            for rate, names in self._rates(tuple(grads)):
                held = rule.held(names, smaller)
                if held:
                    before = [smaller[name] for name in held]
                    _, moved = decayed("by schedule", [], [*map(local, before)], rule.weight_decay, rate, value)
                    after = (placed(own, place_of(param)) for own, param in zip(moved, before, strict=True))
                    smaller.update(zip(held, after, strict=True))
        return self.inner.update(grads, opt_state, smaller, value)

    def _rates(self, names: tuple[str, ...]) -> Iterator[tuple[Scalar, tuple[str, ...]]]:
        """Return the learning rates, each with the parameters that have it."""
        leaf = leaves(self.inner)[0]
        parts = (
            [(cell.rule, cell.names) for cell in cells(leaf, names)] if isinstance(leaf, ByGroup) else [(leaf, names)]
        )
        for part, own in parts:
            rate = settings_of(part).get("lr")
            yield 1.0 if rate is None else rate, own
