"""Convolutions whose filters have mean 0 and variance 1.

    W' = (W - mean) / sqrt(var + 1e-10),   over all dims of W but the first, with the biased variance

References:
    Siyuan Qiao, Huiyu Wang, Chenxi Liu, Wei Shen, Alan Yuille: Micro-Batch Training with Batch-Channel Normalization
    and Weight Standardization. 2019. https://arxiv.org/abs/1903.10520
"""

import functools
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from purecompose.nn.layers._forms import is_plain, recast


_EPS = 1e-10


def standardized(weight: Tensor) -> Tensor:
    """Return each filter with mean 0 and variance 1, computed in float32 at least.

    Args:
        weight: (out, ...), floating.

    Returns:
        A tensor of the weight's shape and dtype; zeros for a filter of a single number or of equal numbers.

    Raises:
        ValueError: The weight has fewer than two dimensions.

    Example:
        >>> standardized(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])
    """
    if weight.ndim < 2:
        raise ValueError(f"standardized: expected a weight (out, ...), got shape {tuple(weight.shape)}")
    wide = weight if weight.dtype == torch.float64 else weight.float()
    dims = tuple(range(1, wide.ndim))  # not flattened, which keeps strides such as channels last
    centred = wide - wide.mean(dims, keepdim=True)
    scale = (centred.square().mean(dims, keepdim=True) + _EPS).rsqrt()
    return (centred * scale).to(weight.dtype)


class _Standardized:
    """Common part of the three classes: the stored weight is trained, the standardized one is used."""

    _plain: ClassVar[type[nn.Module]]
    """Class of the convolution that was standardized."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        forward: Any = super()
        return forward._conv_forward(input, standardized(weight), bias)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the class that was standardized, because the classes made for subclasses cannot be imported."""
        _, _, *rest = super().__reduce_ex__(protocol)  # pyright: ignore[reportGeneralTypeIssues]
        return _empty, (self._plain,), *rest


class StandardizedConv1d(_Standardized, nn.Conv1d):
    """`nn.Conv1d` with standardized filters; the same parameters under the same names.

    Example:
        >>> StandardizedConv1d(2, 4, 3)(torch.ones(1, 2, 5)).shape
        torch.Size([1, 4, 3])
    """

    _plain = nn.Conv1d


class StandardizedConv2d(_Standardized, nn.Conv2d):
    """`nn.Conv2d` with standardized filters; the same parameters under the same names.

    Example:
        >>> StandardizedConv2d(2, 4, 3)(torch.ones(1, 2, 5, 5)).shape
        torch.Size([1, 4, 3, 3])
    """

    _plain = nn.Conv2d


class StandardizedConv3d(_Standardized, nn.Conv3d):
    """`nn.Conv3d` with standardized filters; the same parameters under the same names.

    Example:
        >>> StandardizedConv3d(2, 4, 3)(torch.ones(1, 2, 5, 5, 5)).shape
        torch.Size([1, 4, 3, 3, 3])
    """

    _plain = nn.Conv3d


STANDARDIZED: MappingProxyType[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.Conv1d: StandardizedConv1d, nn.Conv2d: StandardizedConv2d, nn.Conv3d: StandardizedConv3d}
)
"""The standardized form of each kind of convolution."""


def standardized_conv(conv: nn.Module) -> nn.Module | None:
    """Return a convolution with the same parameters and settings, and standardized filters.

    Args:
        conv: Any module.

    Returns:
        One of the three classes; for a subclass, an instance of both it and the subclass. `None` if this is not an
        `nn.Conv1d`, `2d` or `3d`, if it is already standardized, has its own forward, hooks or parametrized tensors, or
        if its weight is not floating.

    Example:
        >>> type(standardized_conv(nn.Conv2d(3, 8, 3))).__name__, standardized_conv(nn.Linear(2, 2))
        ('StandardizedConv2d', None)
    """
    kind = next((kind for kind in STANDARDIZED if isinstance(conv, kind)), None)
    if kind is None or isinstance(conv, _Standardized):
        return None
    weight = conv._parameters.get("weight")
    inherits = is_plain(conv, kind) and getattr(type(conv), "_conv_forward") is getattr(kind, "_conv_forward")  # noqa: B009
    if not inherits or weight is None or not weight.is_floating_point():
        return None
    return recast(conv, _standardized_class(type(conv)))


def plain_conv(conv: nn.Module, *, is_baked: bool = False) -> nn.Module | None:
    """Return a convolution of the original class from a standardized one.

    Args:
        conv: The convolution.
        is_baked: True to store the standardized filters in a new parameter, so that the same function is computed;
            False to keep the parameters, so that the filters are used as they are stored.

    Returns:
        The convolution, or `None` if `conv` is not a standardized convolution.

    Example:
        >>> conv = standardized_conv(nn.Conv2d(3, 8, 3))
        >>> conv is not None and type(plain_conv(conv)).__name__
        'Conv2d'
    """
    if not isinstance(conv, _Standardized):
        return None
    new: Any = recast(conv, conv._plain)
    if is_baked:
        old = new.weight
        new.weight = nn.Parameter(standardized(old.detach()), requires_grad=old.requires_grad)
    return new


@functools.cache
def _standardized_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the standardized form of a class of convolutions; for a subclass, a class that inherits from both."""
    kind = next(kind for base, kind in STANDARDIZED.items() if issubclass(plain, base))
    if plain in STANDARDIZED:
        return kind
    return type(f"Standardized{plain.__name__}", (kind, plain), {"_plain": plain, "__module__": __name__})


def _empty(plain: type[nn.Module]) -> nn.Module:
    kind = _standardized_class(plain)
    return kind.__new__(kind)
