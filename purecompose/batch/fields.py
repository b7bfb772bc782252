"""The members of a batch, which a field identifies (see `purecompose.batch`), and its tensors."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from purecompose import tree
from purecompose._support.internals import is_transforming


def map_tensors(fn: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply `fn` to every tensor of the batch, also inside dataclasses, mappings and objects.

    Other leaves are unchanged; an object without tensors is shared. The sizes in a packed sequence stay on the host.

    Args:
        fn: A function of one tensor.
        batch: A batch of any structure.

    Example:
        >>> import torch
        >>> map_tensors(lambda tensor: tensor + 1, {"x": torch.zeros(2), "name": "a"})
        {'x': tensor([1., 1.]), 'name': 'a'}
    """
    if type(batch) is Tensor:  # quick for what each step maps
        return fn(batch)
    if type(batch) is dict:
        return {name: map_tensors(fn, member) for name, member in batch.items()}

    def on_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        if isinstance(leaf, PackedSequence):
            return leaf._replace(**{name: fn(getattr(leaf, name)) for name in _packed_tensors(leaf)})
        if is_graphs(leaf):
            return map_graphs(fn, leaf)
        members = tree.members(leaf)
        if not tensors(members):
            return leaf
        return with_members(leaf, map_tensors(fn, members))

    return tree.map(on_leaf, batch, is_leaf=_is_packed)


def aliases(batch: Any) -> Any:
    """Return the batch with aliases of the tensors that require no gradient, so that flags of a step stay inside it.

    User code may set `x.requires_grad_()`, as forces and differential equations need it.
    """
    if type(batch) is tuple:  # quick for the usual batches
        return tuple([_alias(one) if type(one) is Tensor else aliases(one) for one in batch])
    return map_tensors(_alias, batch)


def _alias(tensor: Tensor) -> Tensor:
    if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.view_as(tensor) if is_transforming() else tensor.detach()  # which would cut outer gradients


def tensors(batch: Any) -> list[Tensor]:
    """Return the batch's tensors, in order, also those inside dataclasses, mappings and objects.

    Args:
        batch: A batch of any structure.

    Example:
        >>> import torch
        >>> tensors({"x": torch.zeros(1), "pair": (torch.ones(1), "a")})
        [tensor([0.]), tensor([1.])]
    """
    found: list[Tensor] = []
    for leaf in tree.leaves(batch, is_leaf=_is_packed):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, PackedSequence):
            found += [getattr(leaf, name) for name in _packed_tensors(leaf)]
        elif is_graphs(leaf):
            found += graph_tensors(leaf)
        elif members := tree.members(leaf):
            found += tensors(members)
    return found


def with_tensors(batch: Any, new: Iterable[Tensor]) -> Any:
    """Return the batch with these tensors in place of its own, in the order of `tensors`.

    Args:
        batch: A batch of any structure.
        new: As many tensors as the batch has.

    Example:
        >>> import torch
        >>> with_tensors({"x": torch.zeros(2), "name": "a"}, [torch.ones(2)])
        {'x': tensor([1., 1.]), 'name': 'a'}
    """
    fresh = iter(new)
    return map_tensors(lambda _: next(fresh), batch)


def with_members(leaf: Any, members: dict[Any, Any]) -> Any:
    """Return a copy of a mapping, dataclass or other object with these members; see `tree.members`."""
    if isinstance(leaf, Mapping):
        return with_items(leaf, members)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        settable = {field.name for field in dataclasses.fields(leaf) if field.init}
        return dataclasses.replace(leaf, **{name: members[name] for name in members if name in settable})
    successor = copy.copy(leaf)
    successor.__dict__.update(members)
    return successor


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a copy of a mapping, of the same type, with these items."""
    if not isinstance(mapping, MutableMapping):
        return type(mapping)({**mapping, **items})  # pyright: ignore[reportCallIssue]
    # A copy keeps data that a constructor would lose: a defaultdict's factory, a tokenizer's encodings. Items are set
    # one by one because the outputs of Hugging Face models refuse `update`.
    successor = copy.copy(mapping)
    for key, value in items.items():
        successor[key] = value
    return successor


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedSequence)


def _packed_tensors(packed: PackedSequence) -> list[str]:
    """Return the names of a packed sequence's tensors, without the sizes, which have to be on the CPU."""
    return [name for name in ("data", "sorted_indices", "unsorted_indices") if getattr(packed, name) is not None]


Field: TypeAlias = int | str | list[Any] | tuple[Any, ...] | Callable[[Any], Any]
"""What identifies a member of a batch: an index, a key, an attribute, a list of these, a getter, or (getter, setter).
"""

WHOLE = "*"
"""The field of the whole batch: a mapping is passed to the model as keyword arguments, anything else unchanged."""


def _as_argument(batch: Any) -> list[Any]:
    return [batch]


def _of_argument(batch: Any, value: list[Any]) -> Any:
    del batch
    return value[0]


AS_ARGUMENT = (_as_argument, _of_argument)
"""The field of the whole batch as one positional argument, for networks with `forward(self, batch)`."""


def get(batch: Any, field: Field | None) -> Any:
    """Return the member of `batch` identified by `field`; `None` for the field `None`.

    Args:
        batch: The batch.
        field: See `purecompose.batch`.

    Raises:
        KeyError: The batch has no such member; the message lists its members.

    Example:
        >>> get({"image": 1, "label": 2}, "label")
        2
    """
    if type(batch) is tuple and isinstance(field, int) and -len(batch) <= field < len(batch):
        return batch[field]  # the common case, which runs in every step
    if field is None:
        return None
    if isinstance(field, str) and field == WHOLE:
        return batch
    if callable(field):
        return field(batch)
    if isinstance(field, tuple):
        return field[0](batch)
    if isinstance(field, list):
        return [get(batch, part) for part in field]
    if isinstance(batch, Tensor):
        if field == 0:
            return batch
        raise KeyError(_missing(batch, field))
    try:
        if isinstance(batch, Mapping) or isinstance(field, int):
            return batch[field]  # pyright: ignore[reportCallIssue, reportArgumentType]
        return getattr(batch, field)
    except (KeyError, IndexError, AttributeError, TypeError):
        raise KeyError(_missing(batch, field)) from None


def put(batch: Any, field: Field | None, value: Any) -> Any:
    """Return a copy of `batch` with `value` as the member identified by `field`; the other members are shared.

    Args:
        batch: A batch of any structure.
        field: What identifies the member.
        value: The new member.

    Raises:
        KeyError: The batch has no such member.
        TypeError: `field` is `None`, or a getter without a setter.

    Example:
        >>> put((1, 2), 1, 5)
        (1, 5)
    """
    if type(batch) is tuple and isinstance(field, int) and 0 <= field < len(batch):
        return (*batch[:field], value, *batch[field + 1 :])
    if field is None:
        raise TypeError(
            "targets cannot be replaced where batches have none (target_field=None): give the batch a member for them, "
            "such as (inputs, inputs) with target_field=1"
        )
    if isinstance(field, str) and field == WHOLE:
        return value
    if isinstance(field, tuple):
        return field[1](batch, value)
    if callable(field):
        raise TypeError(
            f"the batch field {field!r} can only be read; give a pair (getter, setter), with setter(batch, value) -> "
            "new batch"
        )
    if isinstance(field, list):
        for part, member in zip(field, value, strict=True):
            batch = put(batch, part, member)
        return batch
    get(batch, field)  # raises if there is no such member
    return _put_one(batch, field, value)


def check_field(field: Field, role: str) -> None:
    """Raise a `TypeError` if `field` is not a valid field.

    Args:
        field: What identifies a member of a batch.
        role: What the field is for, as named in the error, such as "input_field".

    Raises:
        TypeError: `field` is not a valid field.

    Example:
        >>> check_field("labels", "target_field")
        >>> check_field(0.5, "target_field")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: target_field...
    """
    is_pair = isinstance(field, tuple) and len(field) == 2 and all(callable(part) for part in field)
    if isinstance(field, bool) or not (isinstance(field, (int, str, list)) or is_pair or callable(field)):
        raise TypeError(
            f"{role}={field!r}: expected an index, a name, a list of these, a getter, or a pair (getter, setter)"
        )


def _put_one(batch: Any, field: Any, value: Any) -> Any:
    if isinstance(batch, Tensor):
        return value
    if isinstance(batch, Mapping):
        return with_items(batch, {field: value})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        name = batch._fields[field] if isinstance(field, int) else field  # pyright: ignore
        return batch._replace(**{name: value})  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(batch, (list, tuple)):
        members = list(batch)
        members[field] = value
        return type(batch)(members)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{field: value})
    successor = copy.copy(batch)
    setattr(successor, field, value)
    return successor


def _missing(batch: Any, field: Any) -> str:
    if isinstance(batch, Mapping):
        has = f"the keys {list(batch)}"
    elif isinstance(batch, (tuple, list)):
        has = f"{len(batch)} members"
    elif isinstance(batch, Tensor):
        has = "only itself, with the field 0; its rows are examples"
    elif is_graphs(batch):
        has = f"the attributes {list(batch.to_dict())}"
    else:
        has = f"the attributes {sorted(getattr(batch, '__dict__', {}))}"
    return (
        f"the batch ({type(batch).__name__}) has no member {field!r}; it has {has}. "
        "Name the right one with State.create(..., input_field=..., target_field=...); input_field=batch.WHOLE is for "
        "all members as keyword arguments; target_field=None is for a loss that reads no target"
    )


# A batch of graphs has the protocol of torch_geometric's `Batch`, which need not be installed: `num_graphs`, the number
# of examples; `apply(fn)`, which maps the tensors in place; `stores`, the parts that hold them; `to_dict()`; and a
# `copy.copy` with its own stores.
_RECORDS = ("_slice_dict", "_inc_dict")
"""Where torch_geometric keeps the place of each graph's rows, on the host."""


def is_graphs(value: Any) -> bool:
    return hasattr(type(value), "num_graphs") and callable(getattr(value, "apply", None))


def map_graphs(fn: Callable[[Tensor], Any], graphs: Any) -> Any:
    """Return a batch with `fn` applied to each tensor; everything else is shared."""
    return copy.copy(graphs).apply(lambda value: fn(value) if isinstance(value, Tensor) else value)


def graph_tensors(graphs: Any) -> list[Tensor]:
    """Return the tensors of a batch, in the order of `map_graphs`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_graphs(note, graphs)
    return found


def without_records(graphs: Any) -> Any:
    """Return a batch without the place of each graph's rows, which differs from batch to batch.

    The number of graphs then follows from the shape of `ptr`, the first node of each graph, if there is one.
    """
    bare = copy.copy(graphs)
    records = (*_RECORDS, "_num_graphs") if hasattr(graphs, "ptr") else _RECORDS
    for store in bare.stores:
        for name in records:
            vars(store).pop(name, None)
    return bare
