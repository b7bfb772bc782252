"""Bilinear sampling by torch's kernel, also in steps compiled for a CPU.

Inductor decomposes `grid_sample` into loops. On a GPU they fuse with neighbouring operations; on a CPU they take about
five times as long as the kernel, which gathers with vector instructions. On a CPU the kernel is therefore called as a
custom operator of this library.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose._support.functorch import is_fake, only_maps


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
