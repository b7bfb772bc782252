"""Trees of members: every tensor has one more dimension in front, with a row for each member of a population.

Values that all members have in common have no such dimension: the time, everything that is not a tensor, and `Common`
leaves, such as one batch for all. Errors of `torch.vmap` are reported with the layer, the line and a remedy.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.contexts import unvalidated
from purecompose._support.messages import layer_of, line_of
from purecompose.core.clock import Clock
from purecompose.core.state import State
from purecompose.errors import UnkeyedRandomError


class Common:
    """A leaf that all members have in common; a pytree node, so that it is kept when a step is cut into parts."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
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


_REFUSED = (
    (
        r"calling \.item\(\)|data pointer",
        "a number or the memory of a tensor is read (.item(), numpy(), F.one_hot, `if` on a tensor), and members "
        "differ in it",
        "Choose with torch.where, compare with torch.arange, compute with torch",
    ),
    (
        "dynamic shape",
        "a result's shape depends on numbers (a boolean mask, nonzero, unique), which differ among members",
        "Multiply by the mask, choose with torch.where, or prepare indices and self-loops of graphs in the data",
    ),
    (
        r"in-?place arithmetic|output with shape \[(.*)\] doesn't match the broadcast shape \[\d+, \1\]|mutate a capt",
        "the batch, or a tensor that all members share, is written into in place",
        "Make a new tensor (a + b), or make the one written into from that of a single member (x.new_zeros(shape))",
    ),
    (
        "saved tensor hooks|_NoopSaveInputs",  # torch 2.11's checkpoint fails in the latter before it sets hooks
        "a hook replaces what is saved for the backward pass (torch.utils.checkpoint), which torch.func cannot do",
        "Leave checkpointing out; population(..., chunk_size=) saves memory too",
    ),
    (
        "setup_context|generate_vmap_rule",
        "an autograd.Function cannot be mapped as it is (nor can backward hooks of modules, which are made of one)",
        "Define setup_context, and set generate_vmap_rule = True",
    ),
    (
        r"requires_grad_\(\)|have been used in the graph",
        "torch.autograd.grad is taken where the step takes no gradient, or of a tensor that was made outside of it",
        "Take inner gradients by torch.func.grad, or of a copy, x = x.detach().requires_grad_()",
    ),
    (r"[Bb]atching rule|^vmap|[Ss]parse|`\.?data`", "torch.vmap cannot map an operation", "Replace the operation"),
)
"""Regular expressions for torch's messages, their meanings, and the remedies."""


@contextmanager
def explained(where: str, one: str, remedy: str, state: State | None = None, num: int = 0) -> Iterator[None]:
    """Return a context manager in which errors of vmap are reported with the layer, the line and a remedy."""
    try:
        with unvalidated():
            yield
    except (RuntimeError, ValueError, NotImplementedError) as error:
        is_value = isinstance(error, ValueError)
        new = _of_rows(error, state, num) if is_value else _of_operations(error, where, one, remedy)
        if new is None:
            raise
        for note in getattr(error, "__notes__", ()):
            new.add_note(note)
        raise new from error


def _of_rows(error: Exception, state: State | None, num: int) -> Exception | None:
    if state is None or not str(error).startswith("vmap"):
        return None
    for path, leaf in tree.leaves_with_paths(state.replace(clock=None, batch=None)).items():
        if isinstance(leaf, Tensor) and leaf.shape[:1] != (num,):
            return ValueError(
                f"population: expected a row for each of {num} members in state{path}, got {tree.describe(leaf)}"
            )
    return None


def _of_operations(error: Exception, where: str, one: str, rest: str) -> Exception | None:
    text, line = str(error), line_of(error)
    if "randomness error mode" in text:
        return UnkeyedRandomError(
            f"a global generator, which knows no {one}s, was drawn from at {line}{layer_of(error)}: draw "
            "with purecompose.random from state.example_rng(name), or from state.rng(name) for the batch as a whole"
        )
    for words, what, remedy in _REFUSED:
        if re.search(words, text):
            what, remedy = (words.replace("member", one) for words in (what, remedy))
            return RuntimeError(
                f"{where}: {what}, at {line}{layer_of(error)}. {remedy}; or {rest}. torch.vmap says: "
                f"{text.partition('. ')[0]}"
            )
    return None
