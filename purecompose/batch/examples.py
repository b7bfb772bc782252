"""The examples of a batch: count, split and select them; see `purecompose.batch`."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from purecompose import tree
from purecompose._support.graphs import is_graphs
from purecompose.batch.fields import Field, get
from purecompose.batch.leaves import tensors, with_members


__all__ = ["Splitter", "bounds", "leading_size", "num_examples", "num_tokens", "reported_size", "split", "take"]


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


def num_examples(batch: Any, field: Field | None = None, dim: int = 0) -> int:
    """Return the number of examples: the common size of the batch's tensors along the dimension of the examples.

    Args:
        batch: The batch.
        field: The field of the input, for batches with tensors that are not per example (weights of the classes,
            position ids of shape (1, L)): if the tensors disagree, the leading dimension of the input counts, or of
            its first tensor if it has several.
        dim: The dimension of the examples; see `purecompose.batch`.

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
            f"cannot count the examples of the batch: the input's tensors have {own[:8]} rows. If examples are not "
            "rows, as in lists of images of different sizes, use State.create(splitter=purecompose.batch.Splitter(...))"
        )
    if own:
        return own[0]
    if not sizes:
        raise ValueError(
            f"found no tensor with rows in the batch ({type(batch).__name__}); convert its arrays or numbers, as by "
            "torch.from_numpy or torch.tensor"
        )
    hint = "; name the input by input_field=, and its leading dimension counts" if field is None else ""
    raise ValueError(f"a batch's tensors must share their leading dimension; found {sizes}{hint}")


def reported_size(batch: Any) -> int | None:
    """Return the number of examples that a batch, or a member of it, reports itself; `None` for all other batches.

    It is the number of graphs for torch_geometric's `Batch`, and the number of sequences for packed ones.

    Args:
        batch: A batch, or a member of it.

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
    """Return the size of all tensors along the dimension of the examples; `None` without tensors or a common size.

    Args:
        inputs: A tensor, or a pytree of tensors.
        dim: The dimension of the examples.

    Example:
        >>> import torch
        >>> leading_size({"a": torch.zeros(3, 2), "b": torch.zeros(3)}), leading_size(torch.zeros(3, 2), dim=1)
        (3, 2)
    """
    if type(inputs) is Tensor:
        return inputs.shape[dim] if inputs.ndim > dim else None
    sizes = _leading_sizes(inputs, dim)
    # Compared one by one, because symbolic sizes cannot be hashed.
    return sizes[0] if sizes and all(size == sizes[0] for size in sizes) else None


def num_tokens(batch: Any) -> int:
    """Return the number of tokens: the size of `input_ids`, padding included, or 0 for batches without them.

    Args:
        batch: A batch of any structure.

    Example:
        >>> import torch
        >>> num_tokens({"input_ids": torch.zeros(2, 5, dtype=torch.int64)}), num_tokens(torch.zeros(2, 5))
        (10, 0)
    """
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
        dim: The dimension of the examples; see `purecompose.batch`.

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

    Args:
        total: Number of examples.
        num_parts: Number of parts, whose sizes differ by at most one.

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
        return leaf if is_same else with_members(leaf, changed)

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
