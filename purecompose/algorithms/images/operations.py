"""Operations on images of any scale, with numbers or tensors as amounts; they apply the operations on grey levels.

In all of them `images` are (N, C, H, W) or one image (C, H, W), uint8 or floating; an amount is a number, a 0-d tensor,
or a tensor (N,) with one value for each image; and `value_range` is the pair of values of black and white in floating
images, numbers or one for each channel, by default the least and greatest value of each channel in the given images.
The range of bytes is always 0 to 255. Results have the shape and dtype of `images`. Values of tensors are not checked.

They raise `TypeError` for other dtypes and `ValueError` for other shapes and numbers out of range.
"""

from collections.abc import Callable
from typing import Annotated, TypeAlias

from torch import Tensor

from purecompose.algorithms.images import geometry, tones
from purecompose.algorithms.images.levels import Scale, ValueRange, on_levels
from purecompose.schedule.declared import Within, checked


Amount: TypeAlias = Annotated[float | Tensor, Within()]
Bits: TypeAlias = Annotated[float | Tensor, Within(0, 8)]
Threshold: TypeAlias = Annotated[float | Tensor, Within(0, 256)]
Factor: TypeAlias = Annotated[float | Tensor, Within(0)]


@checked
def autocontrast(images: Tensor, *, value_range: ValueRange = None) -> Tensor:
    """Stretch each channel's levels to the whole scale.

    Example:
        >>> import torch
        >>> autocontrast(torch.tensor([[[50, 100], [100, 150]]], dtype=torch.uint8)).tolist()
        [[[0, 128], [128, 255]]]
    """
    return _applied(tones.autocontrast, images, 1.0, value_range)


@checked
def equalize(images: Tensor, *, value_range: ValueRange = None) -> Tensor:
    """Make the histogram (of 256 bins) of each channel as flat as possible."""
    return _applied(tones.equalize, images, 1.0, value_range)


@checked
def posterize(images: Tensor, bits: Bits, *, value_range: ValueRange = None) -> Tensor:
    """Keep the first `bits` (0 to 8) of each level; 8 is the identity."""
    return _applied(tones.posterize, images, bits, value_range)


@checked
def solarize(images: Tensor, threshold: Threshold, *, value_range: ValueRange = None) -> Tensor:
    """Invert the levels from `threshold` (0 to 256) on; 256 is the identity."""
    return _applied(tones.solarize, images, threshold, value_range)


@checked
def rotate(images: Tensor, degrees: Amount, *, value_range: ValueRange = None) -> Tensor:
    """Rotate images counter-clockwise about their centre. Pixels from outside the image are black."""
    return _applied(geometry.rotate, images, degrees, value_range)


@checked
def shear_x(images: Tensor, slope: Amount, *, value_range: ValueRange = None) -> Tensor:
    """Shift row y to the left by `slope * y` pixels."""
    return _applied(geometry.shear_x, images, slope, value_range)


@checked
def shear_y(images: Tensor, slope: Amount, *, value_range: ValueRange = None) -> Tensor:
    """Shift column x up by `slope * x` pixels."""
    return _applied(geometry.shear_y, images, slope, value_range)


@checked
def translate_x(images: Tensor, pixels: Amount, *, value_range: ValueRange = None) -> Tensor:
    """Shift images to the left by an integer number of pixels (fractions are truncated)."""
    return _applied(geometry.translate_x, images, pixels, value_range)


@checked
def translate_y(images: Tensor, pixels: Amount, *, value_range: ValueRange = None) -> Tensor:
    """Shift images up by an integer number of pixels (fractions are truncated)."""
    return _applied(geometry.translate_y, images, pixels, value_range)


@checked
def saturation(images: Tensor, factor: Factor, *, value_range: ValueRange = None) -> Tensor:
    """Blend with the grey image: 0 is grey, 1 the image, above 1 more colourful. The identity for one channel."""
    return _applied(tones.saturation, images, factor, value_range)


@checked
def contrast(images: Tensor, factor: Factor, *, value_range: ValueRange = None) -> Tensor:
    """Blend with the image's mean grey: 0 is this grey, 1 the image."""
    return _applied(tones.contrast, images, factor, value_range)


@checked
def brightness(images: Tensor, factor: Factor, *, value_range: ValueRange = None) -> Tensor:
    """Blend with black: 0 is black, 1 the image."""
    return _applied(tones.brightness, images, factor, value_range)


@checked
def sharpness(images: Tensor, factor: Factor, *, value_range: ValueRange = None) -> Tensor:
    """Blend with the image smoothed by a 3x3 filter: 0 is smoothed, 1 the image. Pixels at the border are unchanged."""
    return _applied(tones.sharpness, images, factor, value_range)


def _applied(
    operation: Callable[[Tensor, Tensor], Tensor], images: Tensor, amount: float | Tensor, value_range: ValueRange
) -> Tensor:
    name = operation.__name__

    def applied(stored: Tensor, scale: Scale) -> Tensor:
        levels = scale.opened(stored)
        if isinstance(amount, Tensor):
            amounts = amount.to(levels)
        else:
            amounts = levels.new_full((), amount)  # a copy from the host would wait for a GPU
        if amounts.ndim > 1 or (amounts.ndim == 1 and len(amounts) != len(levels)):
            raise ValueError(
                f"{name}: expected one amount or one for each of {len(levels)} images, got shape {tuple(amounts.shape)}"
            )
        return scale.settled(operation(levels, amounts.expand(len(levels))))

    return on_levels(images, applied, value_range, name)
