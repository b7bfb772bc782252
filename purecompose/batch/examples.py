"""The examples of a batch: count, split and select them; see `purecompose.batch`."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from purecompose import tree
from purecompose.batch.fields import AS_ARGUMENT, Field, get, is_graphs, tensors, with_members


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Functions that count and cut batches whose examples do not lie along a dimension, such as images of any size.

    Args:
        num_examples: `batch -> int`, the number of examples.
        part: `(batch, start, stop) -> batch`, the batch of the examples from `start` to `stop`, `stop` excluded.
            Without it, whatever would cut batches is refused by name.

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


def num_examples(batch: Any, field: Field | None = None, dim: int = 0, target_field: Field | None = None) -> int:
    """Return the number of examples in a batch, from the sizes of all its tensors along the dimension of the examples.

    If the sizes differ, some tensors belong to all examples, such as weights of the classes. Those of the input and the
    target then decide, or all tensors if these two have none: it is the one size that occurs in the input and in the
    target; the one other than 1 if there are two; or that of the input if the target is absent or has only size 1.
    Anything else is ambiguous.

    Args:
        batch: The batch.
        field: The field of the input.
        dim: The dimension of the examples; see `purecompose.batch`.
        target_field: The field of the target, which a batch may lack.

    Raises:
        ValueError: There is no tensor with a leading dimension, or the number is ambiguous; the message has the
            candidates.

    Example:
        >>> import torch
        >>> x, y, class_weights = torch.zeros(8, 2), torch.zeros(8), torch.ones(3)
        >>> num_examples((x, {"weights": class_weights, "y": y}), 0, target_field=1)
        8
    """
    if dim == 0 and type(batch) is tuple and len(batch) == 2 and type(batch[0]) is type(batch[1]) is Tensor:
        first, second = batch
        if first.ndim and second.ndim and first.shape[0] == second.shape[0]:
            return first.shape[0]
    reported = reported_size(batch)
    if reported is not None:
        return reported
    sizes = leading_sizes(batch, dim)
    if not sizes:
        if type(batch) is list and batch and all(isinstance(text, str) for text in batch):
            return len(batch)
        raise ValueError(
            f"found no tensor with rows in the batch ({type(batch).__name__}); convert its arrays or numbers, as by "
            "torch.from_numpy or torch.tensor"
        )
    read = _member if len(sizes) == 1 else get
    inputs, targets = batch if field is AS_ARGUMENT else read(batch, field), _member(batch, target_field)
    own = [leading_sizes(member, dim) for member in (inputs, targets)] if len(sizes) > 1 else []
    found = common_size(*own) if any(own) else common_size(sizes, [])
    if found is None:
        raise ValueError(_ambiguous(batch, field, dim))
    num = _num_samples(batch, inputs, targets)
    if num not in (None, found):
        raise ValueError(
            f"cannot tell whether the batch has {num} examples, the members of a list, or {found}, the rows of their "
            "tensors; count and cut lists of samples by State.create(splitter=batch.Splitter(num_examples, part))"
        )
    return found


def common_size(inputs: list[int], targets: list[int]) -> int | None:
    """Return the number of examples from the different sizes in inputs and targets; `None` if it is ambiguous.

    See `num_examples` for the rule. Sizes are compared one by one, because symbolic sizes cannot be hashed.
    """
    both = [size for size in inputs if size in targets] if inputs and targets else inputs + targets
    if not both and targets == [1]:
        both = inputs
    if len(both) > 1:
        both = [size for size in both if size != 1]
    return both[0] if len(both) == 1 else None


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


def leading_sizes(batch: Any, dim: int = 0) -> list[int]:
    """Return the different sizes of a batch's tensors along the dimension of the examples."""
    found: list[int] = []
    for leaf in tensors(batch):
        if leaf.ndim and (size := leaf.shape[_dim(leaf, dim)]) not in found:
            found.append(size)
    return found


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


def split(batch: Any, num_parts: int, num: int | None = None, dim: int = 0) -> list[Any]:
    """Cut the batch along the dimension of the examples into `num_parts` parts of (nearly) equal size.

    Sizes differ by at most one, larger parts first. Members that are *per example* are cut: tensors and arrays whose
    leading dimension is the number of examples, and lists and tuples of that length without a tensor in them. All other
    members are contained whole in each part. If one of those has that length by chance, give it a leading dimension of
    1.

    Args:
        batch: The batch.
        num_parts: The number of parts, from 1 to the number of examples.
        num: The number of examples in the batch, by default `num_examples(batch, dim=dim)`.
        dim: The dimension of the examples; see `purecompose.batch`.

    Raises:
        ValueError: There are fewer examples than parts, or their number is ambiguous and not given.

    Example:
        >>> import torch
        >>> [part.tolist() for part in split(torch.arange(5), 2)]
        [[0, 1, 2], [3, 4]]
        >>> split({"x": torch.tensor([1, 2]), "name": ["a", "b"], "set": "train"}, 2)[1]
        {'x': tensor([2]), 'name': ['b'], 'set': 'train'}
    """
    _check_rows(batch)
    total = num_examples(batch, dim=dim) if num is None else num
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

    Examples of lists and arrays are chosen on the host, which is not possible under `vmap` or while tracing.

    Args:
        batch: The batch.
        indices: (K,), int64: positions in the batch.
        num: The number of examples in the batch, by default `num_examples(batch)`.

    Raises:
        TypeError: The batch has per-example lists, and the values of the indices cannot be read.
        ValueError: The number of examples is ambiguous, and `num` is not given.

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


def _num_samples(batch: Any, inputs: Any, targets: Any) -> int | None:
    """Return the number of samples in a list that is not collated; `None` for other batches."""
    has_fields = inputs is not batch and type(batch) is list and len(batch) < 3
    for member, kinds in ((None if has_fields else batch, (Mapping, tuple)), (targets, Mapping)):
        is_list = type(member) is list or (type(member) is tuple and member is not batch)
        if is_list and member and all(isinstance(one, kinds) for one in member):
            return len(member)
    return None


def _member(batch: Any, field: Field | None) -> Any:
    try:
        return get(batch, field)
    except (LookupError, AttributeError, TypeError):  # a batch for predictions
        return None


def _ambiguous(batch: Any, field: Field | None, dim: int) -> str:
    """Return the message for a batch whose tensors do not tell the number of examples."""
    named: dict[int, list[str]] = {}
    for path, leaf in tree.leaves_with_paths(batch, into_objects=True).items():
        if isinstance(leaf, Tensor) and leaf.ndim:
            named.setdefault(int(leaf.shape[_dim(leaf, dim)]), []).append(f"batch{path}")
    candidates = " or ".join(f"{size} (by {', '.join(paths[:2])})" for size, paths in list(named.items())[:4])
    (path, *_), *_ = named.values()
    count = "len" if type(batch) is list else f"lambda batch: len({path})"
    is_turned = not dim and len(leading_sizes(batch, 1)) == 1
    hint = "for sequences (T, N, ...) use State.create(batch_dim=1); " if is_turned else ""
    hint += "name the input and its target by input_field= and target_field=; " if field is None else ""
    return (
        f"cannot tell how many examples the batch has: {candidates}; {hint}give what all examples share a leading "
        "dimension of 1, or, where examples are not rows, count them, as by "
        f"State.create(splitter=batch.Splitter({count})), and give it also a function part if batches are to be cut"
    )


def _dim(rows: Any, dim: int) -> int:
    """Return the dimension of the examples in a tensor or array, or 0 for a list."""
    return dim if len(getattr(rows, "shape", ())) > dim else 0


def _place(rows: Any, part: slice, dim: int) -> Any:
    """Return the index expression that selects a part of the examples."""
    own = _dim(rows, dim)
    return (slice(None),) * own + (part,) if own else part


def _map_rows(fn: Callable[[Any], Any], batch: Any, num: int, dim: int = 0) -> Any:
    """Apply `fn` to every member with one row for each of `num` examples; see `split`."""

    def on_leaf(leaf: Any) -> Any:
        if is_rows(leaf, num, dim):
            return fn(leaf)
        members = {} if isinstance(leaf, Tensor) else tree.members(leaf)
        # An object's attributes are data only if some are tensors: lists of a tokenizer are not per example.
        is_data = isinstance(leaf, Mapping) or dataclasses.is_dataclass(leaf) or tensors(members)
        if not members or not is_data:
            return leaf
        changed = _map_rows(fn, members, num, dim)
        is_same = all(changed[name] is members[name] for name in members)
        return leaf if is_same else with_members(leaf, changed)

    return tree.map(on_leaf, batch, is_leaf=lambda node: is_rows(node, num, dim))


def is_list(node: Any) -> bool:
    """Return whether a member of a batch is a list or tuple with entries of which none contains a tensor."""
    return type(node) in (list, tuple) and bool(node) and not tensors(node)


def is_rows(node: Any, num: int, dim: int = 0) -> bool:
    """Return whether a member of a batch has one row for each of `num` examples; see `split`."""
    if type(node) in (list, tuple):
        return len(node) == num and is_list(node)
    shape = getattr(node, "shape", None)
    is_array = isinstance(node, Tensor) or (hasattr(node, "dtype") and hasattr(node, "__getitem__"))
    return is_array and isinstance(shape, tuple) and len(shape) > 0 and bool(shape[_dim(node, dim)] == num)


def _read(indices: Tensor, rows: Any) -> list[int]:
    try:
        return indices.tolist()
    except RuntimeError as error:
        raise TypeError(
            f"the batch holds a {type(rows).__name__} with a row for each example, which can be chosen from on the "
            "host only, not under vmap or while tracing; make it a tensor"
        ) from error
