"""Connectionist temporal classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose._support.internals import is_transforming
from purecompose.losses.functions import reduced
from purecompose.losses.targets import wide_dtype


_LOG_OF_0 = -1e30
"""Finite, because the difference of two infinite logarithms is NaN."""


@dataclass(frozen=True)
class CTC:
    """Connectionist temporal classification: -log of the probability of all alignments of a text with T frames.

    Equal to `torch.nn.functional.ctc_loss`; it also compiles, maps over members, and has second derivatives. Outputs
    are logits or log probabilities (N, T, C), with frames in dim 1. Targets are class indices (N, S), padded at the end
    by negative numbers or the blank; or a tuple (indices, lengths) or (indices, lengths, frames) of them, any padding,
    and integers (N,), the numbers of indices and of frames. The mean over examples is of losses divided by the lengths.

    A text that needs more frames than there are has an infinite loss, whose gradient is 0 (torch's is NaN).

    Args:
        blank: The class of frames without an index.
        zero_infinity: True to count infinite losses as 0.

    Raises:
        ValueError: Outputs or targets have other shapes, such as concatenated targets.

    Example:
        >>> round(ctc(torch.zeros(1, 3, 2), torch.tensor([[1, -1]])).item(), 4)  # 6 of 8 alignments
        0.2877

    References:
        Alex Graves et al.: Connectionist Temporal Classification. ICML 2006.
    """

    blank: int = 0
    zero_infinity: bool = False

    def __call__(self, outputs: Tensor, targets: Any, reduction: str = "mean") -> Tensor:
        indices, *sizes = targets if isinstance(targets, tuple | list) else (targets,)
        if outputs.ndim != 3 or indices.ndim != 2 or len(indices) != len(outputs):
            raise ValueError(
                f"losses.CTC: expected outputs (N, T, C) and targets (N, S), got {tuple(outputs.shape)} and "
                f"{tuple(indices.shape)}; torch.nn.utils.rnn.pad_sequence(texts, True, -1) pads the texts of a batch"
            )
        lengths = sizes[0].long() if sizes else ((indices >= 0) & (indices != self.blank)).sum(1)
        frames = sizes[1].long() if len(sizes) > 1 else torch.full_like(lengths, outputs.shape[1])
        indices = indices.long().where(torch.arange(indices.shape[1], device=lengths.device) < lengths[:, None], 0)
        logs = outputs.to(wide_dtype(outputs)).log_softmax(2).clamp(min=_LOG_OF_0)
        by = _by_recursion if is_transforming() else _ByKernel.apply
        losses: Any = by(logs, indices, frames, lengths, self.blank)
        losses = losses.where(losses < -0.1 * _LOG_OF_0, 0.0 if self.zero_infinity else torch.inf)
        return reduced(losses / lengths.clamp(min=1) if reduction == "mean" else losses, reduction)


def _by_recursion(logs: Tensor, indices: Tensor, frames: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """Return the losses, (N,), by the forward recursion over the frames, for transforms and second derivatives."""
    # A path runs through the states blank, index, blank, ..., and may skip a blank between unequal indices.
    states = F.pad(F.pad(indices.unsqueeze(2), (1, 0), value=blank).flatten(1), (0, 1), value=blank)
    may_skip = F.pad((states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2]), (min(2, states.shape[1]), 0))
    logs = logs.gather(2, states[:, None].expand(-1, logs.shape[1], -1))
    paths = F.pad(logs.new_zeros(len(logs), 1), (0, states.shape[1] - 1), value=_LOG_OF_0)
    for frame, log in enumerate(logs.unbind(1)):
        before = F.pad(paths, (2, 0), value=_LOG_OF_0)
        new = torch.stack([paths, before[:, 1:-1], before[:, :-2].where(may_skip, _LOG_OF_0)]).logsumexp(0) + log
        paths = new.where(frame < frames[:, None], paths)
    ends = 2 * lengths[:, None] + torch.arange(2, device=logs.device)  # the last index, and the blank after it
    return -F.pad(paths, (1, 0), value=_LOG_OF_0).gather(1, ends).logsumexp(1)


class _ByKernel(torch.autograd.Function):
    """The losses by torch's kernel."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        losses, slopes = _kernel(*given)
        ctx.save_for_backward(slopes, *given[:-1])
        ctx.blank = given[-1]
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        slopes, *given = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative will be taken
            losses = _by_recursion(*given, blank=ctx.blank)
            (slopes,) = torch.autograd.grad(losses.sum(), given[0], create_graph=True)
        return slopes * grads[0][:, None, None], None, None, None, None


@torch.library.custom_op("purecompose::ctc", mutates_args=())
def _kernel(logs: Tensor, indices: Tensor, frames: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Return losses, (N,), and their derivatives, (N, T, C). torch reads the lengths, which tracing cannot do."""
    given = logs.transpose(0, 1), indices, frames, lengths
    losses, paths = torch.ops.aten._ctc_loss.Tensor(*given, blank)
    slopes = torch.ops.aten._ctc_loss_backward.Tensor(torch.ones_like(losses), *given, losses, paths, blank)
    return losses, slopes.transpose(0, 1).nan_to_num(0.0).contiguous()


_kernel.register_fake(lambda logs, *_: (logs.new_empty(len(logs)), logs.new_empty(logs.shape)))

ctc: CTC = CTC()
"""`CTC` with its defaults."""
