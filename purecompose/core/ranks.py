"""Ranks: processes that each compute a part of the batch and reduce the results.

Messages between them use `torch.distributed`, in the functional form that traced code can contain.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.functorch import is_fake, is_transforming
from purecompose._support.shards import is_shard, local
from purecompose.core.cut import Cut
from purecompose.core.layout import Layout


__all__ = [
    "SHARED_PART",
    "WATCHES",
    "Ranks",
    "Regrad",
    "Shard",
    "Share",
    "SharedPart",
    "Sharing",
    "counted",
    "noting_shares",
    "scaled",
    "scaled_with_statistics",
]

Sharing: TypeAlias = Literal["all", "own", "none"]
"""Part of the batch that a gradient is of: the mean over all ranks' parts; this rank's part only; or the whole batch,
computed by every rank for itself."""


class Share(NamedTuple):
    """A rank's part of a batch."""

    batch: Any
    first_example: int
    """Index of its first example in the batch."""
    num_examples: int
    """Number of its examples; 0 for a rank without a part, which computes the first example with weight 0."""


class Shard(NamedTuple):
    """The examples of a rank's share, and the ranks that have the others."""

    ranks: "Ranks"
    start: int
    """Index of the first example in the batch of all ranks."""
    size: int
    """Number of examples; 0 for a rank without a share."""
    total: int
    """Number of examples in the batch."""
    is_cut_alike: bool = False
    """True if all ranks cut their shares into equally many slices, because each slice sends messages."""

    def num_slices(self, cut: Cut, num_examples: int) -> int:
        """Return into how many slices this rank cuts its share."""
        if not self.is_cut_alike:
            return cut.num_slices(num_examples)
        fewest, most = self.total // self.ranks.size, -(-self.total // self.ranks.size)
        return min(cut.num_slices(most), max(fewest, 1))


class Weight(NamedTuple):
    """The weight of a rank in means over ranks."""

    share: Tensor
    """Its share in the sum of all weights, 0-d float64."""
    total: Tensor
    """The sum of all weights, 0-d float64."""
    counts: Tensor | None
    """On how many ranks each flag is set, if flags were given."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a group, and this process's rank among them.

    Attributes:
        group: The name of the process group, by which traced code finds it.
        rank: This process, from 0.
        size: The number of processes.
    """

    group: str
    rank: int
    size: int

    @staticmethod
    def of(group: Any) -> "Ranks":
        """Return the processes of a `torch.distributed.ProcessGroup`."""
        return Ranks(group.group_name, group.rank(), group.size())

    def share(self, batch: Any, layout: Layout) -> Share:
        """Return this rank's part: consecutive examples; the sizes of parts differ by one at most."""
        num_examples = layout.num_examples(batch)
        num_parts = min(self.size, num_examples)
        if self.rank >= num_parts:
            share = Share(layout.split(batch, num_examples)[0], 0, 0)
        else:
            parts = layout.split(batch, num_parts)
            sizes = [layout.num_examples(part) for part in parts]
            share = Share(parts[self.rank], sum(sizes[: self.rank]), sizes[self.rank])
        if (found := _SHARES.get()) is not None:
            found.append(share.num_examples)
        return share

    def means(self, tensors: Sequence[Tensor], weight: int | Tensor) -> list[Tensor]:
        """Return the means over ranks, element by element; see `means_and_count`."""
        return self.means_and_count(tensors, weight, None)[0]

    def means_and_count(
        self, tensors: Sequence[Tensor], weight: int | Tensor, flags: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the means over ranks, element by element, and on how many ranks each flag is set.

        Args:
            tensors: Floating; the same shapes and dtypes on all ranks.
            weight: The weight of this rank, a number or 0-d. Values of a rank with weight 0 are ignored, even NaN,
                unless all weights are 0: then all ranks have the same weight.
            flags: Bool, of any shape; they count on ranks of every weight, and need no separate message.
        """
        share, _, counts = self.weigh(weight, flags, device=tensors[0].device if tensors else None)
        return self.reduced(scaled(tensors, share), "sum"), counts

    def weigh(self, weight: int | Tensor, flags: Tensor | None = None, *, device: torch.device | None = None) -> Weight:
        """Return this rank's share in means over ranks, and on how many ranks each flag is set.

        Args:
            weight: See `means_and_count`.
            flags: See `means_and_count`.
            device: The device of the message, if `weight` is a number.
        """
        weight = torch.full((), weight, device=device) if not isinstance(weight, Tensor) else weight
        weight = weight.double()
        total, *counts = self.reduced([weight, *([] if flags is None else [flags.double()])], "sum")
        share = torch.where(total > 0, weight / torch.where(total > 0, total, 1), 1 / self.size)
        return Weight(share, total, counts[0] if counts else None)

    def with_slots(self, before: Mapping[str, Any], after: Mapping[str, Any], *, counts: bool) -> dict[str, Any]:
        """Return slots with the changes of all ranks: each number changes by the sum of what the ranks added to it.

        A bool changes if it has changed on any rank.

        Args:
            before: The slots before the changes, the same on all ranks.
            after: This rank's slots.
            counts: True if this rank's changes count.
        """
        old, spec = tree.flatten(dict(before))
        new, new_spec = tree.flatten(dict(after))
        if spec != new_spec:
            names = [name for name in {**before, **after} if not _are_alike(before.get(name), after.get(name))]
            raise RuntimeError(
                f"data_parallel: the slots of {', '.join(names)} have another form after AFTER_BACKWARD than before "
                "BEFORE_FORWARD: what is remembered of a part of the batch must be numbers, to which each process adds"
            )
        changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if local(a) is not local(b)]
        if any(is_shard(old[i]) for i in changed):
            paths = [*tree.leaves_with_paths(dict(before))]
            raise RuntimeError(
                f"slots{next(paths[i] for i in changed if is_shard(old[i]))}, of which each process holds some rows, "
                "changed between BEFORE_FORWARD and AFTER_BACKWARD, where each sees its part of the batch: change it "
                "at AFTER_TRAIN_BATCH or later"
            )
        added = [_added(old[i], new[i]) for i in changed]
        sums = self.reduced([one if counts else torch.zeros_like(one) for one in added], "sum")
        for i, total in zip(changed, sums, strict=True):
            flips = old[i].dtype is torch.bool
            new[i] = old[i] ^ (total > 0) if flips else (old[i] + total).to(old[i].dtype)
        return tree.unflatten(spec, new)

    def with_buffers(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], num: int) -> dict[str, Tensor]:
        """Return buffers changed by the mean of what the ranks have added, each weighted by its `num` examples.

        Buffers that are not floating numbers are the maximum over all ranks. Values that no rank has changed stay as
        they were.
        """
        changed = {name: buffer for name, buffer in after.items() if buffer is not before.get(name)}
        floating = [name for name, buffer in changed.items() if buffer.dtype in _FLOATING]
        counts = [name for name, buffer in changed.items() if buffer.dtype in _SENT_AS]
        means = self.means([_added(before[name], changed[name]) for name in floating], num)
        for name, added in zip(floating, means, strict=True):
            changed[name] = torch.where(added == 0, before[name], before[name] + added)
        greatest = self.reduced([changed[name].to(_SENT_AS[changed[name].dtype]) for name in counts], "max")
        changed |= {name: most.to(changed[name].dtype) for name, most in zip(counts, greatest, strict=True)}
        return {**after, **changed}

    def reduced(self, tensors: Iterable[Tensor], how: Literal["sum", "min", "max"]) -> list[Tensor]:
        """Return the tensors reduced over all ranks, element by element and bit for bit the same on each.

        They are sent in buckets: consecutive tensors of one dtype and device, together of a bounded size. What an
        iterator yields is not kept in memory for longer than its bucket needs it.
        """
        found: dict[int, Tensor] = {}
        for bucket in _buckets(tensors):
            own = [*bucket.values()]
            if WATCHES.get() and not is_fake(own[0]):
                self._check_alike(own)
            found |= zip(bucket, self.exchange(own, how), strict=True)
        return [found[place] for place in range(len(found))]

    def gather(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, of the same shape and dtype on each, one after the other in dimension 0."""
        self._check_plain([own])
        sent = torch.ops._c10d_functional.all_gather_into_tensor(own.contiguous(), self.size, self.group)
        return torch.ops._c10d_functional.wait_tensor(sent)

    def scatter_sum(self, own: Tensor) -> Tensor:
        """Return this rank's part of the sum over all ranks, which is cut into equal parts in dimension 0."""
        self._check_plain([own])
        sent = torch.ops._c10d_functional.reduce_scatter_tensor(own.contiguous(), "sum", self.size, self.group)
        return torch.ops._c10d_functional.wait_tensor(sent)

    def agree(self, numbers: Sequence[Tensor]) -> list[bool]:
        """Return for each of these numbers, 0-d int64, whether it is the same on all ranks."""
        own = torch.stack(list(numbers))
        least, most = (self.exchange([own], how)[0] for how in ("min", "max"))
        return (least == most).tolist()

    def word_of_first(self, word: str, device: torch.device) -> str:
        """Return the text that the first rank gives; all must ask.

        Args:
            word: This rank's text; only that of the first rank is used.
            device: The device of the messages.
        """
        data = list(word.encode()) if self.rank == 0 else []
        (length,) = self.exchange([torch.tensor(len(data), device=device)], "sum")
        own = torch.tensor(data or [0] * int(length), dtype=torch.int64, device=device)
        return bytes(self.exchange([own], "sum")[0].tolist()).decode() if length else ""

    def exchange(self, tensors: Sequence[Tensor], how: Literal["sum", "min", "max"]) -> list[Tensor]:
        """Reduce tensors of one dtype and device in one message; they must have the same shapes on all ranks."""
        self._check_plain(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
        parts = self._sum(flat, how).split([tensor.numel() for tensor in tensors])
        # A number outlives the step, and must not keep the whole message alive.
        return [
            part.reshape(tensor.shape) if tensor.ndim else part.clone().reshape(())
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def _sum(self, flat: Tensor, how: str) -> Tensor:
        if flat.is_complex():
            return torch.view_as_complex(self._sum(torch.view_as_real(flat.resolve_conj()), how))
        # torch.distributed.all_reduce writes into its argument, which a graph of pure functions cannot contain.
        sent = torch.ops._c10d_functional.all_reduce(flat, how, self.group)
        return torch.ops._c10d_functional.wait_tensor(sent)

    def _check_plain(self, tensors: Sequence[Tensor]) -> None:
        if is_transforming() or any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                "a step of several processes can be neither differentiated nor mapped, since no gradient goes through "
                "their messages; do that to the step itself, in one process"
            )

    def _check_alike(self, tensors: Sequence[Tensor]) -> None:
        forms = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
        digest = torch.tensor(zlib.crc32(repr(forms).encode()), device=tensors[0].device)
        if not all(self.agree([digest])):
            shown = ", ".join(map(tree.describe, tensors[:8])) + (", ..." if len(tensors) > 8 else "")
            raise RuntimeError(
                f"data_parallel: the processes would send different messages; this one, {self.rank}, has {shown}. "
                "Which metrics and slots there are must not depend on the part of the batch at hand"
            )


class SharedPart:
    """This rank's part of a batch, or a slice of it, within the pass that computes its gradient; see `SharedBatch`.

    The loss of a part may count nothing, as if all its targets are ignored. Its examples still reach the losses of
    other ranks, by the statistics that all share. So its gradients, which are those of the other losses, count in full;
    what its own loss makes of them, 0 or NaN, does not.
    """

    def __init__(self, ranks: Ranks, num_examples: int, device: torch.device) -> None:
        self.ranks: Ranks = ranks
        self.is_empty: bool = num_examples == 0
        self.weight = num_examples
        self._device = device
        self._known: Weight | None = None

    weight: int | Tensor
    """The weight of this rank's loss; known after the loss."""

    def of_slice(self, num_examples: int) -> "SharedPart":
        """Return a slice of this part."""
        return SharedPart(self.ranks, 0 if self.is_empty else num_examples, self._device)

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return self.ranks.reduced([own], "sum")[0]

    def gradient_share(self) -> Tensor:
        """Return the number by which this rank's gradients are multiplied before they are summed, 0-d, not 0."""
        share = self.weighed().share
        return torch.where(share > 0, share, 1)

    def counted(self, grad: Tensor) -> Tensor:
        """Return a gradient, without what comes from a loss that does not count."""
        if self.is_empty:  # as a function of the gradient, on which later messages depend on the other ranks as well
            return torch.where(torch.full((), False, device=grad.device), grad, 0)
        return counted(grad, self.weighed().share)

    def weighed(self) -> Weight:
        """Return the weight of this rank's loss among those of all, which are asked for once."""
        if self._known is None:
            self._known = self.ranks.weigh(self.weight, device=self._device)
        return self._known


SHARED_PART: ContextVar[SharedPart | None] = ContextVar("part", default=None)
"""This rank's part in the pass that is running, if the pass needs its weight before the gradient is complete."""


def counted(grad: Tensor, share: Tensor) -> Tensor:
    """Return a gradient with 0 for NaN, if the rank's own loss has no share in the mean; see `SharedPart`."""
    return torch.where(share > 0, grad, grad.nan_to_num(0.0, 0.0, 0.0))


class Regrad(Protocol):
    """The part of the running step that computes the gradient; see `State.gradient`."""

    ranks: Ranks | None
    """The processes that share its batch, if there are several."""

    def __call__(self, params: dict[str, Tensor], sharing: Sharing = "all", /) -> tuple[dict[str, Tensor], Tensor]: ...

    def gradients(
        self, of: Sequence[Callable[..., Tensor]], params: dict[str, Tensor], sharing: Sharing
    ) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return the gradients and the loss of each of these losses, in place of the state's own."""
        ...


_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_SENT_AS = {torch.bool: torch.uint8, torch.int16: torch.int32} | {
    dtype: dtype for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64)
}
"""Dtypes in which tensors that are not floating are sent, by their own dtype; buffers of other dtypes are not sent."""

WATCHES: ContextVar[bool] = ContextVar("watches", default=False)
"""True while messages are compared before they are sent, in the first step of its kind."""


_SHARES: ContextVar[list[int] | None] = ContextVar("shares", default=None)


@contextmanager
def noting_shares() -> Iterator[list[int]]:
    """Return a scope that yields a list of the numbers of examples in the shares that are taken in it."""
    found: list[int] = []
    token = _SHARES.set(found)
    try:
        yield found
    finally:
        _SHARES.reset(token)


_BUCKET = 25 * 2**20
"""Largest number of bytes of tensors that are sent together, as in PyTorch's DDP; larger ones are sent separately."""


def _buckets(tensors: Iterable[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Yield consecutive tensors of one dtype and device that are sent together, by their places."""
    filling: dict[Any, dict[int, Tensor]] = {}
    sizes: dict[Any, int] = {}
    for place, tensor in enumerate(tensors):
        kind, num_bytes = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        if kind in filling and sizes[kind] + num_bytes > _BUCKET:
            yield filling.pop(kind)
        if kind not in filling:
            filling[kind], sizes[kind] = {}, 0
        filling[kind][place] = tensor
        sizes[kind] += num_bytes
    for kind in [*filling]:
        yield filling.pop(kind)


def scaled(tensors: Sequence[Tensor], share: Tensor) -> list[Tensor]:
    """Return a rank's part of a mean over ranks: the tensors times its share, and 0 for NaN whose share is 0."""
    return [torch.where(share > 0, tensor * share, 0).to(tensor.dtype) for tensor in tensors]


def scaled_with_statistics(grads: Sequence[Tensor], share: Tensor) -> list[Tensor]:
    """Return this rank's part of the sum of gradients, if its examples reach other ranks' losses; see `SharedPart`."""
    factor = torch.where(share > 0, share, 1)
    return [(counted(grad, share) * factor).to(grad.dtype) for grad in grads]


def _added(old: Tensor, new: Tensor) -> Tensor:
    """Return the change from old to new: 0 where they are equal, infinities included; 1 for a bool that differs."""
    if old.dtype is torch.bool:
        return (old ^ new).int()
    added = torch.where(new == old, 0, new - old)
    return added.to(_SENT_AS.get(added.dtype, added.dtype))


def _are_alike(first: Any, second: Any) -> bool:
    return tree.structure(first) == tree.structure(second)
