"""States and batches in another floating dtype, for replays and for derivatives in float64."""

from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose.core.state import State


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a state or a batch with its floating tensors in another dtype.

    A state then computes without autocast, and with losses in float64 if the dtype is. Its named scalars keep their
    dtype, float32.

    Args:
        value: A state or a batch.
        dtype: A floating dtype.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if not isinstance(value, State):
        return batches.map_tensors(cast, value)
    loss_dtype = torch.float64 if dtype is torch.float64 else value.context.loss_dtype
    converted = tree.map(lambda leaf: cast(leaf) if isinstance(leaf, Tensor) else leaf, value)
    return converted.replace(hparams=value.hparams, precision="fp32", loss_dtype=loss_dtype)
