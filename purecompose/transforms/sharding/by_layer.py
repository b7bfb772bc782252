"""Passes over a slice of the batch in which the parameters of one layer at a time are whole.

A function that reads divided parameters is given whole ones. The graph of the backward pass keeps a process's rows in
their place and gathers them again. Gradients are summed over the processes and divided as soon as they are complete.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from purecompose._support.scopes import during
from purecompose._support.shards import check_alike, is_shard, local, names_by_memory
from purecompose.core.operation import Carry, Operation, Purpose
from purecompose.core.shared_part import SHARED_PART, SharedPart, scaled, scaled_with_statistics
from purecompose.nn.gathering import GatheredOnUse
from purecompose.transforms.rank_results import with_means
from purecompose.transforms.sharding.gathering import Placing


def by_layer(body: Operation, placing: Placing, *, shares_statistics: bool) -> Operation:
    """Return a body of slices that runs on divided parameters, and whose results are means over all processes.

    Args:
        body: The body, whose gradients are of this process's slice.
        placing: How parameters are divided.
        shares_statistics: True if batch normalisation may use the statistics of all processes; see `SharedPart`.
    """

    def run(carry: Carry, purpose: Purpose) -> Carry:
        state, whole_part = carry.state, SHARED_PART.get()
        assert whole_part is not None, "runs within Shared"
        part = whole_part if shares_statistics else whole_part.of_slice(state.num_examples)
        has_shared_statistics = shares_statistics and state.model.skeleton(train=True).has_batch_norms
        running = _Pass(placing, part, state.params, has_shared_statistics=has_shared_statistics)
        with during(SHARED_PART, part), running.running():
            end = body(carry, purpose)
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

    def whole(self, shard: Tensor) -> Tensor:
        """Return all rows of a divided tensor."""
        shard = shard.detach()
        rows = self.placing.gathered({"": shard})[""]
        self._gathered[StorageWeakRef(rows.untyped_storage())] = shard
        return rows

    def summed(self, grad: Tensor, shard: Tensor) -> Tensor:
        """Return the mean over processes of a gradient, divided like its parameter."""
        scale = scaled_with_statistics if self.has_shared_statistics and not self.part.is_empty else scaled
        (own,) = scale([grad], self.part.weighed().share)
        return self.placing.sum_gradients({"": own}, {"": shard})[""]

    def _check(self, shards: list[Tensor]) -> None:
        words = f"reads {', '.join(map(self._name_of, shards))}" if shards else "has ended its pass"
        check_alike(words, self.part.ranks.group, self._like)

    def _differentiable(self, shard: Tensor) -> Tensor:
        if torch.is_grad_enabled() and shard.requires_grad:
            return _Gather.apply(shard, self)  # pyright: ignore[reportReturnType]
        return self.whole(shard)

    def _pack(self, tensor: Tensor) -> Any:
        shard = self._gathered.get(StorageWeakRef(tensor.untyped_storage()))
        return tensor if shard is None else _Saved(shard, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        self._check([saved.shard])
        rows = self.whole(saved.shard)
        if (saved.shape, saved.stride) == (rows.shape, rows.stride()):
            return rows
        if rows.ndim == 2 and (saved.shape, saved.stride) == (rows.t().shape, rows.t().stride()):
            return rows.t()
        return rows.as_strided(saved.shape, saved.stride, saved.offset)


class _Gather(torch.autograd.Function):
    """All rows of a divided tensor; the gradient is summed over the processes and divided."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, run: _Pass) -> Tensor:
        ctx.run, ctx.shard = run, shard.detach()
        return run.whole(shard)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.run.summed(grads[0], ctx.shard), None
