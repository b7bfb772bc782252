"""Checks of the shapes of images, and shares of their sides in pixels."""

import math
import sys
from typing import Any, overload

import torch
from torch import Tensor

from purecompose._support.checks import shown


# The roundings of a decimal share, of 1 - share and of the product add up to less than this many times the machine
# epsilon.
_ROUNDINGS = 2


@overload
def whole_part(share: float, size: int) -> int: ...
@overload
def whole_part(share: Tensor, size: int) -> Tensor: ...
def whole_part(share: float | Tensor, size: int) -> int | Tensor:
    """Return the integer part of `share * size`, without losing a pixel to rounding.

    Args:
        share: A number, or a floating tensor, which has been rounded to its dtype.
        size: The number of pixels.

    Returns:
        An int, or a tensor of the same shape, int64.

    Example:
        >>> whole_part(1 - 0.9, 10), int((1 - 0.9) * 10)
        (1, 0)
    """
    if isinstance(share, Tensor):
        slack = _ROUNDINGS * torch.finfo(share.dtype).eps
        return ((share.double() + slack) * size).floor().to(torch.int64)
    return math.floor((share + _ROUNDINGS * sys.float_info.epsilon) * size)


def check_image_tensor(images: Any, where: str, *, has_levels: bool = False) -> None:
    """Raise a `TypeError` unless images are a tensor, and a `ValueError` unless it is (N, C, H, W) or (C, H, W)."""
    if not isinstance(images, Tensor):
        raise TypeError(f"{where}: expected a tensor of images, got {shown(images)}")
    if has_levels and images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"{where}: expected uint8 or a floating dtype, got {images.dtype}; use images.to(torch.uint8)")
    if images.ndim not in (3, 4):
        raise ValueError(f"{where}: expected (N, C, H, W) or (C, H, W), got shape {tuple(images.shape)}")
