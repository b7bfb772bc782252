"""The part of a batch that one of several ranks computes, and the weight of its results among those of all ranks."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from purecompose.core.cut import Cut
from purecompose.core.ranks import Ranks, Weight


Sharing: TypeAlias = Literal["all", "own", "none"]
"""Part of the batch that a gradient is of: the mean over all ranks' parts; this rank's part only; or the whole batch,
computed by every rank for itself."""


class Shard(NamedTuple):
    """The examples of a rank's share, and the ranks that have the others."""

    ranks: Ranks
    start: int
    """Index of the first example in the batch of all ranks."""
    size: int
    """Number of examples; 0 for a rank without a share."""
    total: int
    """Number of examples in the batch."""
    batch: Any
    """The batch of all ranks."""
    is_cut_alike: bool = False
    """True if all ranks cut their shares into equally many slices, because each slice sends messages."""

    def num_slices(self, cut: Cut, num_examples: int) -> int:
        """Return into how many slices this rank cuts its share."""
        if not self.is_cut_alike:
            return cut.num_slices(num_examples)
        fewest, most = self.total // self.ranks.size, -(-self.total // self.ranks.size)
        return min(cut.num_slices(most), max(fewest, 1))


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
        return _counted(grad, self.weighed().share)

    def weighed(self) -> Weight:
        """Return the weight of this rank's loss among those of all, which are asked for once."""
        if self._known is None:
            self._known = self.ranks.weigh(self.weight, device=self._device)
        return self._known


SHARED_PART: ContextVar[SharedPart | None] = ContextVar("part", default=None)
"""This rank's part in the pass that is running, if the pass needs its weight before the gradient is complete."""


def scaled(tensors: Sequence[Tensor], share: Tensor) -> list[Tensor]:
    """Return a rank's part of a mean over ranks: the tensors times its share, and 0 for NaN whose share is 0."""
    return [torch.where(share > 0, tensor * share, 0).to(tensor.dtype) for tensor in tensors]


def scaled_with_statistics(grads: Sequence[Tensor], share: Tensor) -> list[Tensor]:
    """Return this rank's part of the sum of gradients, if its examples reach other ranks' losses; see `SharedPart`."""
    factor = torch.where(share > 0, share, 1)
    return [(_counted(grad, share) * factor).to(grad.dtype) for grad in grads]


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


def _counted(grad: Tensor, share: Tensor) -> Tensor:
    """Return a gradient with 0 for NaN, if the rank's own loss has no share in the mean; see `SharedPart`."""
    return torch.where(share > 0, grad, grad.nan_to_num(0.0, 0.0, 0.0))
