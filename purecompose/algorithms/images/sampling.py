"""Bilinear sampling by torch's own kernel, in steps compiled for a CPU too.

Inductor takes `grid_sample` apart into loops of its own. On a GPU they fuse with what is around them; on a CPU they
take about five times as long as the kernel, which gathers with vector instructions. There it is called as it is, as
an operator of this library.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose._support.functorch import is_fake, only_maps


__all__ = ["sampled"]


def sampled(levels: Tensor, grid: Tensor) -> Tensor:
    """Levels at positions between pixels, where it is black around the image.

    Args:
        levels: (N, C, H, W), floating.
        grid: x and y, (N, K, L, 2), where -1 and 1 are the outer borders of the image.

    Returns:
        (N, C, K, L).
    """
    is_traced = torch.compiler.is_compiling() or is_fake(levels) or is_fake(grid)
    # For values only: gradients of all kinds are torch's own.
    needs_grad = torch.is_grad_enabled() and (levels.requires_grad or grid.requires_grad)
    is_forward = not needs_grad and only_maps()
    return (_operator if is_traced and is_forward and levels.device.type == "cpu" else _kernel)(levels, grid)


def _kernel(levels: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(levels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


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
