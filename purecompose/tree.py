"""Pytree helpers in the library's namespace.

Every node of the library is registered twice: with torch, because `torch.func` uses no other registry, and with
optree under the namespace `"purecompose"`, because it is fast and has readable key paths. Dictionaries keep their
insertion order in both, so both return the same leaves in the same order.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias, TypeVar

import optree
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from purecompose._support import publish
from purecompose._support.device import INTEGER_OF_SIZE, is_shard, local, place_of, sum_of_shards, whole


publish(__name__)


NAMESPACE = "purecompose"
"""The namespace of optree in which states and batches are nodes."""

# optree sorts dictionaries unless this is set for the namespace; the setting applies to the whole process.
_settings = ExitStack()
_settings.enter_context(optree.dict_insertion_ordered(True, namespace=NAMESPACE))

_T = TypeVar("_T")


def register_node(
    cls: type[_T],
    flatten: Callable[[_T], tuple[tuple[str, ...], tuple[Any, ...], Hashable]],
    unflatten: Callable[[tuple[str, ...], Iterable[Any], Any], _T],
) -> None:
    """Make `cls` an inner node for `torch.func` and for optree.

    Args:
        cls: The class.
        flatten: Function that returns the children's names, the children and the static part (hashable).
        unflatten: Function that builds an instance from names, children and static part.
    """

    def torch_flatten(node: _T) -> tuple[list[Any], Any]:
        names, children, static = flatten(node)
        return list(children), (names, static)

    def torch_flatten_with_keys(node: _T) -> tuple[list[tuple[Any, Any]], Any]:
        names, children, static = flatten(node)
        keys = [torch_pytree.GetAttrKey(name) for name in names]
        return list(zip(keys, children, strict=True)), (names, static)

    def optree_flatten(node: _T) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
        names, children, static = flatten(node)
        return children, (names, static), names

    torch_pytree.register_pytree_node(
        cls,
        torch_flatten,
        lambda children, context: unflatten(context[0], children, context[1]),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=torch_flatten_with_keys,
    )
    optree.register_pytree_node(
        cls,  # pyright: ignore[reportArgumentType]
        optree_flatten,  # pyright: ignore[reportArgumentType]
        lambda context, children: unflatten(context[0], children, context[1]),  # pyright: ignore
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )


def map(  # noqa: A001
    fn: Callable[..., Any], tree: Any, *rests: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply `fn` to corresponding leaves; `None` is a leaf, and so is a node for which `is_leaf` returns true.

    Args:
        fn: A function of one leaf of each tree.
        tree: A pytree, such as a dict, a tuple or a state.
        *rests: Trees with the structure of `tree`.
        is_leaf: A function that is true for nodes to use as leaves.

    Example:
        >>> map(torch.add, {"a": torch.zeros(1)}, {"a": torch.ones(1)})
        {'a': tensor([1.])}
    """
    return optree.tree_map(fn, tree, *rests, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves, in insertion order; `None` is a leaf, and so is a node for which `is_leaf` returns true.

    Args:
        tree: A pytree, such as a dict, a tuple or a state.
        is_leaf: A function that is true for nodes to use as leaves.

    Example:
        >>> leaves({"b": 1, "a": (2, None)})
        [1, 2, None]
    """
    return optree.tree_leaves(tree, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves and the structure that `unflatten` needs.

    Args:
        tree: A pytree, such as a dict, a tuple or a state.

    Example:
        >>> leaves, treespec = flatten({"a": 1, "b": (2, 3)})
        >>> leaves, unflatten(treespec, leaves)
        ([1, 2, 3], {'a': 1, 'b': (2, 3)})
    """
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(treespec: optree.PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """Return the inverse of `flatten`.

    Args:
        treespec: The structure that `flatten` returned.
        leaves: As many leaves as the structure has.

    Example:
        >>> unflatten(structure({"a": 1, "b": 2}), [3, 4])
        {'a': 3, 'b': 4}
    """
    return optree.tree_unflatten(treespec, leaves)


def structure(tree: Any) -> optree.PyTreeSpec:
    """Return the structure without the leaves; structures compare with `==`.

    Args:
        tree: A pytree, such as a dict, a tuple or a state.

    Example:
        >>> structure({"a": 1}) == structure({"a": 2}), structure({"a": 1}) == structure({"b": 1})
        (True, False)
    """
    return optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)


def leaves_with_paths(
    tree: Any, *, into_objects: bool = False, is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """Return the leaves by key path.

    Args:
        tree: The tree.
        into_objects: Continue into leaves that contain tensors, such as unregistered dataclasses.
        is_leaf: A function that is true for nodes to use as leaves.

    Example:
        >>> leaves_with_paths({"a": 1, "b": (2, 3)})
        {"['a']": 1, "['b'][0]": 2, "['b'][1]": 3}
    """
    if into_objects:
        return {path: leaf for path, leaf, _ in _entries(tree, is_leaf)}
    accessors, found, _ = optree.tree_flatten_with_accessor(
        tree, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE
    )
    return {accessor.codify(""): leaf for accessor, leaf in zip(accessors, found, strict=True)}


def members(leaf: Any) -> dict[Any, Any]:
    """Return the members of a leaf that is also a container: a mapping, a dataclass, an object with attributes.

    The result is empty for plain values and for callables, so a module's weights are not members.

    Args:
        leaf: Any object.

    Example:
        >>> import types
        >>> members(types.SimpleNamespace(x=1))
        {'x': 1}
    """
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if isinstance(leaf, type) or callable(leaf):
        return {}
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return dict(getattr(leaf, "__dict__", {}))


class Difference(NamedTuple):
    """A difference between two trees in one leaf or its place; `str` describes it in words."""

    path: str
    """Key path of the leaf in both trees."""
    what: str
    """Description such as "2 of 3 elements differ, first at 0"; empty if the values are enough."""
    first: Any = None
    """The first element that differs, or the whole leaf; `None` if there is nothing to show."""
    second: Any = None
    """The same of the second tree."""

    def __str__(self) -> str:
        values = [] if self.first is None and self.second is None else [f"{self.first!r} and {self.second!r}"]
        return ": ".join([self.path, *([self.what] if self.what else []), *values])


class Tolerance(NamedTuple):
    """The largest difference of two floating leaves: `share` of their largest finite magnitude, plus `floor`.

    Args:
        share: Fraction of the largest finite magnitude.
        floor: Absolute difference that is always allowed.

    Example::

        equal_enough = not list(differences(a, b, lambda dtype: Tolerance(share=1e-5, floor=1e-8)))
    """

    share: float
    floor: float = 0.0


ToleranceLike: TypeAlias = float | Callable[[torch.dtype], Tolerance]
"""A share for all leaves, or a function that returns the tolerance for a dtype."""


def equal(first: Any, second: Any) -> bool:
    """Return whether containers, key paths, shapes, dtypes and every bit agree.

    NaN equals NaN, 0.0 differs from -0.0. The static part of a state is not a leaf and is ignored.

    Args:
        first: A pytree, such as a dict, a tuple or a state.
        second: Another one.

    Example:
        >>> equal({"a": torch.zeros(2)}, {"a": torch.zeros(2)}), equal(torch.tensor(0.0), torch.tensor(-0.0))
        (True, False)
    """
    return next(differences(first, second), None) is None


def diff(first: Any, second: Any, limit: int = 10) -> list[str]:
    """Describe in at most `limit` lines where two trees differ, pairing leaves by key path.

    Args:
        first: A pytree, such as a dict, a tuple or a state.
        second: Another one.
        limit: The most lines.

    Example:
        >>> diff({"a": torch.zeros(2)}, {"a": torch.ones(2)})
        ["['a']: 2 of 2 elements differ, first at 0: 0.0 and 1.0"]
    """
    return [str(difference) for difference in itertools.islice(differences(first, second), limit)]


def differences(first: Any, second: Any, *, tolerance: ToleranceLike = 0.0) -> Iterator[Difference]:
    """Yield the differences of two trees, leaf by leaf, paired by key path; see `equal`.

    Args:
        first: One tree.
        second: The other.
        tolerance: Floating and complex leaves may differ by this share of their largest finite magnitude, or by the
            `Tolerance` that a function of their dtype returns; 0 compares bits.

    Example:
        >>> [difference.what for difference in differences({"a": torch.zeros(2)}, {"a": torch.ones(3)})]
        ['float32[2] and float32[3]']
    """
    ours, theirs = _nodes_above_leaves(first), _nodes_above_leaves(second)
    yield from (Difference(path, "only in the first") for path in ours if path not in theirs)
    yield from (Difference(path, "only in the second") for path in theirs if path not in ours)
    for path, (leaf, above) in ours.items():
        if path not in theirs:
            continue
        other, other_above = theirs[path]
        if above != other_above:
            names = [" > ".join(node.__name__ for node in nodes) for nodes in (above, other_above)]
            yield Difference(path, f"in {names[0]} and in {names[1]}")
        elif (found := _leaf_difference(path, leaf, other, tolerance)) is not None:
            yield found


def describe(tensor: Tensor, *, with_device: bool = True) -> str:
    """Return a tensor's dtype and shape, and its device if it is not the CPU.

    Args:
        tensor: Any tensor.
        with_device: Name the device, unless it is the CPU.

    Example:
        >>> describe(torch.zeros(2, 3))
        'float32[2, 3]'
        >>> describe(torch.zeros(2, device="meta"))
        'float32[2] on meta'
    """
    form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if is_shard(tensor):
        form += f" placed {tuple(tensor.placements)}"  # pyright: ignore[reportAttributeAccessIssue]
    return f"{form} on {tensor.device}" if with_device and tensor.device.type != "cpu" else form


def global_norm(tree: Any) -> Tensor:
    """Return the Euclidean norm of all tensor leaves together, 0-d; 0 for an empty tree.

    Leaves of half precision are converted to float32. The norm of tensors that are divided among processes is the same
    on all.

    Args:
        tree: A pytree, such as a dict, a tuple or a state.

    Example:
        >>> global_norm({"w": torch.tensor([3.0], dtype=torch.float16), "b": torch.tensor([0.0, 4.0])})
        tensor(5.)
    """
    tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
    if not tensors:
        return torch.zeros(())
    # Squares of half-precision numbers easily overflow or underflow.
    half = (torch.float16, torch.bfloat16)
    norms = [torch.linalg.vector_norm(part.float() if part.dtype in half else part) for part in map(local, tensors)]
    shards = [leaf for leaf in tensors if is_shard(leaf)]
    if not shards:
        return torch.linalg.vector_norm(torch.stack(norms))
    squares = [norm.square() for norm in norms]
    own = torch.stack([square for square, leaf in zip(squares, tensors, strict=True) if is_shard(leaf)]).sum()
    rest = sum(square for square, leaf in zip(squares, tensors, strict=True) if not is_shard(leaf))
    return (sum_of_shards(own, shards) + rest).sqrt()


def _nodes_above_leaves(tree: Any) -> dict[str, tuple[Any, tuple[type, ...]]]:
    """Return by key path each leaf or empty container, and the types of the nodes above it."""
    return {
        path: (leaf, above)
        for path, leaf, above in _entries(tree, is_leaf=lambda node: isinstance(node, dict | list | tuple) and not node)
    }


def _entries(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[tuple[str, Any, tuple[type, ...]]]:
    """Yield key path, leaf and the types above it, also inside unregistered objects that contain tensors.

    These objects must be taken apart, because `==` on them would convert a tensor to a bool.
    """
    accessors, found, _ = optree.tree_flatten_with_accessor(
        tree, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE
    )
    for accessor, leaf in zip(accessors, found, strict=True):
        path, above = accessor.codify(""), tuple(entry.type for entry in accessor)
        inner = {} if isinstance(leaf, Tensor) else members(leaf)
        if not _holds_tensors(inner):
            yield path, leaf, above
            continue
        for name, member in inner.items():
            step = f"[{name!r}]" if isinstance(leaf, Mapping) else f".{name}"
            for rest, inner_leaf, inner_above in _entries(member, is_leaf):
                yield f"{path}{step}{rest}", inner_leaf, (*above, type(leaf), *inner_above)


def _holds_tensors(node: Any) -> bool:
    return any(isinstance(leaf, Tensor) or _holds_tensors(members(leaf)) for leaf in leaves(node)) if node else False


def _leaf_difference(path: str, first: Any, second: Any, tolerance: ToleranceLike) -> Difference | None:
    if first is second:
        return None
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return None if _are_same_values(first, second) else Difference(path, "", first, second)
    if place_of(first) != place_of(second):
        return Difference(path, f"{describe(first)} and {describe(second)}")
    first, second = whole(first), whole(second)
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return Difference(path, f"{describe(first)} and {describe(second)}")
    where = _unequal(first, second, tolerance).flatten().nonzero()
    if not len(where):
        return None
    at = int(where[0])
    what = f"{len(where)} of {first.numel()} elements differ, first at {at}"
    return Difference(path, what, first.flatten()[at].item(), second.flatten()[at].item())


def _unequal(first: Tensor, second: Tensor, tolerance: ToleranceLike) -> Tensor:
    """Return where two tensors of one form differ, elementwise."""
    unequal = _bits(first) != _bits(second)
    if first.is_complex():
        unequal = unequal.any(-1)
    if not (first.is_floating_point() or first.is_complex()):
        return unequal
    unequal &= ~(first.isnan() & second.isnan())
    share, floor = tolerance(first.dtype) if callable(tolerance) else Tolerance(tolerance)
    if (share or floor) and first.numel():
        magnitudes = torch.stack([first.abs(), second.abs()])
        scale = torch.where(magnitudes.isfinite(), magnitudes, 0).max()
        unequal &= ~((first - second).abs() <= share * scale + floor)
    return unequal


def _are_same_values(first: Any, second: Any) -> bool:
    """Return whether two leaves that are not both tensors are equal."""
    if type(first) is not type(second):
        return False
    if isinstance(first, (float, complex)):
        return first == second or (first != first and second != second)
    if hasattr(first, "dtype") and hasattr(first, "tolist"):  # comparing NumPy arrays returns an array
        is_alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        return is_alike and equal(first.tolist(), second.tolist())
    try:
        return bool(first == second)
    except (RuntimeError, TypeError, ValueError):  # objects with hidden tensors or arrays
        return False


def _bits(tensor: Tensor) -> Tensor:
    """Return a floating tensor's bits as integers, so that signed zeros differ; complex numbers become pairs."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(INTEGER_OF_SIZE[tensor.element_size()])
