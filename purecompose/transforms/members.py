"""Trees of members: every tensor has one more dimension in front, with a row for each member of a population.

Values that all members have in common have no such dimension: the time, everything that is not a tensor, and `Common`
leaves, such as one batch for all.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose.core.clock import Clock


class Common:
    """A leaf that all members have in common; a pytree node, so that it is kept when a step is cut into parts."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        """Wrap a tensor, or an object that contains tensors."""
        self.value = value


tree.register_node(
    Common, lambda leaf: (("value",), (leaf.value,), None), lambda names, leaves, static: Common(*leaves)
)


def common(given: Any) -> Any:
    """Return the tree with every tensor marked as common to all members."""
    return tree.map(lambda leaf: Common(leaf) if batches.tensors(leaf) else leaf, given)


def expanded(given: Any, num: int) -> Any:
    """Return the tree with values common to all members expanded to `num` rows, without copies."""

    def rows(leaf: Any) -> Any:
        return batches.map_tensors(lambda t: t.expand(num, *t.shape), leaf.value) if isinstance(leaf, Common) else leaf

    return tree.map(rows, given, is_leaf=_is_whole)


def member(given: Any, index: int) -> Any:
    """Return one member's tree; its tensors are views."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[index]
        if isinstance(leaf, (Common, Clock)):
            return leaf.value if isinstance(leaf, Common) else leaf
        return batches.map_tensors(lambda tensor: tensor[index], leaf)

    return tree.map(own, given, is_leaf=_is_whole)


def stacked(members: Sequence[Any], *, with_common: bool = False) -> Any:
    """Stack members' trees of one signature, the inverse of `member`; leaves without tensors are taken from the first.

    Args:
        members: The trees.
        with_common: Mark leaves that are the same object in all members as common, instead of stacking them.
    """

    def together(*leaves: Any) -> Any:
        is_same = all(leaf is leaves[0] for leaf in leaves)
        if isinstance(leaves[0], Clock) or not batches.tensors(leaves[0]):
            return leaves[0]
        if with_common and is_same:
            return Common(leaves[0])
        columns = zip(*map(batches.tensors, leaves), strict=True)
        return batches.map_tensors(lambda _: torch.stack(next(columns)), leaves[0])

    return tree.map(together, *members, is_leaf=_is_whole)


def own_tensors(given: Any, known: Collection[int] = ()) -> list[Tensor]:
    """Return the tensors with a row for each member, without those of leaves whose ids are known."""
    found: list[Tensor] = []

    def collect(leaf: Any) -> Any:
        if id(leaf) not in known and not _is_whole(leaf):
            found.extend(batches.tensors(leaf))
        return leaf

    tree.map(collect, given, is_leaf=_is_whole)
    return found


def mapped(fn: Callable[..., Any], chunk_size: int | None = None) -> Callable[..., Any]:
    """Map `fn` of single members' trees over all members' trees by `torch.vmap`.

    Trees may contain leaves that vmap refuses: constants, and objects that only `purecompose.batch` can traverse.
    Leaves that `fn` returns unchanged are returned as they were given, also if they are common to all members.
    """

    def run(*given: Any) -> Any:
        inside = _Inside(fn, given)
        rows = torch.vmap(inside, chunk_size=chunk_size)(*own_tensors(given))
        return inside.refilled(rows)

    return run


class _Inside:
    """The function for `torch.vmap`, from tensors of one member to new tensors; it keeps the trees around them."""

    def __init__(self, fn: Callable[..., Any], given: tuple[Any, ...]) -> None:
        self.fn, self.given = fn, given
        self._result: Any = None
        # The given leaves, by the id of the corresponding object inside. The last tree is kept with them, since ids are
        # valid only as long as their objects live.
        self._known: dict[int, Any] = {}
        self._entered: Any = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        fresh, self._known = iter(tensors), {}

        def enter(leaf: Any) -> Any:
            if isinstance(leaf, Clock):
                return leaf
            inner = leaf.value if isinstance(leaf, Common) else _refill(leaf, fresh)
            self._known[id(inner)] = leaf
            return inner

        self._entered = tree.map(enter, self.given, is_leaf=_is_whole)
        self._result = self.fn(*self._entered)
        return tuple(own_tensors(self._result, self._known))

    def refilled(self, rows: Sequence[Tensor]) -> Any:
        """Return the result with all members' tensors in place of the last member's."""
        fresh, known = iter(rows), self._known
        return tree.map(
            lambda leaf: known[id(leaf)] if id(leaf) in known else _refill(leaf, fresh), self._result, is_leaf=_is_whole
        )


def _refill(leaf: Any, fresh: Any) -> Any:
    if isinstance(leaf, Tensor):
        return next(fresh)
    return leaf if _is_whole(leaf) else batches.with_tensors(leaf, fresh)


def _is_whole(node: Any) -> bool:
    return isinstance(node, (Common, Clock))
