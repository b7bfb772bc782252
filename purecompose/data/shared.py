"""Batches that several processes read together: each reads some of the rows, and all have the whole batch."""

import copy
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import tee
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.checks import shown
from purecompose._support.shards import all_gather
from purecompose.data.map_style import Loader
from purecompose.data.reader import Reader
from purecompose.data.samples import Request


def shared(loader: Loader, mesh: Any = None) -> Loader:
    """Return a loader of which each of several processes reads some rows of each batch.

    The rows are put together by one message, so that all processes have the whole batch, with the same bits as if each
    had read all of it: the steps of `data_parallel` and `fully_sharded` take whole batches, which MixUp and other
    methods need. All processes must iterate in the same way.

    Args:
        loader: A loader from `data.loader` without `collate`, which would see a part of the batch. Its samples consist
            of numbers and tensors, which have one shape in all samples.
        mesh: A `torch.distributed.DeviceMesh` or a process group; by default all processes. Rows are sent by gloo, on
            the CPU, in a process group of its own; so all these processes must call `shared`.

    Returns:
        A `Loader`, whose batches are on the CPU. In a single process it is `loader` itself.

    Raises:
        TypeError: `loader` is of another kind, or `mesh` is neither a mesh nor a process group.
        ValueError: The loader has a function `collate`, or is shared already. While iterating: samples have different
            shapes or dtypes in different processes, or contain something other than numbers and tensors.
        RuntimeError: There is no process group. While iterating: another process has failed to read its rows.

    Example:
        >>> import tempfile
        >>> from purecompose.data import loader
        >>> where = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        >>> list(shared(loader([10.0, 20.0, 30.0], 2)))
        [tensor([10., 20.], dtype=torch.float64), tensor([30.], dtype=torch.float64)]
        >>> dist.destroy_process_group()
    """
    if not isinstance(loader, Loader):
        raise TypeError(
            f"data.shared: expected a loader from data.loader, whose draws belong to the samples, got {shown(loader)}; "
            "data.arrays are in memory already, and other data must be read by each process"
        )
    if isinstance(loader.reader, _SharedReader):
        raise ValueError("data.shared: the processes share the loader already")
    if loader.samples.collate is not None:
        raise ValueError(
            "data.shared: the loader has a function collate, which would see a part of each batch in each process: "
            "give samples one form by transform"
        )
    group = _group_of(mesh)
    if group.size == 1:
        return loader
    divided = copy.copy(loader)
    divided.reader = cast(Reader, _SharedReader(loader.reader, group))
    return divided


class _Group(NamedTuple):
    """The processes that share a loader, and this process's rank among them."""

    name: str
    rank: int
    size: int

    def gather(self, own: Tensor) -> Tensor:
        """Return the tensors of all processes, of the same size, one after the other."""
        return all_gather(own, self.size, self.name)


def _group_of(mesh: Any) -> _Group:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "data.shared: there is no process group: start the processes by torchrun, and call "
            "torch.distributed.init_process_group() in each"
        )
    if mesh is None:
        members = list(range(dist.get_world_size()))
    elif hasattr(mesh, "mesh"):
        members = mesh.mesh.flatten().tolist()
    elif isinstance(mesh, dist.ProcessGroup):
        members = dist.get_process_group_ranks(mesh)
    else:
        raise TypeError(f"data.shared: expected a DeviceMesh or a process group, got {shown(mesh)}")
    if dist.get_rank() not in members:
        raise ValueError("data.shared: this process is not in the mesh")
    group: Any = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return _Group(group.group_name, group.rank(), group.size())


class _SharedReader:
    """Reader of rows that puts them together with those of other processes; the interface is that of `Reader`."""

    def __init__(self, reader: Any, group: _Group) -> None:
        self._reader, self._group = reader, group

    def read(self, requests: Iterable[Request], seed: int = 0) -> Generator[Any, None, None]:
        wanted, whole = tee(requests)
        with closing(self._reader.read(map(self._own, wanted), seed)) as rows:
            for request in whole:
                yield self._together(rows, len(request.indices))

    def close(self) -> None:
        self._reader.close()

    def _own(self, request: Request) -> Request:
        """Return the request of this process's rows; without any, it reads the first one, for its form."""
        start, stop = _bounds(len(request.indices), self._group.size)[self._group.rank]
        return request._replace(indices=request.indices[start:stop] or request.indices[:1])

    def _together(self, rows: Iterator[Any], num_examples: int) -> Any:
        failure, part, form = None, None, ""
        try:
            part = next(rows)
            form = _form(part)
        except Exception as error:
            failure = error
        self._check(form, failure)
        leaves, spec = tree.flatten(part)
        bounds = _bounds(num_examples, self._group.size)
        counts = [stop - start for start, stop in bounds]
        own = torch.cat([_as_bytes(leaf, counts[self._group.rank], counts[0]) for leaf in leaves])
        received = self._group.gather(own).view(self._group.size, -1)
        columns = received.split([counts[0] * _row_bytes(leaf) for leaf in leaves], dim=1)
        whole = [
            torch.cat([_as_rows(column[rank], count, leaf) for rank, count in enumerate(counts)])
            for column, leaf in zip(columns, leaves, strict=True)
        ]
        return tree.unflatten(spec, whole)

    def _check(self, form: str, failure: Exception | None) -> None:
        """Raise in all processes if one has failed, or if their rows have different forms."""
        code = 0 if failure is not None else 1 + zlib.crc32(form.encode())
        codes = self._group.gather(torch.tensor([code])).tolist()
        if failure is not None:
            raise failure
        if 0 in codes:
            raise RuntimeError(f"data.shared: process {codes.index(0)} could not read its rows: see its error")
        if len({*codes}) > 1:
            raise ValueError(
                f"data.shared: the processes have read rows of different forms; process {self._group.rank} has {form}. "
                "All samples must have one shape: pad them to one length by transform"
            )


def _bounds(num_examples: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return the first row of each process, and the row after its last; the first process has the most."""
    num_parts = min(num_examples, num_ranks)
    bounds = batches.bounds(num_examples, num_parts) + [num_examples] * (num_ranks - num_parts)
    return list(zip(bounds, bounds[1:], strict=False))


def _form(rows: Any) -> str:
    leaves, spec = tree.flatten(rows)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ValueError(f"data.shared: expected samples of numbers and tensors, got {shown(leaf)} in a batch")
    return f"{spec} {[(str(leaf.dtype), tuple(leaf.shape[1:])) for leaf in leaves]}"


def _row_bytes(rows: Tensor) -> int:
    return rows[:1].numel() * rows.element_size()


def _as_bytes(rows: Tensor, num_rows: int, most: int) -> Tensor:
    """Return the bytes of the first `num_rows` rows, uint8 of one dimension, with zeros up to `most` rows."""
    found = rows[:num_rows].cpu().contiguous().view(-1).view(torch.uint8)
    return torch.cat([found, found.new_zeros((most - num_rows) * _row_bytes(rows))])


def _as_rows(data: Tensor, num_rows: int, like: Tensor) -> Tensor:
    """Return the rows whose bytes these are, of the dtype and shape of another tensor's rows."""
    own = data[: num_rows * _row_bytes(like)].clone()  # aligned for the dtype
    return own.view(like.dtype).view(num_rows, *like.shape[1:])
