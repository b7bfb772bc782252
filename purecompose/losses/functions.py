"""Losses of outputs and targets: frozen dataclasses, so that two with the same settings are equal and hash alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose._support.device import constants
from purecompose._support.specs import check_number, check_whole, suggests_keywords
from purecompose.losses.targets import Mixture, check_classes, has_index_targets, one_hot, per_row, wide_dtype


def _plain(given: Any) -> Any:
    return given.tolist() if hasattr(given, "tolist") else given


def _checked(given: Any, where: str) -> tuple[float, ...] | None:
    """Return the weights of classes as numbers."""
    weights = _plain(given)
    if weights is None:
        return None
    if not isinstance(weights, list | tuple):
        raise TypeError(f"{where}={given!r}: expected a sequence of numbers or a tensor")
    return tuple(check_number(value, f"{where}[{i}]", 0) for i, value in enumerate(weights))


def _of_classes(weights: Any, outputs: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """Return the weights of the classes in dim 1 of the outputs, (C,), on their device."""
    num_classes = outputs.shape[1] if outputs.ndim > 1 else 1
    if isinstance(weights, float):
        weights = (weights,) * num_classes
    if len(weights) != num_classes:
        raise ValueError(
            f"{where} has {len(weights)} numbers, expected one for each of the {num_classes} classes of outputs of "
            f"shape {tuple(outputs.shape)}"
        )
    return constants(weights, dtype, outputs.device)


@suggests_keywords
@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross entropy, -sum_c weight_c t_c log softmax(outputs)_c, of index and dense targets.

    Outputs are logits (N, C, ...) with classes in dim 1; targets are indices (N, ...) or dense (N, C, ...). The mean
    is over the positions that count: indices equal to `ignore_index` and their dense form, rows of zeros, are left
    out. If nothing counts, the mean is NaN, as in torch, and its gradient is 0.

    With `weight` the mean divides by the sum of sum_c weight_c t_c over all positions, as in torch for indices. With
    `label_smoothing` the loss is that of targets (1 - a) t + a / C, and the mean divides by what it would without it.

    Args:
        ignore_index: The target index to ignore.
        weight: One weight per class, C numbers >= 0 (a sequence or a tensor), stored as a tuple of floats; by default
            1 for each class.
        label_smoothing: The share a of each target that is spread over all classes, in [0, 1].

    Raises:
        TypeError, ValueError: As for `has_index_targets`; weights that are negative, not finite, or not C in number;
            dense targets of fewer than 2 classes.

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
        if is_index:
            options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
            targets = targets.long()
        else:
            check_classes(outputs, "losses.CrossEntropy")
            targets = _floating(targets, outputs)
            if self.label_smoothing:  # a row of zeros stays one
                targets = torch.lerp(targets, targets.mean(1, keepdim=True), self.label_smoothing)
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
        if isinstance(targets, Mixture):
            if self.weight is None:
                return self.counted(outputs, targets).sum()
            targets = targets.soft(outputs, ignore_index=self.ignore_index)
        return self.position_weights(outputs, targets).sum()

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


@suggests_keywords
@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Sigmoid cross entropy of logits, averaged over all elements or over examples.

        mean over elements   1 / (N C) sum_nc l(x_nc, t_nc)
        mean over examples   1 / N sum_nc l(x_nc, t_nc),   C times as large

    with l(x, t) = -t log sigmoid(x) - (1 - t) log(1 - sigmoid(x)). torch averages over elements.

    Targets have the outputs' shape, with values in [0, 1]; or they are class indices (N, ...) for outputs
    (N, C, ...), C > 1, and are converted to one-hot. A negative index marks an example of no class, which still counts.

    Args:
        mean_over: "elements", or "examples" for sums over all outputs of an example; with reduction "none" these have
            shape (N,).
        pos_weight: The weight of -t log sigmoid(x): a number, or one for each class, C numbers for classes in dim 1. As
            in torch, the mean still divides by the number of elements.

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
        where, given = "losses.BinaryCrossEntropy: pos_weight", _plain(self.pos_weight)
        is_number = isinstance(given, int | float)
        object.__setattr__(self, "pos_weight", check_number(given, where, 0) if is_number else _checked(given, where))

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        targets = _of_elements(targets, outputs)
        weight = None
        if self.pos_weight is not None:
            weight = _of_classes(self.pos_weight, outputs, outputs.dtype, "losses.BinaryCrossEntropy: pos_weight")
            weight = weight.reshape(-1, *[1] * (outputs.ndim - 2))
        if self.mean_over == "elements":
            return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight, reduction=reduction)
        losses = F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight, reduction="none")
        return reduced(losses.reshape(len(losses), -1).sum(1), reduction)


@suggests_keywords
@dataclass(frozen=True)
class Focal:
    """Softmax cross entropy in which easy positions count less, -sum_c alpha_c t_c (1 - p_c)^gamma log p_c.

    Outputs and targets are as for `CrossEntropy`, and mixtures work, since the loss is linear in dense targets. The
    mean is over the positions that count, whatever alpha is.

    Args:
        gamma: How fast positions of high probability lose weight, at least 0; 0 is cross entropy.
        alpha: One weight per class, C numbers >= 0; by default 1 for each class.
        ignore_index: The target index to ignore.

    Raises:
        TypeError, ValueError: As for `CrossEntropy`.

    Example:
        >>> outputs, targets = torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0])
        >>> [round(loss, 4) for loss in focal(outputs, targets, "none").tolist()]
        [0.1733, 0.0001]

    References:
        Tsung-Yi Lin et al.: Focal Loss for Dense Object Detection. ICCV 2017. https://arxiv.org/abs/1708.02002
    """

    gamma: float = 2.0
    alpha: Sequence[float] | Tensor | None = None
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_number(self.gamma, "losses.Focal: gamma", 0)
        check_whole(self.ignore_index, "losses.Focal: ignore_index")
        object.__setattr__(self, "alpha", _checked(self.alpha, "losses.Focal: alpha"))

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        check_classes(outputs, "losses.Focal")
        is_index, is_counted = has_index_targets(outputs, targets), self.counted(outputs, targets)
        logs = outputs.to(wide_dtype(outputs)).log_softmax(1)
        weights = None if self.alpha is None else _of_classes(self.alpha, outputs, logs.dtype, "losses.Focal: alpha")
        if is_index:
            classes = targets.where(is_counted, 0).long()
            losses = _damped(logs.gather(1, classes.unsqueeze(1)).squeeze(1), self.gamma)
            losses = losses if weights is None else weights[classes] * losses
        else:
            each = _damped(logs, self.gamma) * targets
            losses = each.sum(1) if weights is None else (each.movedim(1, -1) * weights).sum(-1)
        losses = losses.where(is_counted, 0)
        return mean_of(losses.sum(), is_counted.sum()) if reduction == "mean" else reduced(losses, reduction)

    def counted(self, outputs: Tensor, targets: Tensor | Mixture) -> Tensor:
        """Return the mask of the positions in the mean, bool (N, ...)."""
        return CrossEntropy(self.ignore_index).counted(outputs, targets)


@suggests_keywords
@dataclass(frozen=True)
class BinaryFocal:
    """Sigmoid cross entropy in which easy elements count less, averaged over all elements.

        alpha t (1 - p)^gamma (-log p) + (1 - alpha) (1 - t) p^gamma (-log (1 - p)),   p = sigmoid(outputs)

    For targets 0 and 1 this is `torchvision.ops.sigmoid_focal_loss`. Outputs and targets are as for
    `BinaryCrossEntropy`; the loss is linear in targets between 0 and 1, so that mixtures work.

    Args:
        gamma: How fast elements of high probability lose weight, at least 0.
        alpha: The weight of targets of 1, in [0, 1], those of 0 having 1 - alpha; `None` for weights of 1.

    Raises:
        TypeError, ValueError: As for `BinaryCrossEntropy`; a setting of the wrong type or value.

    Example:
        >>> outputs, targets = torch.tensor([[0.0], [3.0]]), torch.tensor([[1.0], [1.0]])
        >>> [round(loss, 4) for loss in binary_focal(outputs, targets, "none").flatten().tolist()]
        [0.0433, 0.0]

    References:
        As for `Focal`.
    """

    gamma: float = 2.0
    alpha: float | None = 0.25

    def __post_init__(self) -> None:
        check_number(self.gamma, "losses.BinaryFocal: gamma", 0)
        if self.alpha is not None:
            check_number(self.alpha, "losses.BinaryFocal: alpha", 0, 1)

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        targets = _of_elements(targets, outputs)
        own, other = (1.0, 1.0) if self.alpha is None else (self.alpha, 1 - self.alpha)
        wide = outputs.to(wide_dtype(outputs))
        positive, negative = (_damped(F.logsigmoid(logits), self.gamma) for logits in (wide, -wide))
        return reduced(own * targets * positive + other * (1 - targets) * negative, reduction)


def _of_elements(targets: Tensor, outputs: Tensor) -> Tensor:
    """Return targets of the outputs' shape, of a floating dtype."""
    return one_hot(targets, outputs) if has_index_targets(outputs, targets) else _floating(targets, outputs)


def _floating(targets: Tensor, outputs: Tensor) -> Tensor:
    return targets if targets.is_floating_point() else targets.to(wide_dtype(outputs))


def _damped(logs: Tensor, gamma: float) -> Tensor:
    """Return -(1 - p)^gamma log p for log p; the clamp keeps the gradient finite at p = 1 for a gamma below 1."""
    return -((-torch.expm1(logs)).clamp(min=torch.finfo(logs.dtype).tiny) ** gamma) * logs


cross_entropy: CrossEntropy = CrossEntropy()
"""`CrossEntropy` with its defaults."""
mse: MeanSquaredError = MeanSquaredError()
"""`MeanSquaredError` with its defaults."""
binary_cross_entropy: BinaryCrossEntropy = BinaryCrossEntropy()
"""`BinaryCrossEntropy` with its defaults."""
focal: Focal = Focal()
"""`Focal` with its defaults."""
binary_focal: BinaryFocal = BinaryFocal()
"""`BinaryFocal` with its defaults."""


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
