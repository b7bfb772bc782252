"""Shards: tensors of which each of several processes holds some rows, as `torch.distributed.tensor.DTensor`s.

Most programs have none, and importing that module takes a second. So nothing here imports it: where it is not loaded,
there are no shards.
"""

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.internals import is_fake


_MODULE = "torch.distributed.tensor"


def may_be_shards() -> bool:
    """Return whether this process can have divided tensors, which is known without looking at any."""
    return _MODULE in sys.modules


def all_gather(own: Tensor, size: int, group: str) -> Tensor:
    """Return the tensors of all processes of a group, of the same shape, one after the other in dimension 0."""
    return _MESSAGES.wait_tensor(_MESSAGES.all_gather_into_tensor(own, size, group))


def reduce_scatter(own: Tensor, size: int, group: str) -> Tensor:
    """Return this process's part of the sum over a group, which is cut into equal parts in dimension 0."""
    return _MESSAGES.wait_tensor(_MESSAGES.reduce_scatter_tensor(own, "sum", size, group))


def all_reduce(own: Tensor, how: str, group: str) -> Tensor:
    """Return the "sum", "min" or "max" over a group."""
    return _MESSAGES.wait_tensor(_MESSAGES.all_reduce(own, how, group))


# Private: the public functions, such as `torch.distributed.all_reduce`, write into an argument, which a graph of pure
# functions cannot contain. For a torch without these operations, wrap the public ones in custom operators.
_MESSAGES: Any = torch.ops._c10d_functional


def is_wait(target: Any) -> bool:
    """Return whether an operation in a graph waits for a message."""
    return target is _MESSAGES.wait_tensor.default


def check_alike(message: str, group: str, like: Tensor) -> None:
    """Raise on all processes of a group if their next messages, described in words, differ.

    They exchange a number first: messages of other tensors would mix up values or, of other sizes, abort. Graphs are
    compared when they are built, so nothing is sent if `like`, a tensor of the message, is fake.
    """
    if is_fake(like):
        return
    c10d: Any = torch.distributed.distributed_c10d
    found = c10d._resolve_process_group(group)
    # Where the group also has a transport for the CPU, this does not wait for a GPU.
    device = "cpu" if torch.device("cpu") in getattr(found, "_device_types", ()) else like.device
    own = torch.tensor([zlib.crc32(message.encode())], device=device)
    if len(set(all_gather(own, found.size(), group).tolist())) > 1:
        raise RuntimeError(
            f"the processes read different parameters at the same time, this one {message}: where they are gathered "
            "layer by layer, all must call the same layers in the same order. Call each layer whatever the examples "
            "are, or train and evaluate by fully_sharded(step, mesh, gather='step')"
        )


def names_by_memory(params: Mapping[str, Tensor]) -> Callable[[Tensor], str]:
    """Return a function from a divided tensor, such as a detached parameter, to the parameter's name or the shape."""
    with torch.no_grad():  # otherwise `to_local` is a function of autograd, which torch.func refuses
        names = {local(param).untyped_storage()._cdata: name for name, param in params.items()}
    return lambda shard: names.get(local(shard.detach()).untyped_storage()._cdata, str(tuple(shard.shape)))


def is_shard(value: Any) -> bool:
    """Return whether this is a tensor that is divided among processes."""
    if type(value) is Tensor:
        return False
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the rows that this process holds; a tensor that is not divided, as it is."""
    return tensor.to_local() if is_shard(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole(tensor: Tensor) -> Tensor:
    """Return all rows, which every process must ask for; a tensor that is not divided, as it is."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


class Place(NamedTuple):
    """How a divided tensor lies on its mesh of processes."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def place_of(tensor: Any) -> Place | None:
    """Return how a tensor lies on its mesh; `None` if it is not divided."""
    if not is_shard(tensor):
        return None
    return Place(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())


def placed(own: Tensor, place: Place | None) -> Tensor:
    """Return the divided tensor of which this process has these rows; without a place, the tensor itself."""
    if place is None:
        return own
    mesh, placements, shape, stride = place
    dtensor = sys.modules[_MODULE].DTensor
    return dtensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def divided(tensor: Tensor, place: Place | None) -> Tensor:
    """Return a whole tensor, the same on all processes, in a place: each keeps its rows, and no message is sent."""
    return tensor if place is None else placed(rows_of(tensor, place.mesh), place)


def laid_as(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor with the dtype and strides of another one, and divided among processes as it is."""
    return divided(torch.empty_like(whole(like)).copy_(value), place_of(like))


def rows_of(tensor: Tensor, mesh: Any) -> Tensor:
    """Return the rows of a whole tensor that this process holds on a mesh, copied."""
    start, stop = _span(tensor.shape[0], mesh)
    return tensor[start:stop].clone()


def span_of(place: Place) -> tuple[int, int]:
    """Return the first row that this process holds of a divided tensor, and the row after the last."""
    return _span(place.shape[0], place.mesh)


def _span(num_rows: int, mesh: Any) -> tuple[int, int]:
    size = -(-num_rows // mesh.size(mesh.ndim - 1))
    start = min(size * mesh.get_local_rank(mesh.ndim - 1), num_rows)
    return start, min(start + size, num_rows)


def sum_of_shards(own: Tensor, shards: Sequence[Any]) -> Tensor:
    """Return the sum over the parts of tensors that are divided alike: a plain tensor, by one message."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = shards[0].device_mesh, shards[0].placements
    parts = [Partial("sum") if placement.is_shard() else Replicate() for placement in placements]
    return DTensor.from_local(own, mesh, parts, run_check=False).full_tensor()
