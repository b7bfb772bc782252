"""Ranks: processes that compute a part of the batch each, and put together what they find.

Messages between them are those of `torch.distributed`, in the form that traced code can hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._functorch import is_transforming


__all__ = ["Ranks", "Share", "Sharing"]

Sharing: TypeAlias = Literal["all", "own", "none"]
"""What a gradient is of: the means over all ranks' parts of the batch; this rank's part alone; or the batch undivided,
which every rank computes for itself."""


class Share(NamedTuple):
    """A rank's part of a batch."""

    batch: Any
    first_example: int
    """Where it begins in the batch."""
    num_examples: int
    """0 for a rank to which nothing falls: it computes the first example, for the form, and that counts nothing."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a group, and which of them this is.

    Attributes:
        group: The name of the process group, by which traced code finds it.
        rank: This process, from 0.
        size: How many they are.
    """

    group: str
    rank: int
    size: int

    def share(self, batch: Any, key: batches.Key | None) -> Share:
        """This rank's part: consecutive examples, as many as the others have, or one more."""
        num_parts = min(self.size, batches.num_examples(batch, key))
        if self.rank >= num_parts:
            return Share(batches.split(batch, batches.num_examples(batch, key), key)[0], 0, 0)
        parts = batches.split(batch, num_parts, key)
        sizes = [batches.num_examples(part, key) for part in parts]
        return Share(parts[self.rank], sum(sizes[: self.rank]), sizes[self.rank])

    def means(self, tensors: Sequence[Tensor], weight: int | Tensor) -> list[Tensor]:
        """The means over ranks, element by element.

        Args:
            tensors: Floating; the same forms on all ranks.
            weight: What this rank counts, a number or 0-d. What one with 0 has is not looked at, be it NaN, unless all
                have.
        """
        if not tensors:
            return []
        weight = torch.full((), weight, device=tensors[0].device) if not isinstance(weight, Tensor) else weight
        weight = weight.double()
        (total,) = self.sums([weight])
        share = weight / torch.where(total > 0, total, 1)

        def part(tensor: Tensor) -> Tensor:
            return torch.where(weight > 0, tensor * share, torch.where(total > 0, 0, tensor)).to(tensor.dtype)

        return self.sums([part(tensor) for tensor in tensors])

    def with_changes(self, before: Any, after: Any, *, counts: bool) -> Any:
        """A tree of tensors that has changed as on all ranks together: numbers by the sum of what was added to them.

        A bool that has changed on any of them is changed.

        Args:
            before: The same on all ranks.
            after: This rank's. In another form than before it stays as it is.
            counts: Whether this rank's changes do.
        """
        old, spec = tree.flatten(before)
        new, new_spec = tree.flatten(after)
        if spec != new_spec:
            return after
        changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b]
        is_bool = [old[i].dtype is torch.bool for i in changed]
        added = [
            (new[i] ^ old[i]).int() if flips else new[i] - old[i] for i, flips in zip(changed, is_bool, strict=True)
        ]
        sums = self.sums([one if counts else torch.zeros_like(one) for one in added])
        for i, flips, total in zip(changed, is_bool, sums, strict=True):
            new[i] = old[i] ^ (total > 0) if flips else old[i] + total
        return tree.unflatten(spec, new)

    def sums(self, tensors: Sequence[Tensor], how: Literal["sum", "min", "max"] = "sum") -> list[Tensor]:
        """The sums over all ranks, element by element, the same bits on each; one message for each dtype.

        Raises:
            RuntimeError: Somebody differentiates through it, or maps it.
        """
        if is_transforming() or any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                "data_parallel: a step of several processes can be neither differentiated nor mapped, since no "
                "gradient goes through their messages; do that to the step itself, in one process"
            )
        found: dict[int, Tensor] = {}
        for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
            own = [i for i, tensor in enumerate(tensors) if (tensor.dtype, tensor.device) == kind]
            flat = torch.cat([tensors[i].reshape(-1) for i in own])
            # torch.distributed.all_reduce writes into what it is given, which no graph of pure functions can hold.
            sent = torch.ops._c10d_functional.all_reduce(flat, how, self.group)
            parts = torch.ops._c10d_functional.wait_tensor(sent).split([tensors[i].numel() for i in own])
            found |= {i: part.reshape(tensors[i].shape) for i, part in zip(own, parts, strict=True)}
        return [found[i] for i in range(len(tensors))]
