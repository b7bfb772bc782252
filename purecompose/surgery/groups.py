"""The optimizer after a surgery: its groups."""

import dataclasses
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from purecompose._support.messages import warn
from purecompose.optim.base import ByGroup, cells
from purecompose.optim.by_pattern import ByPattern
from purecompose.optim.nested import map_leaves


def fitted(
    name: str, optimizer: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor], kept: Mapping[str, str]
) -> Any:
    """Return the optimizer without the groups, and the patterns of `by_pattern`, that have lost all their parameters.

    Args:
        name: Name of the surgery in warnings.
        optimizer: An optimizer, possibly around others.
        before: The parameters by their old names.
        after: The parameters by their new names.
        kept: Map from the new names of parameters that were kept to their old names.

    Warns:
        UserWarning: A group is removed, or parameters are in another group under their new names.
    """

    def changed(part: Any) -> Any:
        if isinstance(part, ByPattern):
            return _fitted_parts(name, part, before, after, kept)
        return _fitted_groups(name, part, before, after, kept) if isinstance(part, ByGroup) else part

    return map_leaves(changed, optimizer, up_to=ByPattern)


def _fitted_groups(
    name: str, optimizer: ByGroup, before: Iterable[str], after: Iterable[str], kept: Mapping[str, str]
) -> Any:
    rules: dict[str, Any] = {}
    for names in (tuple(kept), tuple(kept.values())):
        rules |= {name: cell.rule for cell in cells(optimizer, names) for name in cell.names}
    _warn_of_moves(name, optimizer, kept, {new: rules[new] == rules[old] for new, old in kept.items()})
    left = list(optimizer.groups)
    for group in optimizer.groups:
        names = [one for one in before if fnmatchcase(one, group[0])]
        if names and not any(fnmatchcase(one, group[0]) for one in after):
            _warn_of_loss(name, group[0], names, kept)
            left.remove(group)
    changed: Any = optimizer
    return dataclasses.replace(changed, groups=tuple(left))


def _fitted_parts(
    name: str, optimizer: ByPattern, before: Mapping[str, Tensor], after: Mapping[str, Tensor], kept: Mapping[str, str]
) -> ByPattern:
    parts = [*optimizer.groups, ("", optimizer.rest)]
    olds, news = (optimizer.parts(params, params) for params in (before, after))
    was, now = ({name: i for i, names in held.items() for name in names} for held in (olds, news))
    is_same = {new: parts[now[new]][1] == parts[was[old]][1] for new, old in kept.items()}
    _warn_of_moves(name, optimizer, kept, is_same)
    left: list[tuple[str, Any]] = []
    for i, (pattern, own) in enumerate(parts):
        if i in olds and i not in news and i < len(optimizer.groups):
            _warn_of_loss(name, pattern, olds[i], kept)
            continue
        mine, then = ({one: params[one] for one in held.get(i, ())} for held, params in ((olds, before), (news, after)))
        stayed = {new: old for new, old in kept.items() if new in then and old in mine}
        left.append((pattern, fitted(name, own, mine, then, stayed)))
    return ByPattern(tuple(left[:-1]), left[-1][1])


def without_groups(optimizer: Any) -> Any:
    """Return the optimizer, or its inner optimizer, without settings for parameters by name.

    Args:
        optimizer: An optimizer, or a dataclass around it with the field `inner`. For `by_pattern`, the optimizer of the
            remaining parameters is used.

    Example:
        >>> from purecompose import optim
        >>> without_groups(optim.guarded.Guarded(optim.sgd(0.1, groups={"*.bias": {"lr": 0.2}})))
        Guarded(inner=sgd(lr=0.1))
    """

    def changed(part: Any) -> Any:
        if isinstance(part, ByPattern):
            return without_groups(part.rest)
        if not isinstance(part, ByGroup):
            return part
        rule: Any = part
        return dataclasses.replace(rule, groups=())

    return map_leaves(changed, optimizer, up_to=ByPattern)


def _warn_of_loss(name: str, pattern: str, names: Iterable[str], kept: Mapping[str, str]) -> None:
    """Warn of a group that has lost all of its parameters, which are given by name."""
    now = {old: new for new, old in kept.items()}
    went = [f"{one!r} is now {now[one]!r}" if one in now else f"{one!r} is gone" for one in names]
    warn(
        f"{name}: the optimizer's group {pattern!r} no longer matches a parameter ({_listed(went)}), and is removed "
        "from the optimizer"
    )


def _warn_of_moves(
    name: str, optimizer: ByGroup | ByPattern, kept: Mapping[str, str], is_same: Mapping[str, bool]
) -> None:
    """Warn of parameters that are in another group under their new names."""
    moved = [f"{old!r}, now {new!r}" for new, old in kept.items() if not is_same[new]]
    if moved:
        patterns = ", ".join(repr(pattern) for pattern, _ in optimizer.groups)
        warn(
            f"{name}: {_listed(moved)}: with their new names, the optimizer's groups ({patterns}) give these "
            "parameters other settings than before; write patterns that match both"
        )


def _listed(words: list[str]) -> str:
    return "; ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
