"""Shards: tensors of which each of several processes holds some rows, as `torch.distributed.tensor.DTensor`s.

Most programs have none, and importing that module takes a second. So nothing here imports it: where it is not loaded,
there are no shards.
"""

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor


__all__ = ["divided", "is_shard", "local", "placed_like", "rows_of", "sum_of_shards", "whole"]


def is_shard(value: Any) -> bool:
    """Return whether this is a tensor that is divided among processes."""
    if type(value) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the rows that this process holds; a tensor that is not divided, as it is."""
    return tensor.to_local() if is_shard(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole(tensor: Tensor) -> Tensor:
    """Return all rows, which every process must ask for; a tensor that is not divided, as it is."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def placed_like(own: Tensor, like: Any) -> Tensor:
    """Return the divided tensor of which this process has these rows.

    Args:
        own: This process's rows.
        like: A divided tensor of the same shape; its dtype may differ.
    """
    return _dtensor().from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def divided(tensor: Tensor, like: Any) -> Tensor:
    """Return a whole tensor, the same on all processes, divided as another of its shape; no message is sent."""
    return placed_like(rows_of(tensor, like.device_mesh), like)


def rows_of(tensor: Tensor, mesh: Any) -> Tensor:
    """Return the rows of a whole tensor that this process holds on a mesh, copied."""
    size = -(-tensor.shape[0] // mesh.size(mesh.ndim - 1))
    start = min(size * mesh.get_local_rank(mesh.ndim - 1), tensor.shape[0])
    return tensor[start : start + size].clone()


def sum_of_shards(own: Tensor, shards: Sequence[Any]) -> Tensor:
    """Return the sum over the parts of divided tensors: a plain tensor, the same on all processes, by one message.

    Args:
        own: What belongs to this process's rows, of any shape.
        shards: Tensors that are divided alike, at least one.
    """
    from torch.distributed.tensor import Partial, Replicate

    mesh, placements = shards[0].device_mesh, shards[0].placements
    parts = [Partial("sum") if placement.is_shard() else Replicate() for placement in placements]
    return _dtensor().from_local(own, mesh, parts, run_check=False).full_tensor()


def _dtensor() -> Any:
    return sys.modules["torch.distributed.tensor"].DTensor
