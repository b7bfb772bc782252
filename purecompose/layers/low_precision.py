"""Normalisations that compute in half precision where the network does.

Under autocast torch runs layer and group normalisation in float32, and what follows reads and writes twice the memory.
These take what autocast would have taken for a product; their sums are still in float32, inside of torch's kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


__all__ = ["LowPrecisionGroupNorm", "LowPrecisionLayerNorm"]


class LowPrecisionLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in autocast's dtype where autocast is on; where it is not, `nn.LayerNorm` itself."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., normalized_shape) to the same shape."""
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(input)
        low, weight, bias = _low(kind, input, self.weight, self.bias)
        with torch.autocast(kind, enabled=False):
            return F.layer_norm(low, self.normalized_shape, weight, bias, self.eps)


class LowPrecisionGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` in autocast's dtype where autocast is on; where it is not, `nn.GroupNorm` itself."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, ...) to the same shape."""
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(input)
        low, weight, bias = _low(kind, input, self.weight, self.bias)
        with torch.autocast(kind, enabled=False):
            return F.group_norm(low, self.num_groups, weight, bias, self.eps)


def _low(
    kind: str, input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dtype = torch.get_autocast_dtype(kind)
    return input.to(dtype), None if weight is None else weight.to(dtype), None if bias is None else bias.to(dtype)
