"""Ranks: processes that each compute a part of the batch and reduce the results.

Messages between them use `torch.distributed`, in the functional form that traced code can contain.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.functorch import is_fake, is_transforming
from purecompose._support.scopes import during
from purecompose._support.shards import all_gather, all_reduce, reduce_scatter
from purecompose.core.layout import Layout


class Share(NamedTuple):
    """A rank's part of a batch."""

    batch: Any
    first_example: int
    """Index of its first example in the batch."""
    num_examples: int
    """Number of its examples; 0 for a rank without a part, which computes the first example with weight 0."""


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

    def weigh(self, weight: int | Tensor, flags: Tensor | None = None, *, device: torch.device | None = None) -> Weight:
        """Return this rank's share in means over ranks, and on how many ranks each flag is set.

        Args:
            weight: The weight of this rank, a number or 0-d. If all weights are 0, all ranks have the same share.
            flags: Bool, of any shape; they count on ranks of every weight, and need no separate message.
            device: The device of the message, if `weight` is a number.
        """
        weight = torch.full((), weight, device=device) if not isinstance(weight, Tensor) else weight
        weight = weight.double()
        total, *counts = self.reduced([weight, *([] if flags is None else [flags.double()])], "sum")
        share = torch.where(total > 0, weight / torch.where(total > 0, total, 1), 1 / self.size)
        return Weight(share, total, counts[0] if counts else None)

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
        return all_gather(own.contiguous(), self.size, self.group)

    def scatter_sum(self, own: Tensor) -> Tensor:
        """Return this rank's part of the sum over all ranks, which is cut into equal parts in dimension 0."""
        self._check_plain([own])
        return reduce_scatter(own.contiguous(), self.size, self.group)

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
        return all_reduce(flat, how, self.group)

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


WATCHES: ContextVar[bool] = ContextVar("watches", default=False)
"""True while messages are compared before they are sent, in the first step of its kind."""

_SHARES: ContextVar[list[int] | None] = ContextVar("shares", default=None)


def noting_shares() -> AbstractContextManager[list[int]]:
    """Return a scope that yields a list of the numbers of examples in the shares that are taken in it."""
    return during(_SHARES, [])


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
