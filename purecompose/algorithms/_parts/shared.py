"""Parts of the running step: the gradient of a part of its batch, the part of this process, and its metrics."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from purecompose import tree
from purecompose.core.ranks import Ranks
from purecompose.core.state import State
from purecompose.schedule.declared import Within


T = TypeVar("T")

Elapsed: TypeAlias = Annotated[float, Within(0, hint="it is the share of the run that is over")]


def gradient_of_part(state: State, part: Any, first_example: int | Tensor) -> dict[str, Tensor]:
    """Return `state.gradient(state.params)` for some of the batch's examples.

    Parameters that have a gradient for the batch but not for these examples get zeros.

    The loss is that of the step, including algorithms that act before it; examples have the same draws as in the batch.
    Buffers, slots and metrics are not changed. If several processes share the batch, each computes its own part.

    Args:
        state: A state at an event after the gradient.
        part: Consecutive examples, in the form of the batch.
        first_example: The index in the batch of the first example; an int, or a 0-d int64 tensor.
    """
    # `regrad` is a tree node whose only child is the state from which the gradient is computed again.
    again = tree.map(
        lambda start: start.replace(batch=part, first_example=first_example),
        state.regrad,
        is_leaf=lambda node: isinstance(node, State),
    )
    grads, _ = state.replace(regrad=again).gradient(state.params, "none")
    missing = [name for name in state.grads or () if name not in grads]
    return {**grads, **{name: torch.zeros_like(state.params[name]) for name in missing}}


def share_of_batch(state: State) -> range:
    """Return the positions in the batch of this process's examples: all of them, unless several processes share it.

    The range may be empty.
    """
    ranks = _ranks(state)
    if ranks is None:
        return range(state.num_examples)
    share = ranks.share(state.batch, state.context.layout)
    return range(share.first_example, share.first_example + share.num_examples)


def sum_over_shares(state: State, share: range, own: T) -> T:
    """Return the sums over processes of a value, the same on all processes; with one process, the value itself.

    Args:
        state: A state at an event after the gradient.
        share: The result of `share_of_batch`. The value of a process with an empty share is ignored.
        own: The value of this process: a pytree of tensors, with the same structure and shapes on all processes.
    """
    ranks = _ranks(state)
    if ranks is None:
        return own
    leaves, spec = tree.flatten(own)
    return tree.unflatten(spec, ranks.reduced(leaves if share else [torch.zeros_like(leaf) for leaf in leaves], "sum"))


def _ranks(state: State) -> Ranks | None:
    return None if state.regrad is None else state.regrad.ranks


def reported(state: State, name: str, numbers: Mapping[str, float]) -> State:
    """Add host numbers to the state's metrics as `f"{name}/{key}"`, 0-d float32, on the state's device."""
    # torch.full, because a copy from the host would wait for a GPU.
    made = {
        f"{name}/{key}": torch.full((), value, dtype=torch.float32, device=state.device)
        for key, value in numbers.items()
    }
    return state.replace(metrics={**state.metrics, **made})
