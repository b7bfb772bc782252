"""Optimizers around others: they skip steps that are not finite, or decay weights; and functions that look inside."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.device import is_shard, local, place_of, placed, sum_of_shards
from purecompose._support.internals import is_watched
from purecompose._support.messages import warn
from purecompose.optim.base import ByGroup, cells, decayed, matched
from purecompose.optim.by_pattern import ByPattern
from purecompose.optim.lists import is_plain, largest
from purecompose.optim.protocol import Optimizer, Value
from purecompose.schedule import Scalar, number


@dataclasses.dataclass(frozen=True)
class Guarded:
    """Optimizer that updates as the inner one does, or not at all if any element of a gradient is inf or NaN.

    Both outcomes are computed and one is chosen on the device, so that nothing waits for the device, and the choice
    can be traced and mapped.
    """

    inner: Optimizer

    def init(self, params: Mapping[str, Tensor]) -> Any:
        return self.inner.init(params)

    def update(
        self, grads: Mapping[str, Tensor], opt_state: Any, params: Mapping[str, Tensor], value: Value = number
    ) -> tuple[dict[str, Tensor], Any]:
        """Return the inner optimizer's update if all of `grads` is finite, else the old values; see
        `Optimizer.update`.
        """
        moved, new_opt_state = self.inner.update(grads, opt_state, params, value)
        stayed = {name: params[name] for name in moved}
        return chosen(all_finite(grads.values()), (moved, new_opt_state), (stayed, opt_state))


def guarded(optimizer: Any) -> Guarded:
    """Return the optimizer with a guard around it; one that has a guard is returned unchanged."""
    return optimizer if isinstance(optimizer, Guarded) else Guarded(optimizer)


def check_guarded(optimizer: Any, where: str) -> None:
    """Raise a `RuntimeError` if an optimizer has lost the guard that a method put around it."""
    if not isinstance(optimizer, Guarded):
        raise RuntimeError(
            f"{where}: expected the optimizer that INIT has wrapped, which skips steps that are not finite, got "
            f"{optimizer!r}: replace it before step.init, or wrap the new one in optim.wrapping.Guarded(...)"
        )


def chosen(is_good: Tensor, new: Any, old: Any) -> Any:
    """Return the tree `new` if the 0-d bool is true, else `old`, bit for bit; chosen on the device."""
    return tree.map(lambda a, b: a if a is b else torch.where(is_good, a, b), new, old)


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether no element is inf or NaN: 0-d, bool, on the tensors' device; the same on all processes that share
    the tensors' rows.
    """
    found = [tensor.detach() for tensor in tensors if tensor.numel()]
    if shards := [tensor for tensor in found if is_shard(tensor)]:
        own = all_finite(map(local, found)).to(found[0].device)
        return sum_of_shards((~own).float(), shards) == 0
    if not found:
        return torch.ones((), dtype=torch.bool)
    if is_plain() and not is_watched():
        # One call computes the largest magnitudes. Not used in a traced graph, whose kernels are fused anyway.
        return largest(found).isfinite().all()
    return torch.stack([tensor.isfinite().all() for tensor in found]).all()


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
        chosen = matched(self.where, names) - matched(self.exclude, names)
        return [name for name in names if name in params and params[name].ndim >= self.min_dims and name in chosen]


@dataclasses.dataclass(frozen=True)
class Decaying:
    """Optimizer that first decays each weight, p <- p - s weight_decay p, and then updates as the inner optimizer does.

    s is the product of the schedules of the inner optimizer's learning rate, 1 without any. Only parameters with a
    gradient decay.
    """

    inner: Optimizer
    rules: tuple[DecayRule, ...]

    def __post_init__(self) -> None:
        if len(leaves(self.inner)) > 1:
            raise ValueError(
                f"Decaying: expected one optimizer, whose learning rate the decay follows, got {self.inner!r}: use it "
                "inside by_pattern, around each optimizer that should decay"
            )

    def init(self, params: Mapping[str, Tensor]) -> Any:
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


# Functions that look into optimizers around others, such as `Guarded` and `by_pattern`.


def leaves(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers that move weights, looking into the field `inner` and into the patterns of `by_pattern`.

    The first is the optimizer for parameters that no pattern matches.
    """
    if isinstance(optimizer, ByPattern):
        return (*leaves(optimizer.rest), *[leaf for _, own in optimizer.groups for leaf in leaves(own)])
    return leaves(optimizer.inner) if _is_around(optimizer) else (optimizer,)


def map_leaves(change: Callable[[Any], Any], optimizer: Any, *, up_to: type | tuple[type, ...] = ()) -> Any:
    """Return the optimizer with its leaves replaced."""
    if isinstance(optimizer, up_to):
        return change(optimizer)
    if isinstance(optimizer, ByPattern):
        groups = tuple((pattern, map_leaves(change, own, up_to=up_to)) for pattern, own in optimizer.groups)
        return ByPattern(groups, map_leaves(change, optimizer.rest, up_to=up_to))
    if _is_around(optimizer):
        return dataclasses.replace(optimizer, inner=map_leaves(change, optimizer.inner, up_to=up_to))
    return change(optimizer)


def rules_of(optimizer: Any, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return, for each parameter by name, the optimizer with the settings that move it."""
    if isinstance(optimizer, ByPattern):
        found: dict[str, Any] = {}
        for i, names in optimizer.parts(params, params).items():
            found |= rules_of(optimizer.own(i), {name: params[name] for name in names})
        return found
    if isinstance(optimizer, ByGroup):
        return {name: cell.rule for cell in cells(optimizer, tuple(params)) for name in cell.names}
    return rules_of(optimizer.inner, params) if _is_around(optimizer) else dict.fromkeys(params, optimizer)


def warn_of_moved_rows(optimizer: Any, params: Mapping[str, Tensor], tables: Iterable[str]) -> None:
    """Warn of tables that should have sparse gradients, of which an optimizer moves rows that no index names."""
    rules = rules_of(optimizer, params) if (tables := list(tables)) else {}
    for name in tables:
        if not getattr(rules.get(name), "moves_rows", False):
            warn(
                f"{name} belongs to an embedding with sparse=True, but {optimizer!r} moves all rows in each step, as "
                "with dense gradients: only optim.sgd without momentum and decay, optim.adagrad and optim.sparse_adam "
                f"leave rows that no index names, as in optim.by_pattern({{{name!r}: optim.sparse_adam(1e-3)}}, rest)"
            )


def without_groups(optimizer: Any) -> Any:
    """Return the optimizer without settings for parameters by name; of `by_pattern`, that of the other parameters."""

    replace: Any = dataclasses.replace  # a rule is a dataclass, which its base does not say

    def changed(part: Any) -> Any:
        if isinstance(part, ByPattern):
            return without_groups(part.rest)
        return replace(part, groups=()) if isinstance(part, ByGroup) else part

    return map_leaves(changed, optimizer, up_to=ByPattern)


def settings_of(leaf: Any) -> Mapping[str, Any]:
    """Return the settings of a leaf optimizer without its groups; for a user's own optimizer, its fields."""
    if isinstance(leaf, ByGroup):
        return leaf.settings_by_name
    if not dataclasses.is_dataclass(leaf):
        return {}
    return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.name != "groups"}


def settings_with_groups(leaf: Any) -> list[Mapping[str, Any]]:
    """Return the settings of a leaf optimizer, and those that each of its groups overrides."""
    return [settings_of(leaf), *[dict(options) for _, options in getattr(leaf, "groups", ())]]


def with_setting(leaf: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """Return a leaf optimizer with one setting changed, in its groups as well."""
    changes = {name: change(settings_of(leaf)[name])}
    if not isinstance(leaf, ByGroup):
        return dataclasses.replace(leaf, **changes)
    groups = tuple(
        (pattern, tuple((option, change(value) if option == name else value) for option, value in options))
        for pattern, options in leaf.groups
    )
    rule: Any = leaf.overridden(changes)
    return dataclasses.replace(rule, groups=groups)


def _is_around(optimizer: Any) -> bool:
    return dataclasses.is_dataclass(optimizer) and hasattr(optimizer, "inner")
