"""Optimizers that contain others, such as `guarded` and `by_pattern`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from purecompose.optim.base import ByGroup
from purecompose.optim.by_pattern import ByPattern


def leaves(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers that move weights, looking into the field `inner` and into the patterns of `by_pattern`.

    The first is the optimizer for parameters that no pattern matches.
    """
    if isinstance(optimizer, ByPattern):
        return (*leaves(optimizer.rest), *[leaf for _, own in optimizer.groups for leaf in leaves(own)])
    return leaves(optimizer.inner) if _is_around(optimizer) else (optimizer,)


def map_leaves(change: Callable[[Any], Any], optimizer: Any, *, up_to: type | tuple[type, ...] = ()) -> Any:
    """Return the optimizer with its leaves replaced.

    Args:
        change: Function from a leaf to its replacement.
        optimizer: The optimizer.
        up_to: Types of wrapping optimizers that also count as leaves.

    Example:
        >>> from purecompose.optim import by_pattern, sgd
        >>> map_leaves(lambda leaf: sgd(2 * leaf.lr), by_pattern({"*.bias": sgd(0.1)}, sgd(0.5)))
        by_pattern({'*.bias': sgd(lr=0.2)}, sgd(lr=1.0))
    """
    if isinstance(optimizer, up_to):
        return change(optimizer)
    if isinstance(optimizer, ByPattern):
        groups = tuple((pattern, map_leaves(change, own, up_to=up_to)) for pattern, own in optimizer.groups)
        return ByPattern(groups, map_leaves(change, optimizer.rest, up_to=up_to))
    if _is_around(optimizer):
        return dataclasses.replace(optimizer, inner=map_leaves(change, optimizer.inner, up_to=up_to))
    return change(optimizer)


def settings_of(leaf: Any) -> Mapping[str, Any]:
    """Return the settings of a leaf optimizer without its groups; for a user's own optimizer, its fields."""
    if isinstance(leaf, ByGroup):
        return leaf.settings_by_name
    if not dataclasses.is_dataclass(leaf):
        return {}
    return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.name != "groups"}


def with_setting(leaf: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """Return a leaf optimizer with one setting changed, in its groups as well.

    Raises:
        KeyError: The optimizer has no such setting.
    """
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
