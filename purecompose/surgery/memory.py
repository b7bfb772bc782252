"""An optimizer for a network after a surgery: its groups, and what it remembers."""

import dataclasses
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from purecompose._warnings import warn
from purecompose.optim.base import ByGroup, cells
from purecompose.optim.by_pattern import ByPattern, by_pattern


__all__ = ["carried", "fitted", "without_groups"]


def carried(optimizer: Any, opt_state: Any, params: Mapping[str, Tensor], kept: Mapping[str, str]) -> Any:
    """An optimizer's state for other parameters: what it remembers of those that were kept, the rest fresh.

    Args:
        optimizer: The one that the state is of.
        opt_state: Its state for the parameters as they were.
        params: The parameters by their new names.
        kept: New names of those that were kept, with their old ones.
    """
    names, lost = set(params), set[str]()

    def fresh() -> Any:
        # Of kept parameters only names and shapes: what is made for them is put aside, and need not be allocated.
        return optimizer.init(
            {
                name: param.detach().to("meta") if name in kept and name not in lost else param
                for name, param in params.items()
            }
        )

    def is_by_name(memory: Any) -> bool:
        # The innermost such mapping: a slot may be called as a parameter is.
        is_named = isinstance(memory, Mapping) and bool(memory) and memory.keys() <= names
        return is_named and not any(map(is_by_name, memory.values()))

    def joined(new: Any, old: Any) -> Any:
        if is_by_name(new):
            lost.update(name for name in new if name in kept and kept[name] not in old)
            return {name: old[kept[name]] if name in kept and kept[name] in old else new[name] for name in new}
        if isinstance(new, Mapping):
            if not new.keys() <= old.keys():  # it remembers what it did not of any parameter
                lost.update(names)
            return {key: joined(value, old[key]) if key in old else value for key, value in new.items()}
        if isinstance(new, tuple | list):
            members = [joined(mine, theirs) for mine, theirs in zip(new, old, strict=True)]
            return type(new)(*members) if hasattr(new, "_fields") else type(new)(members)
        return old

    result = joined(fresh(), opt_state)
    # In another group the optimizer may remember what it did not before.
    return joined(fresh(), opt_state) if lost else result


def fitted(name: str, optimizer: Any, before: Collection[str], after: Collection[str], kept: Mapping[str, str]) -> Any:
    """The optimizer without the groups that have lost all their parameters.

    Args:
        name: What warnings call the surgery.
        optimizer: An optimizer, or one around it.
        before: The parameters' names as they were.
        after: Their names now.
        kept: New names of those that were kept, with their old ones.

    Warns:
        UserWarning: A group is taken out; parameters are in another one under their new names.
    """
    inner = _with_groups(optimizer)
    if inner is None:
        return optimizer
    _warn_of_moves(name, inner, kept)
    held = {pattern: [one for one in before if fnmatchcase(one, pattern)] for pattern, _ in inner.groups}
    gone = {
        pattern: names
        for pattern, names in held.items()
        if names and not any(fnmatchcase(one, pattern) for one in after)
    }
    now = {old: new for new, old in kept.items()}
    for pattern, names in gone.items():
        went = [f"{one!r} is now {now[one]!r}" if one in now else f"{one!r} is gone" for one in names]
        warn(
            f"{name}: the optimizer's group {pattern!r} has no parameter any more ({_listed(went)}), and is taken out "
            "of the optimizer"
        )
    return without_groups(optimizer, gone) if gone else optimizer


def without_groups(optimizer: Any, patterns: Collection[str] | None = None) -> Any:
    """The optimizer, or the one inside of it, without settings for parameters by name.

    Args:
        optimizer: An optimizer, or one around it that is a dataclass and has it as `inner`.
        patterns: Those of the groups to be left out; by default all.

    Example:
        >>> from purecompose import optim
        >>> without_groups(optim.guarded.Guarded(optim.sgd(0.1, groups={"*.bias": {"lr": 0.2}})))
        Guarded(inner=sgd(lr=0.1))
    """
    if isinstance(optimizer, ByGroup):
        rest = () if patterns is None else tuple(group for group in optimizer.groups if group[0] not in patterns)
        return dataclasses.replace(optimizer, groups=rest)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if isinstance(optimizer, ByPattern):
        kept = {} if patterns is None else {one: own for one, own in optimizer.groups if one not in patterns}
        own = {pattern: without_groups(part, patterns) for pattern, part in kept.items()}
        return by_pattern(own, without_groups(optimizer.rest, patterns))
    if not dataclasses.is_dataclass(optimizer) or not hasattr(optimizer, "inner"):
        return optimizer
    wrapper: Any = optimizer
    return dataclasses.replace(wrapper, inner=without_groups(wrapper.inner, patterns))


def _with_groups(optimizer: Any) -> ByGroup | None:
    """The optimizer that has groups, or the one inside of it."""
    while optimizer is not None and not isinstance(optimizer, ByGroup):
        optimizer = getattr(optimizer, "inner", None)
    return optimizer if optimizer is not None and optimizer.groups else None


def _warn_of_moves(name: str, optimizer: Any, kept: Mapping[str, str]) -> None:
    """Warns of parameters that are in another group under their new names."""
    rules: dict[str, Any] = {}
    for names in (tuple(kept), tuple(kept.values())):
        rules |= {name: cell.rule for cell in cells(optimizer, names) for name in cell.names}
    moved = [f"{old!r}, now {new!r}" for new, old in kept.items() if rules[new] != rules[old]]
    if moved:
        patterns = ", ".join(repr(pattern) for pattern, _ in optimizer.groups)
        warn(
            f"{name}: {_listed(moved)}: the optimizer's groups ({patterns}) see new names, and "
            "give these parameters other settings than before; write patterns that match both"
        )


def _listed(words: list[str]) -> str:
    return "; ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
