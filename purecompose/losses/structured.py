"""Losses of structured outputs: two views of examples, a student and its teacher, and alignments of a text (CTC)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose._support.internals import is_transforming
from purecompose._support.specs import check_flag, check_number, is_number, shown
from purecompose.losses.functions import cross_entropy, mean_of, reduced
from purecompose.losses.targets import Mixture, wide_dtype
from purecompose.losses.terms import counter_of, ignore_index_of


class InfoNCE(nn.Module):
    """Contrastive loss: each of two views is to be more similar to the other one than to those of other examples.

        l(a, b) = -log (exp(a.b / T) / sum_c exp(a.c / T)),   of normalised vectors

    With `negatives="both"` c runs over both views of all examples, without a itself: NT-Xent, the loss of SimCLR. With
    "other" c runs over the other view, and the loss is the mean of both directions: the loss of CLIP. It compares
    examples (`losses.over_batch`). Targets are not read.

    Outputs are one tensor (N, 2, D), or two of shape (N, D) in a tuple, list or mapping. The part "accuracy" is the
    share of vectors whose most similar one is the other view.

    Args:
        temperature: T, above 0; also a schedule or an hparam.
        negatives: "both" or "other".
        learned: True to train T, in the state as `loss.log_temperature`, from the given number on; it is also a part.

    Raises:
        TypeError, ValueError: A setting of the wrong type or value; outputs of another form (in a step).

    Example:
        >>> views = torch.eye(2)[:, None].expand(2, 2, 2)  # both views of an example are equal
        >>> loss, parts = InfoNCE(1.0)(views)
        >>> round(loss.item(), 4), parts["accuracy"].item()  # log(e + 2) - 1
        (0.5514, 1.0)

    References:
        Aaron van den Oord et al.: Representation Learning with Contrastive Predictive Coding. 2018.
        https://arxiv.org/abs/1807.03748
        Ting Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations. ICML 2020.
        https://arxiv.org/abs/2002.05709
        Alec Radford et al.: Learning Transferable Visual Models From Natural Language Supervision. ICML 2021.
        https://arxiv.org/abs/2103.00020
    """

    couples_examples: bool = True
    reads_targets: bool = False

    def __init__(self, temperature: Any = 0.1, *, negatives: str = "both", learned: bool = False) -> None:
        super().__init__()
        if negatives not in ("both", "other"):
            raise ValueError(f"losses.InfoNCE: negatives={negatives!r}: expected 'both' or 'other'")
        if check_flag(learned, "losses.InfoNCE: learned") or is_number(temperature):
            check_number(temperature, "losses.InfoNCE: temperature", 0, above=True)
        self.temperature: Any = temperature
        self.negatives: str = negatives
        self.log_temperature: nn.Parameter | None = None
        if learned:
            self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))  # pyright: ignore

    def forward(self, outputs: Any, targets: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its parts, 0-d."""
        del targets
        first, second = (F.normalize(view.to(wide_dtype(view)), dim=1) for view in _two_views(outputs))
        num, parts = len(first), {}
        temperature = self.temperature
        if self.log_temperature is not None:
            temperature = parts["temperature"] = self.log_temperature.exp()
        if self.negatives == "both":
            vectors = torch.cat([first, second])
            itself = torch.eye(2 * num, dtype=torch.bool, device=first.device)
            logits = (vectors @ vectors.T / temperature).masked_fill(itself, -math.inf)
            others = torch.arange(2 * num, device=first.device).roll(num)
        else:
            similarities = first @ second.T / temperature
            logits = torch.cat([similarities, similarities.T])
            others = torch.arange(num, device=first.device).repeat(2)
        parts["accuracy"] = (logits.argmax(1) == others).to(logits.dtype).mean()
        return F.cross_entropy(logits, others), parts


def _two_views(outputs: Any) -> tuple[Tensor, Tensor]:
    views = [*outputs.values()] if isinstance(outputs, Mapping) else outputs
    if isinstance(outputs, Tensor):
        views = outputs.unbind(1) if outputs.ndim == 3 else [outputs]
    if len(views) != 2 or any(view.ndim != 2 or view.shape != views[0].shape for view in views):
        raise ValueError(
            f"losses.InfoNCE: expected outputs (N, 2, D), or two of shape (N, D), got {shown(outputs)}: make the views "
            "by a method at AFTER_DATALOADER, or in the network"
        )
    return views[0], views[1]


info_nce: InfoNCE = InfoNCE()
"""`InfoNCE` with its defaults."""


@dataclass(frozen=True)
class Distillation:
    """Loss of a student that learns from labels and from a teacher's logits.

        a T^2 KL(softmax(teacher / T) || softmax(student / T)) + (1 - a) loss(student, labels)

    The mean of both terms is over the positions that `loss` counts, and they are its parts "soft" and "hard". No
    gradient flows to the teacher.

    Outputs are a pair (student, teacher) of logits (N, C, ...), from a network with a frozen teacher, and targets are
    labels, which may be mixed; or outputs are those of the student, and targets (labels, teacher), of members of the
    batch: `State.create(target_field=["label", "teacher"])`.

    Args:
        temperature: T, above 0; also a schedule or an hparam.
        alpha: The share a of the teacher, in [0, 1]; also a schedule or an hparam. With 1, labels are not read.
        loss: A loss of labels with reduction "none", of shape (N, ...).

    Raises:
        TypeError, ValueError: A setting of the wrong type or value; no teacher, or another shape of it (in a step).

    Example:
        >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
        >>> loss, parts = distillation((student, teacher), torch.tensor([0]))
        >>> [round(value.item(), 4) for value in (loss, parts["soft"], parts["hard"])]
        [0.5685, 0.4438, 0.6931]

    References:
        Geoffrey Hinton et al.: Distilling the Knowledge in a Neural Network. 2015. https://arxiv.org/abs/1503.02531
    """

    temperature: Any = 2.0
    alpha: Any = 0.5
    loss: Callable[..., Tensor] = cross_entropy

    def __post_init__(self) -> None:
        if is_number(self.temperature):
            check_number(self.temperature, "losses.Distillation: temperature", 0, above=True)
        if is_number(self.alpha):
            check_number(self.alpha, "losses.Distillation: alpha", 0, 1)

    @property
    def ignore_index(self) -> int | None:
        """The index that the loss of labels leaves out."""
        return ignore_index_of(self.loss)

    def __call__(self, outputs: Any, targets: Any, reduction: str = "mean") -> Any:
        student, teacher, labels = _taught(outputs, targets)
        temperature: Any = self.temperature
        wide = (logits.to(wide_dtype(logits)) / temperature for logits in (student, teacher.detach()))
        soft = F.kl_div(*(logits.log_softmax(1) for logits in wide), reduction="none", log_target=True).sum(1)
        soft, is_counted = soft * temperature**2, self.counted(outputs, targets)
        parts = {"soft": soft.where(is_counted, 0)}
        if is_number(self.alpha) and self.alpha == 1:
            losses = parts["soft"]
        else:
            parts["hard"] = hard = self.loss(student, labels, reduction="none")
            if hard.shape != soft.shape:
                raise ValueError(
                    f"losses.Distillation: expected a loss of shape {tuple(soft.shape)} for each position from "
                    f"{shown(self.loss)}, got {tuple(hard.shape)}"
                )
            losses = self.alpha * parts["soft"] + (1 - self.alpha) * hard
        if reduction != "mean":
            return reduced(losses, reduction)
        count = is_counted.sum()
        return mean_of(losses.sum(), count), {name: mean_of(part.sum(), count) for name, part in parts.items()}

    def counted(self, outputs: Any, targets: Any) -> Tensor:
        """Return the mask of the positions in the mean, bool (N, ...)."""
        student, _, labels = _taught(outputs, targets)
        counting = counter_of(self.loss)
        if labels is None or not hasattr(counting, "counted"):
            return torch.ones_like(student[:, 0], dtype=torch.bool)
        return counting.counted(student, labels)


def _taught(outputs: Any, targets: Any) -> tuple[Tensor, Tensor, Any]:
    """Return the logits of student and teacher, and the labels."""
    student: Any = outputs
    if isinstance(outputs, tuple | list) and len(outputs) == 2:
        student, teacher, labels = *outputs, targets
    elif isinstance(targets, tuple | list) and len(targets) == 2:
        labels, teacher = targets
    else:
        what = "mixed targets" if isinstance(targets, Mixture) else shown(targets)
        raise TypeError(
            f"losses.Distillation: expected outputs (student, teacher), or targets (labels, teacher), got outputs "
            f"{shown(outputs)} and {what}"
        )
    if student.shape != teacher.shape:
        raise ValueError(
            f"losses.Distillation: expected logits of one shape, got {tuple(student.shape)} of the student and "
            f"{tuple(teacher.shape)} of the teacher"
        )
    return student, teacher, labels


distillation: Distillation = Distillation()
"""`Distillation` with its defaults."""


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
