"""The form of images whatever their dtype, and parts of their sides."""

import math
from typing import Any

import torch
from torch import Tensor

from purecompose._checks import shown


__all__ = ["check_image_tensor", "whole_part"]

# Three roundings, of a decimal share, of 1 - share and of the product, add up to less than this share of a side.
_ROUNDING = 4e-16


def whole_part(share: float, size: int) -> int:
    """The whole part of `share * size`, where rounding alone does not take a whole pixel away.

    Example:
        >>> whole_part(1 - 0.9, 10), int((1 - 0.9) * 10)
        (1, 0)
    """
    return math.floor((share + _ROUNDING) * size)


def check_image_tensor(images: Any, where: str, *, has_levels: bool = False) -> None:
    """Raises a `TypeError` for what is no tensor, a `ValueError` unless it is (N, C, H, W) or (C, H, W).

    Args:
        images: What came.
        where: Opens messages.
        has_levels: Whether its values have to be levels, of uint8 or a floating dtype; else a `TypeError`, too.
    """
    if not isinstance(images, Tensor):
        raise TypeError(f"{where}: expected a tensor of images, got {shown(images)}")
    if has_levels and images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"{where}: expected uint8 or a floating dtype, got {images.dtype}; use images.to(torch.uint8)")
    if images.ndim not in (3, 4):
        raise ValueError(f"{where}: expected (N, C, H, W) or (C, H, W), got shape {tuple(images.shape)}")
