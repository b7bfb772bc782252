"""Losses of outputs and targets: frozen dataclasses, so that two with the same settings are equal and hash alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose._support.checks import check_number, check_whole
from purecompose._support.device import constants
from purecompose.losses.reduction import mean_of, reduced
from purecompose.losses.targets import Mixture, check_classes, has_index_targets, one_hot, per_row, wide_dtype


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
        if self.weight is None:
            return
        weight: Any = self.weight.tolist() if isinstance(self.weight, Tensor) else self.weight
        weight = weight.tolist() if hasattr(weight, "tolist") else weight  # a NumPy array
        if not isinstance(weight, list | tuple):
            raise TypeError(f"losses.CrossEntropy: weight={self.weight!r}: expected a sequence of numbers or a tensor")
        checked = (check_number(value, f"losses.CrossEntropy: weight[{i}]", 0) for i, value in enumerate(weight))
        object.__setattr__(self, "weight", tuple(checked))

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
            is_counted = targets != self.ignore_index
            return (weight[targets.where(is_counted, 0).long()] * is_counted).sum()
        return (targets.to(weight.dtype).movedim(1, -1) * weight).sum()

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
        if self.weight is None:
            return None
        weight = cast(tuple[float, ...], self.weight)
        if outputs.ndim > 1 and len(weight) != outputs.shape[1]:
            raise ValueError(
                f"losses.CrossEntropy: weight has {len(weight)} numbers, expected one for each of the "
                f"{outputs.shape[1]} classes of outputs of shape {tuple(outputs.shape)}"
            )
        return constants(weight, dtype, outputs.device)


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

    Raises:
        TypeError, ValueError: As for `has_index_targets` and `one_hot`; any other `mean_over`.

    Example:
        >>> outputs, targets = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
        >>> round(binary_cross_entropy(outputs, targets).item(), 4)
        0.6931
        >>> round(BinaryCrossEntropy(mean_over="examples")(outputs, targets).item(), 4)
        2.0794
    """

    mean_over: str = "elements"

    def __post_init__(self) -> None:
        if self.mean_over not in ("elements", "examples"):
            raise ValueError(f"BinaryCrossEntropy: mean_over={self.mean_over!r}: expected 'elements' or 'examples'")

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        if has_index_targets(outputs, targets):
            targets = one_hot(targets, outputs)
        elif not targets.dtype.is_floating_point:
            targets = targets.to(wide_dtype(outputs))
        if self.mean_over == "elements":
            return F.binary_cross_entropy_with_logits(outputs, targets, reduction=reduction)
        losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return reduced(losses.reshape(len(losses), -1).sum(1), reduction)


@dataclass(frozen=True)
class Dice:
    """1 minus the Dice coefficient of softmax probabilities p and targets t, for segmentation; a mean over examples.

        1 - mean_c (2 sum p_c t_c + smooth) / (sum p_c + sum t_c + smooth)

    The sums are over the positions of one example, so the loss of a batch is the mean of its examples' losses and does
    not depend on how they are cut into batches. Outputs are logits (N, C, ...) with classes in dim 1; targets are
    indices (N, ...) or dense (N, C, ...). Positions with index `ignore_index`, or with a dense row of zeros, are left
    out.

    Args:
        smooth: Number added to both parts of the fraction, above 0; a class absent from both p and t has coefficient 1.
        ignore_index: The target index to ignore.

    Raises:
        TypeError, ValueError: As for `has_index_targets` and `one_hot`; fewer than 2 classes; a `smooth` that is not
            above 0.

    Example:
        >>> round(dice(torch.zeros(1, 2, 4), torch.tensor([[0, 0, 1, 1]])).item(), 4)
        0.4

    References:
        Fausto Milletari, Nassir Navab, Seyed-Ahmad Ahmadi: V-Net. 3DV 2016. https://arxiv.org/abs/1606.04797
    """

    smooth: float = 1.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_number(self.smooth, "losses.Dice: smooth", 0, above=True)

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        check_classes(outputs, "losses.Dice")
        if has_index_targets(outputs, targets):
            targets = one_hot(targets.where(targets != self.ignore_index, -1), outputs)
        probabilities = outputs.to(wide_dtype(outputs)).softmax(1) * targets.any(dim=1, keepdim=True)
        products, sums = (found.flatten(2).sum(2) for found in (probabilities * targets, probabilities + targets))
        coefficients = (2 * products + self.smooth) / (sums + self.smooth)
        return reduced(1 - coefficients.mean(1), reduction)


cross_entropy: CrossEntropy = CrossEntropy()
"""`CrossEntropy` with its defaults."""
mse: MeanSquaredError = MeanSquaredError()
"""`MeanSquaredError` with its defaults."""
binary_cross_entropy: BinaryCrossEntropy = BinaryCrossEntropy()
"""`BinaryCrossEntropy` with its defaults."""
dice: Dice = Dice()
"""`Dice` with its defaults."""
