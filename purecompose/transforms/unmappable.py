"""Errors of `torch.vmap` over members or examples, reported with the layer, the line and a remedy."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from purecompose import tree
from purecompose._support.messages import layer_of, line_of
from purecompose._support.scopes import unvalidated
from purecompose.core.state import State
from purecompose.errors import UnkeyedRandomError


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
    """Return a context manager in which errors of vmap are reported with the layer, the line and a remedy.

    Args:
        where: What maps, for the messages.
        one: What it maps over, "member" or "example".
        remedy: What helps whatever the error is.
        state: The state of members, whose rows are checked.
        num: The number of members.
    """
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
