"""Normalisations that compute in half precision where the network does.

Under autocast torch runs layer and group normalisation in float32, and what follows reads and writes twice the memory.
These take what autocast would have taken for a product, and give the same; their sums are still in float32, inside of
torch's kernels. Names, shapes and numbers of weights are those of the layers in whose place they stand.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose.nn.layers._forms import recast


__all__ = ["LowPrecisionGroupNorm", "LowPrecisionLayerNorm"]


class LowPrecisionLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in autocast's dtype where autocast is on; where it is not, `nn.LayerNorm` itself."""

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> "LowPrecisionLayerNorm":
        """Return the layer with the attributes and weights of another one, its subclass's included: the same
        `Parameter`s.
        """
        return recast(norm, cls)

    def forward(self, input: Tensor) -> Tensor:
        """(..., normalized_shape) to the same shape."""
        dtype = _low(input)
        if dtype is None:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _as(self.weight, dtype), _as(self.bias, dtype)
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


class LowPrecisionGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` in autocast's dtype where autocast is on; where it is not, `nn.GroupNorm` itself."""

    @classmethod
    def of(cls, norm: nn.GroupNorm) -> "LowPrecisionGroupNorm":
        """Return the layer with the attributes and weights of another one, its subclass's included: the same
        `Parameter`s.
        """
        return recast(norm, cls)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, ...) to the same shape."""
        dtype = _low(input)
        if dtype is None:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _as(self.weight, dtype), _as(self.bias, dtype)
            return F.group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps)


def _low(input: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast would have multiplied the input: float64 it leaves alone."""
    kind = input.device.type
    if input.dtype is torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
