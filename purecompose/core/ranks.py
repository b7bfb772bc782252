"""Ranks: processes that each compute a part of the batch, the weight of each part, and messages that reduce results.

Messages between them use `torch.distributed`, in the functional form that traced code can contain.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.device import all_gather, all_reduce, reduce_scatter
from purecompose._support.internals import is_fake, is_transforming
from purecompose.combinations import unsupported
from purecompose.core.context import Cut, Layout


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
        compares: True to compare messages before they are sent, as in the first step of its kind.
    """

    group: str
    rank: int
    size: int
    compares: bool = False

    @staticmethod
    def of(group: Any) -> "Ranks":
        """Return the processes of a `torch.distributed.ProcessGroup`."""
        return Ranks(group.group_name, group.rank(), group.size())

    def comparing(self) -> "Ranks":
        """Return the same processes, which compare messages before they are sent."""
        return replace(self, compares=True)

    def share(self, batch: Any, layout: Layout) -> Share:
        """Return this rank's part: consecutive examples; the sizes of parts differ by one at most."""
        num_examples = layout.num_examples(batch)
        num_parts = min(self.size, num_examples)
        if self.rank >= num_parts:
            return Share(layout.split(batch, num_examples)[0], 0, 0)
        parts = layout.split(batch, num_parts)
        sizes = [layout.num_examples(part) for part in parts]
        return Share(parts[self.rank], sum(sizes[: self.rank]), sizes[self.rank])

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
            if self.compares and not is_fake(own[0]):
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
        """Return the text that the first rank gives; all must ask."""
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
            raise unsupported("several processes", "transforms of torch.func and gradients through steps")

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
    """This rank's part of a batch, or a slice of it, within the pass that computes its gradient.

    The loss of a part may count nothing, as if all its targets are ignored. Its examples still reach the losses of
    other ranks, by the statistics that all share. So its gradients, which are those of the other losses, count in full;
    what its own loss makes of them, 0 or NaN, does not.

    Attributes:
        start: Index of the first example in the batch of all ranks, of `total` examples.
        size: Number of examples; 0 for a rank without a part.
        is_cut_alike: True if all ranks cut their parts into equally many slices, since each sends messages.
        weight: That of this rank's loss; known after the loss.
    """

    def __init__(
        self,
        ranks: Ranks,
        share: Share,
        total: int,
        batch: Any,
        device: torch.device,
        *,
        shares_statistics: bool,
        is_cut_alike: bool = False,
    ) -> None:
        self.ranks: Ranks = ranks
        self.start: int = share.first_example
        self.size: int = share.num_examples
        self.total: int = total
        self.batch: Any = batch
        self.shares_statistics: bool = shares_statistics
        self.is_cut_alike: bool = is_cut_alike
        self.weight: int | Tensor = self.size
        self._share, self._device = share, device
        self._known: Weight | None = None

    @property
    def is_empty(self) -> bool:
        """True if this rank has no examples, and what it computes does not count."""
        return self.size == 0

    def of_slice(self, num_examples: int) -> "SharedPart":
        share = self._share._replace(num_examples=0 if self.is_empty else num_examples)
        return SharedPart(self.ranks, share, self.total, self.batch, self._device, shares_statistics=False)

    def num_slices(self, cut: Cut, num_examples: int) -> int:
        """Return into how many slices this rank cuts its part."""
        if not self.is_cut_alike:
            return cut.num_slices(num_examples)
        fewest, most = self.total // self.ranks.size, -(-self.total // self.ranks.size)
        return min(cut.num_slices(most), max(fewest, 1))

    def sum(self, own: Tensor) -> Tensor:
        return self.ranks.reduced([own], "sum")[0]

    def gradient_share(self) -> Tensor:
        """Return the number by which this rank's gradients are multiplied before they are summed, 0-d, not 0."""
        share = self.weighed().share
        return torch.where(share > 0, share, 1)

    def counted(self, grad: Tensor) -> Tensor:
        """Return a gradient, without what comes from a loss that does not count."""
        if self.is_empty:  # as a function of the gradient, on which later messages depend on the other ranks as well
            return torch.where(torch.full((), False, device=grad.device), grad, 0)
        return _counted(grad, self.weighed().share)

    def weighed(self) -> Weight:
        """Return the weight of this rank's loss among those of all, which are asked for once."""
        if self._known is None:
            self._known = self.ranks.weigh(self.weight, device=self._device)
        return self._known


def scaled(tensors: Sequence[Tensor], share: Tensor) -> list[Tensor]:
    """Return a rank's part of a mean over ranks: the tensors times its share, and 0 for NaN whose share is 0."""
    return [torch.where(share > 0, tensor * share, 0).to(tensor.dtype) for tensor in tensors]


def scaled_with_statistics(grads: Sequence[Tensor], share: Tensor) -> list[Tensor]:
    """Return this rank's part of the sum of gradients, if its examples reach other ranks' losses; see `SharedPart`."""
    factor = torch.where(share > 0, share, 1)
    return [(_counted(grad, share) * factor).to(grad.dtype) for grad in grads]


def _counted(grad: Tensor, share: Tensor) -> Tensor:
    """Return a gradient with 0 for NaN, if the rank's own loss has no share in the mean; see `SharedPart`."""
    return torch.where(share > 0, grad, grad.nan_to_num(0.0, 0.0, 0.0))


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
