"""Channels last: stores images and filters position by position, with all channels of a position side by side."""

from typing import Any

import torch
from torch import Tensor

from purecompose import tree
from purecompose.algorithms._parts.surgery import warn_of_nothing
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.schedule.declared import checked
from purecompose.time.event import Event
from purecompose.time.predicates import on


@checked
def to_channels_last(tensors: Any) -> Any:
    """Return a tree whose four-dimensional tensors are stored in the order (N, H, W, C), with the same values.

    Args:
        tensors: A tensor, or any tree of tensors.

    Returns:
        The tree. Four-dimensional tensors are copied, unless they already have this layout; all other leaves are the
        same objects.

    Example:
        >>> to_channels_last(torch.zeros(2, 3, 4, 5)).stride()
        (60, 1, 15, 3)
    """
    return tree.map(_moved, tensors)


@factory
def channels_last(*, name: str = "channels_last") -> Algorithm:
    """Store weights with channels last.

    Four-dimensional tensors (N, C, H, W) keep their shape and values; their strides become those of (N, H, W, C), the
    layout that half-precision kernels on GPUs read. The batch is not changed: the first convolution with such filters
    returns its output in this layout, and the following layers keep it.

    Events: INIT, after the methods that change the model. Reads and replaces: parameters, buffers, and the optimizer's
    state.

    Args:
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no four-dimensional tensors.

    Example:
        >>> channels_last()
        channels_last()

    References:
        Channels Last Memory Format in PyTorch.
        https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """

    def apply(event: Event, state: State) -> State:
        del event
        tensors = {**state.params, **state.buffers}
        if not any(tensor.ndim == 4 for tensor in tensors.values()):
            warn_of_nothing(name, "tensors of four dimensions", state.model.module, "Leave it out")
            return state
        lasting = {field: getattr(state, field) for field in ("params", "buffers", "opt_state")}
        return state.replace(**to_channels_last(lasting))

    return Algorithm(name, on(Event.INIT), apply, runs_after=(Trait.REQUIRED_ON_LOAD,))


def _moved(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.ndim != 4 or leaf.layout is not torch.strided:
        return leaf
    if leaf.shape[1] == 1 < leaf.shape[2:].numel():
        # Its order in memory is right, so contiguous() would do nothing; but kernels recognize the layout by strides.
        return leaf.to(memory_format=torch.channels_last)
    return leaf.contiguous(memory_format=torch.channels_last)
