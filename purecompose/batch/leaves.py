"""The tensors of a batch, also inside dataclasses, mappings, objects, packed sequences and graphs."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from purecompose import tree
from purecompose._support.functorch import is_transforming


def map_tensors(fn: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply `fn` to every tensor of the batch, also inside dataclasses, mappings and objects.

    Other leaves are unchanged; an object without tensors is shared. The sizes in a packed sequence count as its form:
    they stay on the host.

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


# A batch of graphs has the protocol of torch_geometric's `Batch`, which need not be installed: `num_graphs`, the number
# of examples; `apply(fn)`, which maps the tensors in place; `stores`, the parts that hold them; `to_dict()`; and a
# `copy.copy` with its own stores.
_RECORDS = ("_slice_dict", "_inc_dict")
"""Where torch_geometric keeps the place of each graph's rows, on the host."""


def is_graphs(value: Any) -> bool:
    """Return whether a value is a batch of graphs."""
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
