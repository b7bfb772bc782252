"""Losses of outputs and targets: frozen dataclasses, so that two with the same settings are equal and hash alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose._support.checks import check_number, check_whole
from purecompose._support.device import constants
from purecompose._support.internals import is_transforming
from purecompose.losses.targets import Mixture, check_classes, has_index_targets, one_hot, per_row, wide_dtype


def _checked(given: Any, where: str) -> tuple[float, ...] | None:
    """Return the weights of classes as numbers."""
    weights = given.tolist() if hasattr(given, "tolist") else given  # a tensor or a NumPy array
    if weights is None:
        return None
    if not isinstance(weights, list | tuple):
        raise TypeError(f"{where}={given!r}: expected a sequence of numbers or a tensor")
    return tuple(check_number(value, f"{where}[{i}]", 0) for i, value in enumerate(weights))


def _of_classes(weights: Any, outputs: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """Return the weights of the classes in dim 1 of the outputs, (C,), on their device."""
    if outputs.ndim > 1 and len(weights) != outputs.shape[1]:
        raise ValueError(
            f"{where} has {len(weights)} numbers, expected one for each of the {outputs.shape[1]} classes of outputs "
            f"of shape {tuple(outputs.shape)}"
        )
    return constants(weights, dtype, outputs.device)


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross entropy, -sum_c weight_c t_c log softmax(outputs)_c, of index and dense targets.

    Outputs are logits (N, C, ...) with classes in dim 1; targets are indices (N, ...) or dense (N, C, ...). The mean
    is over the positions that count: indices equal to `ignore_index` and their dense form, rows of zeros, are left
    out. If nothing counts, the mean is NaN, as in torch, and its gradient is 0.

    With `weight` the mean divides by the sum of sum_c weight_c t_c over all positions. For indices torch does the same;
    for dense targets it divides by the number of positions, so one-hot targets would have another mean than indices.
    With `label_smoothing` the loss is that of targets (1 - a) t + a / C, and the mean divides by what it would without,
    as in torch; `algorithms.label_smoothing` divides by the sum of weights of the smoothed targets.

    Args:
        ignore_index: The target index to ignore.
        weight: One weight per class, C numbers >= 0 (a sequence or a tensor), stored as a tuple of floats; by default
            1 for each class.
        label_smoothing: The share a of each target that is spread over all classes, in [0, 1].

    Raises:
        TypeError, ValueError: As for `has_index_targets`; weights that are negative, not finite, or not C in number;
            dense targets of fewer than 2 classes, where the loss would always be 0. An index of C or more raises
            torch's own error.

    Example:
        >>> outputs, targets = torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, -100])
        >>> round(cross_entropy(outputs, targets).item(), 4)
        0.1269
        >>> round(cross_entropy(outputs, one_hot(targets, outputs)).item(), 4)
        0.1269
        >>> outputs, targets = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
        >>> round(CrossEntropy(weight=[1.0, 3.0])(outputs, targets).item(), 4)
        1.6269
    """

    ignore_index: int = -100
    weight: Sequence[float] | Tensor | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_whole(self.ignore_index, "losses.CrossEntropy: ignore_index")
        check_number(self.label_smoothing, "losses.CrossEntropy: label_smoothing", 0, 1)
        object.__setattr__(self, "weight", _checked(self.weight, "losses.CrossEntropy: weight"))

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        is_index = has_index_targets(outputs, targets)
        given, options = targets, {}
        if not is_index:
            targets = self._dense(outputs, targets)
            if self.label_smoothing:  # a row of zeros stays one
                targets = torch.lerp(targets, targets.mean(1, keepdim=True), self.label_smoothing)
        else:
            options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
            targets = targets if targets.dtype is torch.int64 else targets.long()
        if is_index and self.weight is None:
            return F.cross_entropy(outputs, targets, reduction=reduction, **options)
        weight = self._class_weights(outputs, outputs.dtype)
        if reduction != "mean":
            return F.cross_entropy(outputs, targets, weight=weight, reduction=reduction, **options)
        # For dense targets torch divides by the number of all rows, but the result has to equal that for indices, where
        # only rows that count are included. For weights that add up to 0 torch's gradient is NaN.
        total = F.cross_entropy(outputs, targets, weight=weight, reduction="sum", **options)
        return mean_of(total, self.num_terms(outputs, given))

    def num_terms(self, outputs: Tensor, targets: Tensor | Mixture) -> Tensor:
        """Return the number of positions in the mean, 0-d int64, or the sum of their weights, 0-d float32 or wider."""
        weight = self._class_weights(outputs, wide_dtype(outputs))
        if weight is None:
            return self.counted(outputs, targets).sum()
        if isinstance(targets, Mixture):
            targets = targets.soft(outputs, ignore_index=self.ignore_index)
        elif has_index_targets(outputs, targets):
            return self.position_weights(outputs, targets).sum()
        return (targets.to(weight.dtype).movedim(1, -1) * weight).sum()

    def position_weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what each position adds to `num_terms`, (N, ...), bool without weights of classes."""
        weight = self._class_weights(outputs, wide_dtype(outputs))
        is_counted = self.counted(outputs, targets)
        if weight is None:
            return is_counted
        if has_index_targets(outputs, targets):
            return weight[targets.where(is_counted, 0).long()] * is_counted
        return (targets.to(weight.dtype).movedim(1, -1) * weight).sum(-1)

    def counted(self, outputs: Tensor, targets: Tensor | Mixture) -> Tensor:
        """Return the mask of the positions in the mean, bool (N, ...); for a mixture, those where any term counts."""
        if not isinstance(targets, Mixture):
            is_index = has_index_targets(outputs, targets)
            return targets != self.ignore_index if is_index else targets.any(dim=1)
        masks = []
        for term, weight in zip(targets.targets, targets.weights, strict=True):
            mask = self.counted(outputs, term)
            masks.append(mask & per_row(weight != 0, mask))
        return torch.stack(masks).any(dim=0)

    @staticmethod
    def _dense(outputs: Tensor, targets: Tensor) -> Tensor:
        check_classes(outputs, "losses.CrossEntropy")
        return targets if targets.dtype.is_floating_point else targets.to(wide_dtype(outputs))

    def _class_weights(self, outputs: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the weights, (C,), on the outputs' device; `None` without weights."""
        return None if self.weight is None else _of_classes(self.weight, outputs, dtype, "losses.CrossEntropy: weight")


@dataclass(frozen=True)
class MeanSquaredError:
    """(outputs - targets)^2, averaged over all elements. Shapes must be equal: nothing broadcasts.

    Raises:
        ValueError: The shapes differ.

    Example:
        >>> mse(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])).item()
        5.0
    """

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        if outputs.shape != targets.shape:
            # torch broadcasts (N, 1) against (N,) to (N, N), with a warning at most.
            raise ValueError(
                f"expected targets of the outputs' shape {tuple(outputs.shape)}, got "
                f"{tuple(targets.shape)}; reshape one of them (`targets.unsqueeze(1)` for outputs (N, 1))"
            )
        return F.mse_loss(outputs, targets, reduction=reduction)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Sigmoid cross entropy of logits, averaged over all elements or over examples.

        mean over elements   1 / (N C) sum_nc l(x_nc, t_nc)
        mean over examples   1 / N sum_nc l(x_nc, t_nc),   C times as large

    with l(x, t) = -t log sigmoid(x) - (1 - t) log(1 - sigmoid(x)). torch averages over elements; the published recipes
    (`purecompose.recipe`) and their learning rates assume the mean over examples.

    Targets have the outputs' shape, with values in [0, 1]; or they are class indices (N, ...) for outputs
    (N, C, ...), C > 1, and are converted to one-hot. A negative index marks an example of no class, which still counts.

    Args:
        mean_over: "elements", or "examples" for sums over all outputs of an example. With reduction "none" the losses
            have the outputs' shape for "elements" and shape (N,) for "examples".
        pos_weight: The weight of -t log sigmoid(x), by which rare labels count more: a number, or one for each class,
            C numbers for classes in dim 1. As in torch, the mean still divides by the number of elements.

    Raises:
        TypeError, ValueError: As for `has_index_targets` and `one_hot`; any other `mean_over`; weights that are
            negative, not finite, or not C in number.

    Example:
        >>> outputs, targets = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
        >>> round(binary_cross_entropy(outputs, targets).item(), 4)
        0.6931
        >>> round(BinaryCrossEntropy(mean_over="examples")(outputs, targets).item(), 4)
        2.0794
    """

    mean_over: str = "elements"
    pos_weight: float | Sequence[float] | Tensor | None = None

    def __post_init__(self) -> None:
        if self.mean_over not in ("elements", "examples"):
            raise ValueError(f"BinaryCrossEntropy: mean_over={self.mean_over!r}: expected 'elements' or 'examples'")
        where, given = "losses.BinaryCrossEntropy: pos_weight", self.pos_weight
        is_number = isinstance(given, int | float)
        object.__setattr__(self, "pos_weight", check_number(given, where, 0) if is_number else _checked(given, where))

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        if has_index_targets(outputs, targets):
            targets = one_hot(targets, outputs)
        elif not targets.dtype.is_floating_point:
            targets = targets.to(wide_dtype(outputs))
        weight = None
        if self.pos_weight is not None:
            given = self.pos_weight
            numbers = (given,) * (outputs.shape[1] if outputs.ndim > 1 else 1) if isinstance(given, float) else given
            weight = _of_classes(numbers, outputs, outputs.dtype, "losses.BinaryCrossEntropy: pos_weight")
            weight = weight.reshape(-1, *[1] * (outputs.ndim - 2))
        if self.mean_over == "elements":
            return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight, reduction=reduction)
        losses = F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight, reduction="none")
        return reduced(losses.reshape(len(losses), -1).sum(1), reduction)


cross_entropy: CrossEntropy = CrossEntropy()
"""`CrossEntropy` with its defaults."""
mse: MeanSquaredError = MeanSquaredError()
"""`MeanSquaredError` with its defaults."""
binary_cross_entropy: BinaryCrossEntropy = BinaryCrossEntropy()
"""`BinaryCrossEntropy` with its defaults."""


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
        Alex Graves, Santiago Fernández, Faustino Gomez, Jürgen Schmidhuber: Connectionist Temporal Classification. ICML
        2006.
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
