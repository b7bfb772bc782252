"""The running step's gradient for a part of its batch."""

from typing import Any

from torch import Tensor

from purecompose import tree
from purecompose.state import State


__all__ = ["gradient_of_part"]


def gradient_of_part(state: State, part: Any, first_example: int | Tensor) -> dict[str, Tensor]:
    """What `state.gradient(state.params)` gives, of some of the batch's examples alone.

    The step's own loss, with the algorithms that act on the way to it; an example draws what it drew in the batch.
    Buffers, slots and metrics do not leak.

    Args:
        state: At an event after the gradient.
        part: Consecutive examples, in the form of the batch.
        first_example: The index in the batch of the first of them; 0-d int64 where it is a tensor.

    Raises:
        RuntimeError: No gradient has been taken yet in this step.
    """
    # Where the gradient begins anew lies in `regrad`, a node of the tree whose one child is the state there.
    again = tree.map(
        lambda start: start.replace(batch=part, first_example=first_example),
        state.regrad,
        is_leaf=lambda node: isinstance(node, State),
    )
    return state.replace(regrad=again).gradient(state.params, "none")[0]
