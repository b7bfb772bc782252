"""Reductions of losses to a mean or a sum."""

import torch
from torch import Tensor


def mean_of(total: Tensor, count: int | Tensor) -> Tensor:
    """Return total / count; for a count of zero, NaN with a gradient of zero (the gradient of 0 / 0 would be NaN)."""
    count = count if isinstance(count, Tensor) else torch.full((), count, device=total.device)
    is_any = count > 0
    return torch.where(is_any, total / torch.where(is_any, count, 1), torch.nan)


def reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f'expected reduction "mean", "sum" or "none", got {reduction!r}')
    return losses.mean() if reduction == "mean" else losses.sum()
