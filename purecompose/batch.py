"""Batches of any shape: read and replace one member, count the examples, split.

A batch is a tensor, a tuple, a list, a mapping, a dataclass or any object with attributes, nested at will. A
*key* names one member: an index, a mapping key, an attribute, a list of keys (several members at once), a
getter, or a pair (getter, setter) where a setter is `(batch, value) -> new batch`. Nothing here edits a
batch in place.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from purecompose import tree


__all__ = ["WHOLE", "Key", "get", "put", "num_examples", "split", "map_tensors", "tensors", "check_key"]

Key = int | str | list | tuple | Callable[[Any], Any]

WHOLE = "*"
"""The key of the whole batch: a mapping reaches the model as keyword arguments, anything else as it is."""


def get(batch: Any, key: Key) -> Any:
    """The member of `batch` that `key` names.

    Args:
        batch: The batch.
        key: See the module's docstring.

    Raises:
        KeyError: The batch has no such member; the message lists what it has.

    Example:
        >>> get({"image": 1, "label": 2}, "label")
        2
    """
    if type(batch) is tuple and isinstance(key, int) and -len(batch) <= key < len(batch):
        return batch[key]  # the common case, and on the path of every step
    if isinstance(key, str) and key == WHOLE:
        return batch
    if callable(key):
        return key(batch)
    if isinstance(key, tuple):
        return key[0](batch)
    if isinstance(key, list):
        return [get(batch, part) for part in key]
    try:
        if isinstance(batch, Mapping) or isinstance(key, int):
            return batch[key]  # pyright: ignore[reportCallIssue, reportArgumentType]
        return getattr(batch, key)
    except (KeyError, IndexError, AttributeError, TypeError):
        raise KeyError(_missing(batch, key)) from None


def put(batch: Any, key: Key, value: Any) -> Any:
    """A copy of `batch` with `value` in the place that `key` names; the other members are shared.

    Raises:
        KeyError: The batch has no such member.
        TypeError: `key` is a getter without a setter.

    Example:
        >>> put((1, 2), 1, 5)
        (1, 5)
    """
    if type(batch) is tuple and isinstance(key, int) and 0 <= key < len(batch):
        return (*batch[:key], value, *batch[key + 1 :])
    if isinstance(key, str) and key == WHOLE:
        return value
    if isinstance(key, tuple):
        return key[1](batch, value)
    if callable(key):
        raise TypeError(
            f"the batch key {key!r} can only read; give a pair (getter, setter), with setter(batch, value) -> new batch"
        )
    if isinstance(key, list):
        for part, member in zip(key, value, strict=True):
            batch = put(batch, part, member)
        return batch
    get(batch, key)  # raises where there is no such member
    return _put_one(batch, key, value)


def num_examples(batch: Any) -> int:
    """The leading dimension that all tensors of the batch share.

    Raises:
        ValueError: There is no tensor with a leading dimension, or they disagree.
    """
    if type(batch) is tuple and len(batch) == 2 and type(batch[0]) is Tensor and type(batch[1]) is Tensor:
        first, second = batch
        if first.ndim and second.ndim and first.shape[0] == second.shape[0]:
            return first.shape[0]
    sizes = [leaf.shape[0] for leaf in tensors(batch) if leaf.ndim > 0]
    if len(set(sizes)) != 1:
        found = f"found {sizes}" if sizes else f"found no tensor in {type(batch).__name__} (torch.from_numpy helps)"
        raise ValueError(f"a batch's tensors must share their leading dimension; {found}")
    return sizes[0]


def split(batch: Any, num_parts: int) -> list[Any]:
    """Cuts the batch along the leading dimension into `num_parts` parts of (nearly) equal size.

    Sizes differ by at most one, larger parts first. Lists of plain values (not tensors) are treated as one
    member for all examples and go into each part whole, as do 0-d tensors.

    Raises:
        ValueError: There are fewer examples than parts, or the tensors disagree on their number.

    Example:
        >>> [part.tolist() for part in split(torch.arange(5), 2)]
        [[0, 1, 2], [3, 4]]
    """
    total = num_examples(batch)
    if not 1 <= num_parts <= total:
        raise ValueError(f"cannot cut a batch of {total} examples into {num_parts} microbatches")
    parts = {id(leaf): leaf.tensor_split(num_parts) if leaf.ndim else [leaf] * num_parts for leaf in tensors(batch)}
    return [map_tensors(lambda leaf, i=i: parts[id(leaf)][i], batch) for i in range(num_parts)]


def map_tensors(fn: Callable[[Tensor], Any], batch: Any) -> Any:
    """Applies `fn` to every tensor of the batch, also inside dataclasses, mappings and objects.

    What is no tensor stays; an object without tensors is shared.
    """

    def on_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        members = _members(leaf)
        if not tensors(members):
            return leaf
        return _with_members(leaf, map_tensors(fn, members))

    return tree.map(on_leaf, batch)


def tensors(batch: Any) -> list[Tensor]:
    """The batch's tensors, in order, also those inside dataclasses, mappings and objects."""
    found: list[Tensor] = []
    for leaf in tree.leaves(batch):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif members := _members(leaf):
            found += tensors(members)
    return found


def check_key(key: Key, role: str) -> None:
    """Raises a `TypeError` for what cannot be a key."""
    is_pair = isinstance(key, tuple) and len(key) == 2 and all(callable(part) for part in key)
    if isinstance(key, bool) or not (isinstance(key, (int, str, list)) or is_pair or callable(key)):
        raise TypeError(
            f"{role}={key!r}: expected an index, a name, a list of these, a getter, or a pair (getter, setter)"
        )


def _members(leaf: Any) -> dict[Any, Any]:
    """What a leaf of the pytree holds that is a container all the same; empty for plain values."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if isinstance(leaf, type) or callable(leaf):
        return {}
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return dict(getattr(leaf, "__dict__", {}))


def _with_members(leaf: Any, members: dict[Any, Any]) -> Any:
    if isinstance(leaf, Mapping):
        return _with_items(leaf, members)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        settable = {field.name for field in dataclasses.fields(leaf) if field.init}
        return dataclasses.replace(leaf, **{name: members[name] for name in members if name in settable})
    successor = copy.copy(leaf)
    successor.__dict__.update(members)
    return successor


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(mapping, MutableMapping):
        return type(mapping)({**mapping, **items})  # pyright: ignore[reportCallIssue]
    # A copy keeps what a constructor would lose: a defaultdict's factory, a tokenizer's encodings. Item by
    # item, since the outputs of Hugging Face models refuse `update`.
    successor = copy.copy(mapping)
    for key, value in items.items():
        successor[key] = value
    return successor


def _put_one(batch: Any, key: Any, value: Any) -> Any:
    if isinstance(batch, Tensor):
        index = torch.arange(len(batch), device=batch.device) == (key % len(batch))
        return torch.where(index.reshape(-1, *[1] * (batch.ndim - 1)), value, batch)
    if isinstance(batch, Mapping):
        return _with_items(batch, {key: value})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        name = batch._fields[key] if isinstance(key, int) else key  # pyright: ignore
        return batch._replace(**{name: value})  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(batch, (list, tuple)):
        members = list(batch)
        members[key] = value
        return type(batch)(members)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{key: value})
    successor = copy.copy(batch)
    setattr(successor, key, value)
    return successor


def _missing(batch: Any, key: Any) -> str:
    if isinstance(batch, Mapping):
        has = f"the keys {list(batch)}"
    elif isinstance(batch, (tuple, list)):
        has = f"{len(batch)} members"
    else:
        has = f"the attributes {sorted(getattr(batch, '__dict__', {}))}"
    return (
        f"the batch ({type(batch).__name__}) has no member {key!r}; it has {has}. "
        "Name the right one with State.create(..., input_key=..., target_key=...)"
    )
