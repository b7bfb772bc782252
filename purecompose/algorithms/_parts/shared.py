"""Parts of the running step's batch: the gradient for one, and which falls to this process."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from purecompose import tree
from purecompose.core.ranks import Ranks
from purecompose.core.state import State


__all__ = ["gradient_of_part", "share_of_batch", "sum_over_shares"]

T = TypeVar("T")


def gradient_of_part(state: State, part: Any, first_example: int | Tensor) -> dict[str, Tensor]:
    """Return `state.gradient(state.params)` of some of the batch's examples.

    Zeros for parameters that the batch reaches and these examples do not.

    The step's own loss, with the algorithms that act on the way to it; an example draws what it drew in the batch.
    Buffers, slots and metrics do not leak. Where several processes share the batch, this one computes the part only.

    Args:
        state: At an event after the gradient.
        part: Consecutive examples, in the form of the batch.
        first_example: The index in the batch of the first of them; 0-d int64 where it is a tensor.

    Raises:
        RuntimeError: No gradient has been taken yet in this step.
    """
    # Where the gradient begins again lies in `regrad`, a node of the tree whose one child is the state there.
    again = tree.map(
        lambda start: start.replace(batch=part, first_example=first_example),
        state.regrad,
        is_leaf=lambda node: isinstance(node, State),
    )
    grads, _ = state.replace(regrad=again).gradient(state.params, "none")
    missing = [name for name in state.grads or () if name not in grads]
    return {**grads, **{name: torch.zeros_like(state.params[name]) for name in missing}}


def share_of_batch(state: State) -> range:
    """Return the examples that fall to this process, by their places in the batch: all of them, unless several share
    it.

    There may be none.

    Args:
        state: At an event after the gradient.
    """
    ranks = _ranks(state)
    if ranks is None:
        return range(state.num_examples)
    share = ranks.share(state.batch, state.context.layout)
    return range(share.first_example, share.first_example + share.num_examples)


def sum_over_shares(state: State, share: range, own: T) -> T:
    """Return the sums of what each process has found for its share: the same on all; without other processes, what is
    given.

    Args:
        state: At an event after the gradient.
        share: By `share_of_batch`. What a process with an empty one has is not looked at.
        own: A pytree of tensors, of the same form on all.
    """
    ranks = _ranks(state)
    if ranks is None:
        return own
    leaves, spec = tree.flatten(own)
    return tree.unflatten(spec, ranks.sums(leaves if share else [torch.zeros_like(leaf) for leaf in leaves]))


def _ranks(state: State) -> Ranks | None:
    return None if state.regrad is None else state.regrad.ranks
