"""Convolutions whose filters have mean 0 and variance 1.

    W' = (W - mean) / sqrt(var + 1e-10),   over all dims of W but the first, with the biased variance

References:
    Siyuan Qiao, Huiyu Wang, Chenxi Liu, Wei Shen, Alan Yuille: Micro-Batch Training with Batch-Channel Normalization
    and Weight Standardization. 2019. https://arxiv.org/abs/1903.10520
"""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn


__all__ = [
    "STANDARDIZED",
    "StandardizedConv1d",
    "StandardizedConv2d",
    "StandardizedConv3d",
    "plain_conv",
    "standardized",
    "standardized_conv",
]

_EPS = 1e-10


def standardized(weight: Tensor) -> Tensor:
    """Each filter with mean 0 and variance 1, computed in float32 at least.

    Args:
        weight: (out, ...), floating.

    Returns:
        Shape and dtype of the weight; zeros for a filter of one number, or of equal ones.

    Raises:
        ValueError: A weight of fewer than two dimensions.

    Example:
        >>> standardized(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])
    """
    if weight.ndim < 2:
        raise ValueError(f"standardized: expected a weight (out, ...), got shape {tuple(weight.shape)}")
    wide = weight if weight.dtype == torch.float64 else weight.float()
    dims = tuple(range(1, wide.ndim))  # not flattened: strides, channels last among them, stay
    centred = wide - wide.mean(dims, keepdim=True)
    scale = (centred.square().mean(dims, keepdim=True) + _EPS).rsqrt()
    return (centred * scale).to(weight.dtype)


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


STANDARDIZED: MappingProxyType[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.Conv1d: StandardizedConv1d, nn.Conv2d: StandardizedConv2d, nn.Conv3d: StandardizedConv3d}
)
"""The standardized form of each kind of convolution."""


def standardized_conv(conv: nn.Module) -> nn.Module | None:
    """A convolution with the same parameters and settings, and standardized filters.

    Returns:
        `None` for what is no `nn.Conv1d`, `2d` or `3d`, for one that is standardized, one that computes in a way of its
        own (a subclass with its own forward, a parametrized weight), and for weights that are not floating.
    """
    kind = next((kind for kind in STANDARDIZED if isinstance(conv, kind)), None)
    if kind is None or isinstance(conv, _Standardized):
        return None
    inherits = all(getattr(type(conv), name) is getattr(kind, name) for name in ("forward", "_conv_forward"))
    weight = conv._parameters.get("weight")
    if not inherits or weight is None or not weight.is_floating_point():
        return None
    return _recast(conv, STANDARDIZED[kind])


def plain_conv(conv: nn.Module, *, is_baked: bool = False) -> nn.Module | None:
    """The `nn.Conv1d`, `2d` or `3d` that a standardized convolution was made of.

    Args:
        conv: The convolution.
        is_baked: Whether the filters become the standardized ones, in a parameter of their own, so that the same is
            computed; otherwise the parameters stay, and compute with the filters as they are stored.

    Returns:
        `None` for what is no standardized convolution.
    """
    kind = next((plain for plain, kind in STANDARDIZED.items() if isinstance(conv, kind)), None)
    if kind is None:
        return None
    new: Any = _recast(conv, kind)
    if is_baked:
        old = new.weight
        new.weight = nn.Parameter(standardized(old.detach()), requires_grad=old.requires_grad)
    return new


def _recast(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """The same attributes, parameters and hooks in a module of another class; the tables of them are its own."""
    new = kind.__new__(kind)
    new.__dict__.update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}
    )
    return new
