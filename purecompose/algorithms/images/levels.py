"""Images as grey levels: the scale from 0 (black) to 255 (white) on which image operations are defined."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor

from purecompose._support.checks import frozen, is_number, shown
from purecompose._support.device import constants
from purecompose._support.internals import is_fake, is_transforming


WHITE = 255.0
_SLACK = 1e-3  # tolerance for rounding in half precision, as a share of the range; far less than a level

Bound: TypeAlias = float | tuple[float, ...]
ValueRange: TypeAlias = tuple[Bound, Bound] | None
"""Values of black and white, a number for all channels or one for each; for `None` see `Scale.of`."""


class Scale(NamedTuple):
    """Conversion between the values of images and grey levels.

    Attributes:
        low: The value of black, a number or (C, 1, 1).
        high: The value of white, likewise.
        is_whole: True if levels are integers, for images of uint8.
    """

    low: float | Tensor
    high: float | Tensor
    is_whole: bool

    @classmethod
    def of(cls, images: Tensor, value_range: ValueRange = None) -> Scale:
        """Return the scale of a batch.

        Args:
            images: (..., C, H, W), uint8 or floating.
            value_range: The range of floats; the range of bytes is always 0 to 255. By default the least and the
                greatest value of each channel in the batch, so that the normalisation of images need not be known.
        """
        if images.dtype == torch.uint8:
            return cls(0.0, WHITE, True)
        if value_range is None:
            flat = _wide(images.detach()).movedim(-3, 0).flatten(1)
            # One pixel that is NaN must not turn the others into NaN.
            is_finite = flat.isfinite()
            low, high = (
                torch.where(is_finite, flat, torch.inf).amin(1),
                torch.where(is_finite, flat, -torch.inf).amax(1),
            )
            return cls(low.view(-1, 1, 1), high.view(-1, 1, 1), False)
        low, high = (_bound(bound, images) for bound in value_range)
        if isinstance(low, Tensor) != isinstance(high, Tensor):
            low, high = (
                bound if isinstance(bound, Tensor) else images.new_full((1, 1, 1), bound) for bound in (low, high)
            )
        return cls(low, high, False)

    def stored(self, images: Tensor) -> Tensor:
        """Return the levels in the form that is stored between operations: uint8 if they are integers, else floats."""
        if self.is_whole:
            return images
        wide = _wide(images)
        return ((wide - self.low) * (WHITE / self._extent(wide))).clamp(0, WHITE)

    def opened(self, stored: Tensor) -> Tensor:
        """Return the levels as floats, as operations expect them."""
        return stored.float() if self.is_whole else stored

    def settled(self, levels: Tensor) -> Tensor:
        """Return levels in the form that is stored, rounded to uint8 if they are integers."""
        return levels.round().to(torch.uint8) if self.is_whole else levels

    def values(self, stored: Tensor, before: Tensor, images: Tensor) -> Tensor:
        """Return the images with these levels; pixels whose level equals `before` keep their exact values."""
        if self.is_whole:
            return stored
        values = stored * (self._extent(stored) / WHITE) + self.low
        bounds: Any = (self.low, self.high)
        return torch.where(stored == before, images, values.clamp(*bounds).to(images.dtype))

    def _extent(self, like: Tensor) -> float | Tensor:
        extent: Any = self.high - self.low  # pyright: ignore[reportOperatorIssue]
        # A constant channel has extent 0; divide by 1 instead, so that its level is 0.
        return torch.where(extent > 0, extent, 1).to(like) if isinstance(extent, Tensor) else extent


def on_levels(images: Tensor, fn: Callable[[Tensor, Scale], Tensor], value_range: ValueRange, where: str) -> Tensor:
    """Apply a function of levels to images.

    Args:
        images: (N, C, H, W) or one image (C, H, W), uint8 or floating.
        fn: A function `(levels (N, C, H, W), scale) -> levels`, both in the form that the scale stores.
        value_range: See `Scale.of`.

    Returns:
        Images of the shape and dtype of `images`.
    """
    check_image_tensor(images, f"{where}: images", has_levels=True)
    check_value_range(value_range, f"{where}: value_range", images.shape[-3])
    batch = images if images.ndim == 4 else images.unsqueeze(0)
    if not batch.numel():
        return images
    scale = Scale.of(batch, value_range)
    stored = scale.stored(batch)
    changed = scale.values(fn(stored, scale), stored, batch)
    return changed if images.ndim == 4 else changed.squeeze(0)


def check_value_range(value_range: Any, where: str, channels: int | None = None) -> Any:
    """Require `None` or (black, white), each a number or one for each channel, and return it with tuples."""
    if value_range is None:
        return None
    if not isinstance(value_range, tuple | list) or len(value_range) != 2:
        raise TypeError(f"{where}: expected (black, white), such as (0.0, 1.0), or None, got {shown(value_range)}")
    low, high = (tuple(bound) if isinstance(bound, tuple | list) else (bound,) for bound in value_range)
    if not all(is_number(value) for value in (*low, *high)):
        raise TypeError(f"{where}: expected numbers, one or one for each channel, got {shown(value_range)}")
    counts = {len(low), len(high)} - {1}
    if len(counts) > 1 or (channels is not None and counts - {channels}):
        raise ValueError(
            f"{where}: expected one number, or one for each of {channels or 'the'} channels, got {shown(value_range)}"
        )
    longest = max(len(low), len(high))
    pairs = zip(low * (longest // len(low)), high * (longest // len(high)), strict=True)
    if not all(black < white for black, white in pairs):
        raise ValueError(f"{where}: expected black below white, got {shown(value_range)}")
    return frozen(value_range)


def check_in_range(images: Tensor, value_range: ValueRange, where: str) -> None:
    """Raise a `ValueError` for floats (..., C, H, W) outside the range, apart from NaN; this reads the values.

    Values outside would be clipped, and normalised images have many of them.
    """
    if value_range is None or not images.numel():
        return
    low, high = (_bound(bound, images) for bound in value_range)
    wide, slack = _wide(images.detach()), _SLACK * (high - low)
    if not ((wide < low - slack) | (wide > high + slack)).any():
        return
    finite = wide[~wide.isnan()]
    raise ValueError(
        f"{where}: expected floats from black to white, value_range={value_range}, got values from "
        f"{finite.min().item():.4g} to {finite.max().item():.4g}; apply it before Normalize, or give value_range="
    )


def _wide(images: Tensor) -> Tensor:
    return images if images.dtype == torch.float64 else images.float()


def _bound(bound: Bound, images: Tensor) -> Tensor:
    values = bound if isinstance(bound, tuple | list) else (bound,)
    return constants(values, torch.float32, images.device).view(-1, 1, 1)


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


def can_read(tensor: Tensor) -> bool:
    """Return whether values can be read on the host without waiting for a device."""
    return not is_traced(tensor) and tensor.device.type == "cpu" and type(tensor) is Tensor


def is_traced(tensor: Tensor) -> bool:
    """Return whether code with this tensor is compiled, mapped or differentiated by torch.func."""
    return torch.compiler.is_compiling() or is_transforming() or is_fake(tensor)
