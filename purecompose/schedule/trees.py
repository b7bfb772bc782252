"""Scalars inside a tree, such as an optimizer: find them, and stretch them together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from purecompose._support.checks import check_number
from purecompose.schedule.scalar import Schedule


T = TypeVar("T")


def collect(obj: object, kind: type[T]) -> tuple[T, ...]:
    """Return the distinct instances of `kind` inside a tree of dataclasses, tuples, lists and dicts.

    Equal instances count once, in order of appearance. Other leaves are ignored, and instances of `kind` are not
    searched themselves.

    Args:
        obj: The tree.
        kind: The type of the instances.

    Example:
        >>> from purecompose.schedule import Hparam, hparam
        >>> collect({"lr": 0.1 * hparam("lr", 1.0), "decay": (hparam("decay", 0.0),)}, Hparam)
        (hparam('lr', 1.0), hparam('decay', 0.0))
    """
    found: dict[T, None] = {}
    _collect(obj, kind, found)
    return tuple(found)


def hidden(obj: object, kind: type[T]) -> Iterator[tuple[object, T]]:
    """Yield instances of `kind` that `collect` does not find: in attributes of objects that are not nodes of a tree.

    Returns:
        Pairs of the object and the instance in it.

    Example:
        >>> from purecompose.schedule import Hparam, hparam
        >>> class Holder:
        ...     def __init__(self) -> None:
        ...         self.lr = hparam("lr", 0.1)
        >>> [scalar for _, scalar in hidden({"holder": Holder()}, Hparam)]
        [hparam('lr', 0.1)]
    """
    if isinstance(obj, kind):
        return
    inner = _children(obj)
    if inner is not None:
        for one in inner:
            yield from hidden(one, kind)
    elif not isinstance(obj, type):
        for one in collect(getattr(obj, "__dict__", {}), kind):
            yield obj, one


def scaled(tree: T, ratio: float, *, scale_warmup: bool = False) -> T:
    """Return the same tree with every schedule in it stretched in time; see `Schedule.scaled`.

    Args:
        tree: A scalar, an optimizer, or another tree of dataclasses, tuples, lists and dicts, as for `collect`.
        ratio: The factor, above 0.
        scale_warmup: True to stretch warm-ups, too.

    Returns:
        A new tree, or the given one if nothing in it changes.

    Raises:
        TypeError, ValueError: As for `Schedule.scaled`.

    Example:
        >>> from purecompose import optim
        >>> from purecompose.schedule import multi_step
        >>> scaled(0.1 * multi_step(["30ep", "60ep"]), 0.5)
        0.1 * multi_step(milestones=['30ep', '60ep'], gamma=0.1, warmup='0ba').scaled(0.5)
        >>> scaled(optim.sgd(0.1, momentum=0.9), 0.5)
        sgd(lr=0.1, momentum=0.9)
    """
    check_number(ratio, "scaled: ratio", 0, above=True, hint="0.5 is for half the time")
    return _mapped(tree, lambda schedule: schedule.scaled(ratio, scale_warmup=scale_warmup))


def _collect(obj: object, kind: type[T], found: dict[T, None]) -> None:
    if isinstance(obj, kind):
        found.setdefault(obj)
        return
    for inner in _children(obj) or ():
        _collect(inner, kind, found)


def _children(obj: object) -> Iterable[Any] | None:
    """Return the children of a tree's node; `None` for a leaf."""
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [getattr(obj, field.name) for field in dataclasses.fields(obj)]
    if isinstance(obj, Mapping):
        return obj.values()
    return obj if isinstance(obj, tuple | list) else None


def _mapped(obj: Any, fn: Callable[[Schedule], Schedule]) -> Any:
    if isinstance(obj, Schedule):
        return fn(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        fields = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if field.init}
        changed = {name: new for name, old in fields.items() if (new := _mapped(old, fn)) is not old}
        return dataclasses.replace(obj, **changed) if changed else obj
    if isinstance(obj, Mapping):
        new = {key: _mapped(value, fn) for key, value in obj.items()}
        return obj if all(new[key] is obj[key] for key in obj) else type(obj)(new)  # pyright: ignore[reportCallIssue]
    if isinstance(obj, tuple | list):
        members = [_mapped(member, fn) for member in obj]
        if all(new is old for new, old in zip(members, obj, strict=True)):
            return obj
        return type(obj)(*members) if hasattr(obj, "_fields") else type(obj)(members)
    return obj
