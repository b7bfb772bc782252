"""Batches of any structure: read and replace a member, count, split and select examples.

A batch is a tensor, a tuple, a list, a mapping, a dataclass or any object with attributes, nested to any depth. A
*field* identifies one member: an index, a key of a mapping, an attribute, a list of these (several members), a
getter, or a pair (getter, setter) where a setter is `(batch, value) -> new batch`. A single tensor has one member,
itself, with the field 0: its rows are examples. Two fields stand for the whole batch: `WHOLE` passes a mapping to the
model as keyword arguments, anything else unchanged; `AS_ARGUMENT` passes the batch as the only argument. `None` is the
field of a member that batches do not have. No function here edits a batch in place.

Examples are rows: they are indexed by the first dimension. If `dim` is not 0, as for sequences (T, N, ...), they are
indexed by that dimension in every tensor that has it, and by the first dimension in the others.

Batches of graphs, in the form of torch_geometric's `Batch`, and packed sequences know how many examples they hold;
their rows are nodes, edges and time steps, and they cannot be cut without a `Splitter`.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from purecompose import tree
from purecompose._support.graphs import graph_tensors, is_graphs, map_graphs


__all__ = [
    "AS_ARGUMENT",
    "WHOLE",
    "Field",
    "Splitter",
    "bounds",
    "get",
    "put",
    "leading_size",
    "num_examples",
    "num_tokens",
    "reported_size",
    "split",
    "take",
    "map_tensors",
    "tensors",
    "check_field",
]

Field = int | str | list | tuple | Callable[[Any], Any]

WHOLE = "*"
"""The field of the whole batch: a mapping is passed to the model as keyword arguments, anything else unchanged."""


def _as_argument(batch: Any) -> list[Any]:
    return [batch]


def _of_argument(batch: Any, value: list[Any]) -> Any:
    del batch
    return value[0]


AS_ARGUMENT = (_as_argument, _of_argument)
"""The field of the whole batch as one positional argument, for networks with `forward(self, batch)`."""


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Functions that count and cut batches whose examples do not lie along a dimension, such as images of any size.

    Args:
        num_examples: `batch -> int`, the number of examples.
        part: `(batch, start, stop) -> batch`, the batch of the examples from `start` to `stop`, `stop` excluded;
            `None` if a batch cannot be cut, such as a rollout or one graph. Whatever would cut it is then refused by
            name.

    Raises:
        TypeError: An argument is not a function.

    Example:
        >>> lists = Splitter(len, lambda batch, start, stop: batch[start:stop])
        >>> lists.part([("image", 1), ("image", 2), ("image", 3)], 0, 2)
        [('image', 1), ('image', 2)]
    """

    num_examples: Callable[[Any], int]
    part: Callable[[Any, int, int], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("num_examples", "part"):
            given = getattr(self, name)
            if not callable(given) and not (name == "part" and given is None):
                raise TypeError(f"Splitter: {name}={given!r}: expected a function")


def get(batch: Any, field: Field | None) -> Any:
    """Return the member of `batch` identified by `field`; `None` for the field `None`.

    Args:
        batch: The batch.
        field: See the module's docstring.

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
        raise TypeError("a member of the batch with the field None cannot be replaced: the batch has no such member")
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


def num_examples(batch: Any, field: Field | None = None, dim: int = 0) -> int:
    """Return the number of examples: the common size of the batch's tensors along the dimension of the examples.

    Args:
        batch: The batch.
        field: The field of the input, for batches with tensors that are not per example (weights of the classes,
            position ids of shape (1, L)): if the tensors disagree, the leading dimension of the input counts, or of
            its first tensor if it has several.
        dim: The dimension of the examples; see the module's docstring.

    Raises:
        ValueError: There is no tensor with a leading dimension, the tensors disagree and there is no field, or the
            input's tensors have three sizes or more.

    Example:
        >>> import torch
        >>> num_examples({"x": torch.zeros(8, 2), "class_weights": torch.ones(3)}, "x")
        8
    """
    if dim == 0 and type(batch) is tuple and len(batch) == 2 and type(batch[0]) is type(batch[1]) is Tensor:
        first, second = batch
        if first.ndim and second.ndim and first.shape[0] == second.shape[0]:
            return first.shape[0]
    reported = reported_size(batch)
    if reported is not None:
        return reported
    shared = leading_size(batch, dim)
    if shared is not None:
        return shared
    sizes = _leading_sizes(batch, dim)
    if not sizes and type(batch) is list and batch and all(isinstance(text, str) for text in batch):
        return len(batch)
    own = _leading_sizes(get(batch, field), dim) if sizes and field is not None else []
    if len({int(size) for size in own}) > 2:
        raise ValueError(
            f"cannot tell the examples of the batch: the input's tensors have {own[:8]} rows; for lists of images of "
            "different sizes and the like give State.create(splitter=...), a purecompose.batch.Splitter"
        )
    if own:
        return own[0]
    found = f"found {sizes}" if sizes else f"found no tensor in {type(batch).__name__} (torch.from_numpy helps)"
    hint = "; name the input by input_field=, and its leading dimension counts" if sizes and field is None else ""
    raise ValueError(f"a batch's tensors must share their leading dimension; {found}{hint}")


def reported_size(batch: Any) -> int | None:
    """Return the number of examples that a batch, or a member of it, reports itself; `None` for all other batches.

    It is the number of graphs for torch_geometric's `Batch`, and the number of sequences for packed ones.

    Example:
        >>> import torch
        >>> packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
        >>> reported_size((packed, torch.zeros(2))), reported_size((torch.zeros(2), torch.zeros(2)))
        (2, None)
    """
    kind = type(batch)
    for member in (batch,) if kind not in (tuple, list, dict) else batch.values() if kind is dict else batch:
        if type(member) is Tensor:
            continue
        if isinstance(member, PackedSequence):
            indices = member.sorted_indices
            return int(member.batch_sizes[0]) if indices is None else indices.shape[0]
        if is_graphs(member):
            return member.num_graphs
    return None


def leading_size(inputs: Any, dim: int = 0) -> int | None:
    """Return the size of all tensors along the dimension of the examples; `None` without tensors or a common size."""
    sizes = _leading_sizes(inputs, dim)
    # Compared one by one, because symbolic sizes cannot be hashed.
    return sizes[0] if sizes and all(size == sizes[0] for size in sizes) else None


def num_tokens(batch: Any) -> int:
    """Return the number of tokens: the size of `input_ids`, padding included, or 0 for batches without them."""
    if type(batch) is tuple or not isinstance(batch, Mapping):
        return 0
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0


def split(batch: Any, num_parts: int, field: Field | None = None, dim: int = 0) -> list[Any]:
    """Cut the batch along the dimension of the examples into `num_parts` parts of (nearly) equal size.

    Sizes differ by at most one, larger parts first. Members that are *per example* are cut: tensors and arrays whose
    leading dimension is the number of examples, and lists and tuples of that length without a tensor in them, such as
    the examples' names. All other members (a 0-d tensor, a text, settings) are contained whole in each part. If a
    member that is not per example has that length by chance, give it another form, such as a named tuple or a leading
    dimension of 1.

    Args:
        batch: The batch.
        num_parts: The number of parts, from 1 to the number of examples.
        field: The field of the input, as for `num_examples`.
        dim: The dimension of the examples; see the module's docstring.

    Raises:
        ValueError: There are fewer examples than parts, or the tensors disagree on their number.

    Example:
        >>> import torch
        >>> [part.tolist() for part in split(torch.arange(5), 2)]
        [[0, 1, 2], [3, 4]]
        >>> split({"x": torch.tensor([1, 2]), "name": ["a", "b"], "set": "train"}, 2)[1]
        {'x': tensor([2]), 'name': ['b'], 'set': 'train'}
    """
    _check_rows(batch)
    total = num_examples(batch, field, dim)
    return [
        _map_rows(lambda rows, part=slice(start, stop): rows[_place(rows, part, dim)], batch, total, dim)
        for start, stop in itertools.pairwise(bounds(total, num_parts))
    ]


def bounds(total: int, num_parts: int) -> list[int]:
    """Return the index of the first example of each part of `total` examples, and `total`.

    Raises:
        ValueError: There are fewer examples than parts.

    Example:
        >>> bounds(5, 2)
        [0, 3, 5]
    """
    if not 1 <= num_parts <= total:
        raise ValueError(f"cannot cut a batch of {total} examples into {num_parts} microbatches")
    size, num_larger = total // num_parts, total % num_parts  # divmod does not support symbolic sizes
    return [i * size + min(i, num_larger) for i in range(num_parts + 1)]


def take(batch: Any, indices: Tensor, num: int | None = None) -> Any:
    """Return the chosen examples, in that order; members that are not per example (see `split`) are unchanged.

    Examples of lists and arrays are chosen on the host: this waits for the device, and is not possible under `vmap` or
    while tracing.

    Args:
        batch: The batch.
        indices: (K,), int64: positions in the batch.
        num: The number of examples in the batch, by default `num_examples(batch)`.

    Raises:
        TypeError: The batch has per-example lists, and the values of the indices cannot be read.
        ValueError: The tensors disagree on the number of examples, and `num` is not given.

    Example:
        >>> import torch
        >>> take({"x": torch.tensor([1, 2, 3]), "name": ["a", "b", "c"]}, torch.tensor([2, 0]))
        {'x': tensor([3, 1]), 'name': ['c', 'a']}
    """
    _check_rows(batch)
    on_host: list[list[int]] = []

    def chosen(rows: Any) -> Any:
        if isinstance(rows, Tensor):
            return rows.index_select(0, indices)
        if not on_host:
            on_host.append(_read(indices, rows))
        if isinstance(rows, (list, tuple)):
            return type(rows)(rows[i] for i in on_host[0])
        return rows[on_host[0]]

    return _map_rows(chosen, batch, num_examples(batch) if num is None else num)


def map_tensors(fn: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply `fn` to every tensor of the batch, also inside dataclasses, mappings and objects.

    Other leaves are unchanged; an object without tensors is shared. The sizes in a packed sequence count as its form:
    they stay on the host.
    """

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
        return _with_members(leaf, map_tensors(fn, members))

    return tree.map(on_leaf, batch, is_leaf=_is_packed)


def tensors(batch: Any) -> list[Tensor]:
    """Return the batch's tensors, in order, also those inside dataclasses, mappings and objects."""
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


def check_field(field: Field, role: str) -> None:
    """Raise a `TypeError` if `field` is not a valid field."""
    is_pair = isinstance(field, tuple) and len(field) == 2 and all(callable(part) for part in field)
    if isinstance(field, bool) or not (isinstance(field, (int, str, list)) or is_pair or callable(field)):
        raise TypeError(
            f"{role}={field!r}: expected an index, a name, a list of these, a getter, or a pair (getter, setter)"
        )


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedSequence)


def _packed_tensors(packed: PackedSequence) -> list[str]:
    """Return the names of a packed sequence's tensors, without the sizes, which have to be on the CPU."""
    return [name for name in ("data", "sorted_indices", "unsorted_indices") if getattr(packed, name) is not None]


def _check_rows(batch: Any) -> None:
    if reported_size(batch) is not None:
        raise ValueError(
            "the rows of a batch of graphs or packed sequences are not its examples: to cut it, give "
            "State.create(splitter=batch.Splitter(num_examples, part))"
        )


def _leading_sizes(batch: Any, dim: int) -> list[int]:
    return [leaf.shape[_dim(leaf, dim)] for leaf in tensors(batch) if leaf.ndim]


def _dim(rows: Any, dim: int) -> int:
    """Return the dimension of the examples in a tensor or array, or 0 for a list."""
    return dim if len(getattr(rows, "shape", ())) > dim else 0


def _place(rows: Any, part: slice, dim: int) -> Any:
    """Return the index expression that selects a part of the examples."""
    own = _dim(rows, dim)
    return (slice(None),) * own + (part,) if own else part


def _map_rows(fn: Callable[[Any], Any], batch: Any, num: int, dim: int = 0) -> Any:
    """Apply `fn` to every member with one row for each of `num` examples; see `split`."""

    def is_rows(node: Any) -> bool:
        return _is_rows(node, num, dim)

    def on_leaf(leaf: Any) -> Any:
        if _is_rows(leaf, num, dim):
            return fn(leaf)
        members = {} if isinstance(leaf, Tensor) else tree.members(leaf)
        # An object's attributes are data only if some are tensors: lists of a tokenizer are not per example.
        is_data = isinstance(leaf, Mapping) or dataclasses.is_dataclass(leaf) or tensors(members)
        if not members or not is_data:
            return leaf
        changed = _map_rows(fn, members, num, dim)
        is_same = all(changed[name] is members[name] for name in members)
        return leaf if is_same else _with_members(leaf, changed)

    return tree.map(on_leaf, batch, is_leaf=is_rows)


def _is_rows(node: Any, num: int, dim: int) -> bool:
    if type(node) in (list, tuple):
        return len(node) == num and not tensors(node)
    shape = getattr(node, "shape", None)
    is_array = isinstance(node, Tensor) or (hasattr(node, "dtype") and hasattr(node, "__getitem__"))
    return is_array and isinstance(shape, tuple) and len(shape) > 0 and shape[_dim(node, dim)] == num


def _read(indices: Tensor, rows: Any) -> list[int]:
    try:
        return indices.tolist()
    except RuntimeError as error:
        raise TypeError(
            f"the batch holds a {type(rows).__name__} with a row for each example, which can be chosen from on the "
            "host only, not under vmap or while tracing; make it a tensor, or leave it out of the batch"
        ) from error


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
    # A copy keeps data that a constructor would lose: a defaultdict's factory, a tokenizer's encodings. Items are set
    # one by one because the outputs of Hugging Face models refuse `update`.
    successor = copy.copy(mapping)
    for key, value in items.items():
        successor[key] = value
    return successor


def _put_one(batch: Any, field: Any, value: Any) -> Any:
    if isinstance(batch, Tensor):
        return value
    if isinstance(batch, Mapping):
        return _with_items(batch, {field: value})
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
        has = "one, itself, by the field 0: its rows are examples"
    elif is_graphs(batch):
        has = f"the attributes {list(batch.to_dict())}"
    else:
        has = f"the attributes {sorted(getattr(batch, '__dict__', {}))}"
    return (
        f"the batch ({type(batch).__name__}) has no member {field!r}; it has {has}. "
        "Name the right one with State.create(..., input_field=..., target_field=...); target_field=None is for a loss "
        "that reads no target; with input_field=batch.WHOLE the network takes all members as keyword arguments, with "
        "batch.AS_ARGUMENT the batch itself, forward(self, batch)"
    )
