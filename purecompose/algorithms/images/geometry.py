"""Operations on grey levels that move pixels. Positions outside the image are black.

Each is a function `(levels (N, C, H, W), amount (N,)) -> levels` of the same size, with the conventions of Pillow:
pixels are squares, the position of a pixel is that of its centre, measured from the image's corner, and levels are
interpolated linearly between pixels.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose._support.functorch import is_fake, only_maps
from purecompose.losses.targets import per_row


_FAR = 3.0  # a grid position far outside the image, which ranges from -1 to 1


def rotate(levels: Tensor, degrees: Tensor) -> Tensor:
    """Rotate images counter-clockwise about their centre."""
    x, y = _middles(levels)
    radians = per_row(degrees, levels[:, 0]) * (math.pi / 180)
    cos, sin = torch.cos(radians), torch.sin(radians)
    half_height, half_width = levels.shape[2] / 2, levels.shape[3] / 2
    from_x = cos * (x - half_width) - sin * (y - half_height) + half_width
    from_y = sin * (x - half_width) + cos * (y - half_height) + half_height
    return _sampled(levels, from_x, from_y, degrees)


def shear_x(levels: Tensor, slope: Tensor) -> Tensor:
    """Shear horizontally: row y is taken from `slope * y` pixels to the right."""
    x, y = _middles(levels)
    from_x = x + per_row(slope, levels[:, 0]) * y
    return _sampled(levels, from_x, y.expand_as(from_x), slope)


def shear_y(levels: Tensor, slope: Tensor) -> Tensor:
    """Shear vertically: column x is taken from `slope * x` pixels below."""
    x, y = _middles(levels)
    from_y = y + per_row(slope, levels[:, 0]) * x
    return _sampled(levels, x.expand_as(from_y), from_y, slope)


def translate_x(levels: Tensor, pixels: Tensor) -> Tensor:
    """Shift horizontally: each pixel is taken from the given integer number of columns to its right."""
    return _shifted(levels, pixels, 3)


def translate_y(levels: Tensor, pixels: Tensor) -> Tensor:
    """Shift vertically: each pixel is taken from the given integer number of rows below it."""
    return _shifted(levels, pixels, 2)


def _middles(levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the pixels' centres, x (1, W) and y (H, 1)."""
    height, width = levels.shape[2:]
    options = {"dtype": levels.dtype, "device": levels.device}
    return torch.arange(width, **options).view(1, -1) + 0.5, torch.arange(height, **options).view(-1, 1) + 0.5


def _sampled(levels: Tensor, from_x: Tensor, from_y: Tensor, amount: Tensor) -> Tensor:
    """Return the levels at positions (N, H, W); an image with amount 0 is returned exactly."""
    height, width = levels.shape[2:]
    is_inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    # Within half a pixel of the edge only the edge pixel is used; positions outside are moved far away, to black.
    x = torch.where(is_inside, from_x.clamp(0.5, width - 0.5) * (2 / width) - 1, _FAR)
    y = from_y.clamp(0.5, height - 0.5) * (2 / height) - 1
    # Stack x and y as planes instead of pairs: loops over planes use vector instructions.
    moved = sampled(levels, torch.stack((x, y), 1).permute(0, 2, 3, 1))
    return torch.where(per_row(amount, levels) != 0, moved, levels)


def _shifted(levels: Tensor, pixels: Tensor, dim: int) -> Tensor:
    length = levels.shape[dim]
    source = torch.arange(length, device=levels.device) + pixels.to(torch.int64).unsqueeze(1)
    shape = [len(levels), 1, 1, 1]
    shape[dim] = length
    source = source.view(shape)
    # Positions outside the image read a row or column of zeros that is appended.
    source = torch.where((source >= 0) & (source < length), source, length)
    padded = F.pad(levels, (0, 1) if dim == 3 else (0, 0, 0, 1))
    return padded.gather(dim, source.expand_as(levels))


def sampled(levels: Tensor, grid: Tensor) -> Tensor:
    """Return levels at positions between pixels; positions outside the image are black.

    Args:
        levels: (N, C, H, W), floating.
        grid: The positions x and y, (N, K, L, 2), where -1 and 1 are the outer borders of the image.

    Returns:
        The levels, (N, C, K, L).
    """
    is_traced = torch.compiler.is_compiling() or is_fake(levels) or is_fake(grid)
    # The operator is used for values only; gradients of all kinds use torch's function.
    needs_grad = torch.is_grad_enabled() and (levels.requires_grad or grid.requires_grad)
    is_forward = not needs_grad and only_maps()
    return (_operator if is_traced and is_forward and levels.device.type == "cpu" else _kernel)(levels, grid)


def _kernel(levels: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(levels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


# Inductor decomposes `grid_sample` into loops. On a GPU they fuse with neighbouring operations; on a CPU they take five
# times as long as the kernel, which gathers with vector instructions. There the kernel is a custom operator.
@torch.library.custom_op("purecompose::sampled", mutates_args=())
def _operator(levels: Tensor, grid: Tensor) -> Tensor:
    return _kernel(levels, grid)


@_operator.register_fake
def _(levels: Tensor, grid: Tensor) -> Tensor:
    return levels.new_empty((*levels.shape[:2], *grid.shape[1:3]))


@_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, int | None], levels: Tensor, grid: Tensor) -> tuple[Tensor, int]:
    rows = [
        value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
        for value, dim in zip((levels, grid), in_dims, strict=True)
    ]
    return _operator(*(value.flatten(0, 1) for value in rows)).unflatten(0, (info.batch_size, -1)), 0
