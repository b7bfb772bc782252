"""Messages of sharded states: parameters are gathered, at once or layer by layer, and gradients summed and divided."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import pad

from purecompose._support.device import check_alike, is_shard, local, names_by_memory, place_of, placed
from purecompose.core.operation import Carry, Operation, Purpose
from purecompose.core.ranks import Ranks, SharedPart, scaled, scaled_with_statistics
from purecompose.nn.network import GatheredOnUse
from purecompose.transforms.rank_results import with_means


@dataclass(frozen=True)
class Placing:
    """How parameters are divided among processes.

    Attributes:
        owners: The processes among which the rows of each parameter are divided.
        copies: The groups of processes that hold the same rows, along the mesh's other dimensions.
        is_by_layer: True if they are gathered layer by layer, and False if all together for each gradient.
    """

    owners: Ranks
    copies: tuple[Ranks, ...] = ()
    is_by_layer: bool = False

    def comparing(self) -> "Placing":
        """Return the same placing, whose processes compare messages before they are sent."""
        return replace(self, owners=self.owners.comparing(), copies=tuple(one.comparing() for one in self.copies))

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors whole, on each process."""
        found: dict[str, Tensor] = dict(tensors)
        shards = {name: tensor for name, tensor in tensors.items() if is_shard(tensor)}
        for names in _messages(shards):
            parts = [_padded(local(shards[name]), self._size(shards[name])) for name in names]
            rows = self.owners.gather(_flat(parts)).view(self.owners.size, -1)
            for name, own in zip(names, rows.split([part.numel() for part in parts], dim=1), strict=True):
                shape = shards[name].shape
                found[name] = own.reshape(-1, *shape[1:])[: shape[0]]
        return found

    def sum_gradients(self, parts: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over all processes, each divided like the parameter of its name."""
        # In the order of the backward pass, in which a compiled step sends them.
        shards = {name: parts[name] for name in reversed([*parts]) if is_shard(like[name])}
        found: dict[str, Tensor] = {name: part for name, part in parts.items() if name not in shards}
        for group in (self.owners, *self.copies):
            found |= zip(found, group.reduced([*found.values()], "sum"), strict=True)
        own: dict[str, Tensor] = {}
        for names in _messages(shards):
            rows = [_padded(shards[name], self._size(like[name]) * self.owners.size) for name in names]
            flat = torch.cat([part.reshape(self.owners.size, -1) for part in rows], dim=1) if len(rows) > 1 else rows[0]
            sums = self.owners.scatter_sum(flat.reshape(-1))
            sizes = [part.numel() // self.owners.size for part in rows]
            for name, part in zip(names, sums.split(sizes), strict=True):
                own[name] = part.reshape(-1, *like[name].shape[1:])
        for group in self.copies:  # of equally many rows in all processes, whose messages have to be the same
            own |= zip(own, group.reduced([*own.values()], "sum"), strict=True)
        for name, part in own.items():
            found[name] = placed(part[: local(like[name]).shape[0]], place_of(like[name]))
        return {name: found[name] for name in parts}

    def _size(self, tensor: Tensor) -> int:
        """Return how many rows each process holds, but for the last ones, which may hold fewer."""
        return -(-tensor.shape[0] // self.owners.size)


_LARGE = 2**20
"""Bytes of a tensor for which a message of its own costs less than copying it into a common one."""


def _messages(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of the tensors that travel together: each large one by itself, the small ones of a dtype."""
    small: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() >= _LARGE:
            yield [name]
        else:
            small.setdefault(tensor.dtype, []).append(name)
    yield from small.values()


def _padded(tensor: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - tensor.shape[0]
    return pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, missing]) if missing else tensor


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)


# Passes over a slice of the batch in which the parameters of one layer at a time are whole.
#
# A function that reads divided parameters is given whole ones. The graph of the backward pass keeps a process's rows in
# their place and gathers them again. Gradients are summed over the processes and divided as soon as they are complete.


def by_layer(body: Operation, placing: Placing, *, shares_statistics: bool) -> Operation:
    """Return a body of slices that runs on divided parameters, and whose results are means over all processes."""

    def run(carry: Carry, purpose: Purpose) -> Carry:
        state, whole_part = carry.state, purpose.part
        assert whole_part is not None, "runs within Shared"
        part = whole_part if shares_statistics else whole_part.of_slice(state.num_examples)
        has_shared_statistics = shares_statistics and state.model.skeleton(train=True).has_batch_norms
        running = _Pass(placing, part, state.params, has_shared_statistics=has_shared_statistics)
        with running.running():
            end = body(carry, purpose._replace(part=part))
        after = end.state
        if after.grads is None:
            return end
        share, total, _ = part.weighed()
        plain = {name: grad for name, grad in after.grads.items() if not is_shard(grad)}
        return Carry(with_means(state, after, part.ranks, share, plain), end.used, total)

    return run


class _Saved(NamedTuple):
    """A view of gathered rows, as the graph of the backward pass keeps it."""

    shard: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Pass:
    """A forward and backward pass."""

    def __init__(
        self, placing: Placing, part: SharedPart, params: Mapping[str, Tensor], *, has_shared_statistics: bool
    ) -> None:
        self.placing, self.part, self.has_shared_statistics = placing, part, has_shared_statistics
        self._gathered: dict[StorageWeakRef, Tensor] = {}
        """The shards by the memory of their gathered rows; a reference keeps the memory's number from being reused."""
        self._name_of, self._like = names_by_memory(params), local(next(iter(params.values())).detach())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a scope in which divided parameters are gathered on use."""
        gathered = GatheredOnUse(self._differentiable, self._check, only_recorded=True)
        with gathered, torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._check([])

    def whole(self, shards: Iterable[Tensor]) -> list[Tensor]:
        """Return all rows of divided tensors; small ones travel together."""
        own = {str(place): shard.detach() for place, shard in enumerate(shards)}
        found = self.placing.gathered(own)
        for place, rows in found.items():
            if len(own) > 1 and rows.untyped_storage().nbytes() != rows.numel() * rows.element_size():
                rows = found[place] = rows.clone(memory_format=torch.contiguous_format)  # it was part of a message
            self._gathered[StorageWeakRef(rows.untyped_storage())] = own[place]
        return [*found.values()]

    def summed(self, grads: Mapping[str, Tensor], shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means over processes of gradients, each divided like its parameter."""
        scale = scaled_with_statistics if self.has_shared_statistics and not self.part.is_empty else scaled
        own = dict(zip(grads, scale([*grads.values()], self.part.weighed().share), strict=True))
        return self.placing.sum_gradients(own, shards)

    def _check(self, shards: list[Tensor]) -> None:
        words = f"reads {', '.join(map(self._name_of, shards))}" if shards else "has ended its pass"
        check_alike(words, self.part.ranks.group, self._like)

    def _differentiable(self, shards: list[Tensor]) -> Iterable[Tensor]:
        if torch.is_grad_enabled() and any(shard.requires_grad for shard in shards):
            return _Gather.apply(self, *shards)  # pyright: ignore[reportReturnType]
        return self.whole(shards)

    def _pack(self, tensor: Tensor) -> Any:
        shard = self._gathered.get(StorageWeakRef(tensor.untyped_storage()))
        return tensor if shard is None else _Saved(shard, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        self._check([saved.shard])
        (rows,) = self.whole([saved.shard])
        if (saved.shape, saved.stride) == (rows.shape, rows.stride()):
            return rows
        if rows.ndim == 2 and (saved.shape, saved.stride) == (rows.t().shape, rows.t().stride()):
            return rows.t()
        return rows.as_strided(saved.shape, saved.stride, saved.offset)


class _Gather(torch.autograd.Function):
    """All rows of divided tensors; their gradients are summed over the processes and divided."""

    @staticmethod
    def forward(ctx: Any, run: _Pass, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.shards = run, {str(place): shard.detach() for place, shard in enumerate(shards)}
        rows = run.whole(shards)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(row for row, needs in zip(rows, ctx.needs_input_grad[1:], strict=True) if not needs)
        )
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = {place: grad for place, grad in zip(ctx.shards, grads, strict=True) if grad is not None}
        own = ctx.run.summed(needed, ctx.shards) if needed else {}
        return None, *(own.get(place) for place in ctx.shards)
