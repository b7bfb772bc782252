"""Decompositions for Inductor that move fewer bytes than its own, or none between host and device."""

import struct
from typing import Any

import torch
from torch import Tensor


_aten = torch.ops.aten
_MEAN = 1
"""torch's number of the reduction "mean"."""


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Return the gradient of `nll_loss`, or of `nll_loss2d`, with respect to its input.

    The bits are those of torch's decomposition, which writes -1 into a tensor of zeros at the places of the targets.
    Such a write is a kernel of its own, before and after which the tensor, which is as large as the logits, is in
    memory. A comparison with the number of each class becomes part of the kernel that uses it; on a CPU it is as fast
    only for 32 bits.
    """
    dim = 0 if self.dim() < 2 else 1
    if reduction == _MEAN:
        grad_output = grad_output / total_weight
    if self.dim() == 1 and target.dim() > 0:
        target = target[0]
    target = target.unsqueeze(dim)
    if self.dim() > grad_output.dim() > 0:
        grad_output = grad_output.unsqueeze(dim)
    of_classes = [-1 if i == dim else 1 for i in range(self.dim())]
    if weight is not None:
        grad_output = grad_output * weight.reshape(of_classes)
    is_counted = target != ignore_index
    classes = torch.arange(self.shape[dim], dtype=torch.int32, device=target.device).reshape(of_classes)
    place = torch.where(is_counted, target, 0).to(torch.int32)
    chosen = torch.where(classes == place, -1.0, torch.zeros_like(self))
    return chosen * torch.where(is_counted, grad_output, 0)


def foreach_lerp(starts: list[Tensor], ends: list[Tensor], weight: float) -> list[Tensor]:
    """Return `start + weight (end - start)` for each pair, as `_foreach_lerp` does, in operations over all pairs.

    Inductor's decomposition, from torch 2.14 on, makes a tensor of the weight on the host, which a step on a GPU would
    copy to the device each time: `torch.compile` folds it, in a pass over the joint graph.
    """
    wide = [torch.float64 if start.dtype == torch.float64 else torch.float32 for start in starts]
    wide_starts, wide_ends = ([x.to(dtype) for x, dtype in zip(xs, wide, strict=True)] for xs in (starts, ends))
    if torch.float64 not in wide:
        weight = struct.unpack("f", struct.pack("f", weight))[0]  # as the kernel rounds it
    differences = _aten._foreach_sub.List(wide_ends, wide_starts)
    if abs(weight) < 0.5:
        results = _aten._foreach_add.List(wide_starts, _aten._foreach_mul.Scalar(differences, weight))
    else:
        results = _aten._foreach_sub.List(wide_ends, _aten._foreach_mul.Scalar(differences, 1 - weight))
    return [x.to(start.dtype) for x, start in zip(results, starts, strict=True)]


DECOMPOSITIONS: dict[Any, Any] = {
    _aten.nll_loss_backward.default: nll_loss_backward,
    _aten.nll_loss2d_backward.default: nll_loss_backward,
    _aten._foreach_lerp.Scalar: foreach_lerp,
}
"""Decompositions in place of Inductor's."""
