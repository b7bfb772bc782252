"""Normalisations that compute in half precision where the network does.

Under autocast torch runs layer and group normalisation in float32, so the next operations read and write twice the
memory. These layers compute in the dtype that autocast uses for matrix products; their sums are still in float32,
inside torch's kernels. Their weights have the same names and shapes as in the layers that they replace.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose.nn.layers._forms import recast


class LowPrecisionLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that computes in autocast's dtype if autocast is on; otherwise plain `nn.LayerNorm`.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LowPrecisionLayerNorm(8)(torch.ones(2, 8)).dtype
        torch.bfloat16
    """

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> "LowPrecisionLayerNorm":
        """Return a layer with the attributes of `norm`, including those of a subclass, and the same `Parameter`s."""
        return recast(norm, cls)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., normalized_shape) to the same shape."""
        dtype = _low(input)
        if dtype is None:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _as(self.weight, dtype), _as(self.bias, dtype)
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


class LowPrecisionGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that computes in autocast's dtype if autocast is on; otherwise plain `nn.GroupNorm`.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LowPrecisionGroupNorm(2, 8)(torch.ones(2, 8)).dtype
        torch.bfloat16
    """

    @classmethod
    def of(cls, norm: nn.GroupNorm) -> "LowPrecisionGroupNorm":
        """Return a layer with the attributes of `norm`, including those of a subclass, and the same `Parameter`s."""
        return recast(norm, cls)

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, ...) to the same shape."""
        dtype = _low(input)
        if dtype is None:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = _as(self.weight, dtype), _as(self.bias, dtype)
            return F.group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps)


def _low(input: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast would use to multiply the input; `None` if it is off, and for float64."""
    kind = input.device.type
    if input.dtype is torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
