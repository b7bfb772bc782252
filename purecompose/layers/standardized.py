"""Convolutions whose filters have mean 0 and variance 1.

    W' = (W - mean) / sqrt(var + 1e-10),   over all dims of W but the first, with the biased variance

References:
    Siyuan Qiao, Huiyu Wang, Chenxi Liu, Wei Shen, Alan Yuille: Micro-Batch Training with Batch-Channel Normalization and
    Weight Standardization. 2019. https://arxiv.org/abs/1903.10520
"""

from typing import Any

import torch
from torch import Tensor, nn


__all__ = ["STANDARDIZED", "StandardizedConv1d", "StandardizedConv2d", "StandardizedConv3d", "standardized"]

_EPS = 1e-10


def standardized(weight: Tensor) -> Tensor:
    """Each filter with mean 0 and variance 1, computed in float32 at least.

    Args:
        weight: (out, ...), floating.

    Returns:
        Shape and dtype of the weight; zeros for a filter of one number.

    Example:
        >>> standardized(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])
    """
    wide = weight if weight.dtype == torch.float64 else weight.float()
    rows = wide.flatten(1)
    centred = rows - rows.mean(1, keepdim=True)
    scale = (centred.square().mean(1, keepdim=True) + _EPS).rsqrt()
    return (centred * scale).view_as(weight).to(weight.dtype)


class _Standardized:
    """What the three have in common: the stored weight trains, the standardized one computes."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        forward: Any = super()
        return forward._conv_forward(input, standardized(weight), bias)


class StandardizedConv1d(_Standardized, nn.Conv1d):
    """`nn.Conv1d` with standardized filters; the same parameters under the same names."""


class StandardizedConv2d(_Standardized, nn.Conv2d):
    """`nn.Conv2d` with standardized filters; the same parameters under the same names."""


class StandardizedConv3d(_Standardized, nn.Conv3d):
    """`nn.Conv3d` with standardized filters; the same parameters under the same names."""


STANDARDIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: StandardizedConv1d,
    nn.Conv2d: StandardizedConv2d,
    nn.Conv3d: StandardizedConv3d,
}
"""The standardized form of each kind of convolution."""
