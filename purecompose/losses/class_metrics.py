"""Metrics of classes: accuracy, the overlap of sets of positions, and the calibration of confidence.

Outputs are (N, C, ...); targets are indices (N, ...), dense (N, C, ...) or a `Mixture`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.checks import check_whole
from purecompose._support.functorch import has_values, is_transforming
from purecompose.losses.metric import Device, Mean, Metric, init_mean
from purecompose.losses.targets import Mixture, check_classes, has_index_targets


class CalibrationGaps(NamedTuple):
    """Accumulator of `calibration_error`."""

    totals: Tensor
    """Sums of confidence minus correctness in each bin so far, (num_bins,), of the dtype of a `Mean`'s total."""
    number: Tensor
    """Number of positions that counted so far, 0-d int64."""


def top_k(k: int, *, ignore_index: int | None = None) -> Metric:
    """Return a metric for the share of positions whose class is among the k with the highest outputs.

    Outputs are (N, C, ...); targets are indices (N, ...), dense (N, C, ...) or a `Mixture`, and in the last two cases
    the class with the largest weight is used. Positions with a negative index, with `ignore_index`, or with a dense
    row of zeros do not count. The order of equal outputs is torch's. Several labels at a position, dense rows that add
    up to more than 1, are an error, for which compiled steps and populations do not look; others wait for the device.

    Args:
        k: Number of guesses allowed, at least 1.
        ignore_index: The target index to ignore; by default that of the state's loss, or -100.

    Raises:
        ValueError: k is below 1 (raised immediately), or there are fewer than max(2, k) classes, or several labels (at
            an update).

    Example:
        >>> metric, outputs = top_k(2), torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]])
        >>> metric.compute(metric.update(metric.init(), outputs, torch.tensor([1, 2]))).item()
        0.5
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"top_k: expected k as an int of at least 1, got k={k!r} ({type(k).__name__})")

    def init(device: Device = None) -> Mean:
        none = torch.zeros((), dtype=torch.int64, device=device)
        return Mean(none, none)

    def update(acc: Mean, outputs: Tensor, targets: Tensor | Mixture, ignore_index: int = -100) -> Mean:
        classes, counted = _classes("top_k", outputs, targets, ignore_index)
        if outputs.shape[1] < k:
            raise ValueError(
                f"top_k: expected outputs (N, C, ...) with at least {k} classes, got shape {tuple(outputs.shape)}"
            )
        if k == 1:
            hits = outputs.argmax(dim=1) == classes
        else:
            hits = (outputs.topk(k, dim=1).indices == classes.unsqueeze(1)).any(dim=1)
        return Mean(acc.total + (hits & counted).sum(), acc.number + counted.sum())

    return _of_classes(Metric(init, update, Mean.value, is_sum=True, higher_is_better=True), ignore_index)


def dice(num_classes: int, *, ignore_index: int | None = None) -> Metric:
    """Return a metric for the Dice coefficient of the predicted classes, 2 |P and T| / (|P| + |T|), averaged over the
    classes that occur.

    Sizes are counted over all examples together. Outputs and targets are as for `top_k`.

    Args:
        num_classes: C, the number of classes, at least 2.
        ignore_index: As for `top_k`.

    Raises:
        TypeError, ValueError: `num_classes` is not an integer of at least 2 (raised immediately), or the outputs have
            another number of classes (at the first update).

    Example:
        >>> metric, outputs = dice(2), torch.tensor([[[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]])
        >>> round(metric.compute(metric.update(metric.init(), outputs, torch.tensor([[1, 0, 0]]))).item(), 4)
        0.6667
    """
    return _overlap("dice", num_classes, ignore_index, lambda both, sizes: 2 * both / sizes)


def iou(num_classes: int, *, ignore_index: int | None = None) -> Metric:
    """Return a metric for the intersection over union of the predicted classes, |P and T| / |P or T|, averaged over the
    classes that occur.

    Sizes are counted over all examples together. Outputs and targets are as for `top_k`; arguments and errors as for
    `dice`.

    Args:
        num_classes: Number of classes, at least 2.
        ignore_index: Class of positions to leave out.

    Example:
        >>> metric, outputs = iou(2), torch.tensor([[[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]])
        >>> metric.compute(metric.update(metric.init(), outputs, torch.tensor([[1, 0, 0]]))).item()
        0.5
    """
    return _overlap("iou", num_classes, ignore_index, lambda both, sizes: both / (sizes - both))


def calibration_error(num_bins: int = 15, *, ignore_index: int | None = None) -> Metric:
    """Return a metric for the expected calibration error, the distance between confidence and accuracy.

        ECE = sum_b n_b / n |acc_b - conf_b|

    A position's confidence is the greatest probability of its classes, softmax(outputs). Bin b holds the n_b of n
    positions whose confidence is in (b / num_bins, (b + 1) / num_bins]; acc_b is their accuracy and conf_b their mean
    confidence. Outputs and targets are as for `top_k`. Logarithms of probabilities, such as those of the mean of an
    ensemble, are logits of these probabilities.

    Args:
        num_bins: Number of bins of equal width, at least 1.
        ignore_index: As for `top_k`.

    Raises:
        TypeError, ValueError: `num_bins` is not an integer of at least 1 (raised immediately), or there are fewer than
            2 classes (at the first update).

    Example:
        >>> metric, outputs = calibration_error(), torch.tensor([[0.8, 0.2], [0.8, 0.2]]).log()
        >>> round(metric.compute(metric.update(metric.init(), outputs, torch.tensor([0, 1]))).item(), 4)
        0.3

    References:
        Chuan Guo, Geoff Pleiss, Yu Sun, Kilian Q. Weinberger: On Calibration of Modern Neural Networks. ICML 2017.
        https://arxiv.org/abs/1706.04599
    """
    check_whole(num_bins, "metrics.calibration_error: num_bins", 1)

    def init(device: Device = None) -> CalibrationGaps:
        total, number = init_mean(device)
        return CalibrationGaps(total.repeat(num_bins), number)

    def update(
        acc: CalibrationGaps, outputs: Tensor, targets: Tensor | Mixture, ignore_index: int = -100
    ) -> CalibrationGaps:
        classes, counted = _classes("calibration_error", outputs, targets, ignore_index)
        confidence, guess = outputs.detach().to(acc.totals.dtype).softmax(dim=1).max(dim=1)
        bins = ((confidence * num_bins).ceil() - 1).nan_to_num()  # NaN has to be in some bin to show in the result
        is_in = (bins[..., None] == torch.arange(num_bins, device=outputs.device)) & counted[..., None]
        gaps = torch.where(is_in, (confidence - (guess == classes).to(confidence.dtype))[..., None], 0.0)
        return CalibrationGaps(acc.totals + gaps.flatten(0, -2).sum(0), acc.number + counted.sum())

    def compute(acc: CalibrationGaps) -> Tensor:
        return acc.totals.abs().sum() / acc.number

    return _of_classes(Metric(init, update, compute, is_sum=True, higher_is_better=False), ignore_index)


def _of_classes(metric: Metric, ignore_index: int | None) -> Metric:
    """Return a metric of logits and classes, whose `update` takes `ignore_index`, with the given index if there is one.

    Without one it is that of the state's loss.
    """
    update: Callable[..., Any] = metric.update
    if ignore_index is not None:
        update = functools.partial(update, ignore_index=ignore_index)
    return metric._replace(update=update, takes_logits=True, takes_ignore_index=ignore_index is None)


def _overlap(
    name: str, num_classes: int, ignore_index: int | None, score: Callable[[Tensor, Tensor], Tensor]
) -> Metric:
    """Return the mean over classes of a score of |P and T| and |P| + |T|, which is NaN for an absent class."""
    check_whole(num_classes, f"metrics.{name}: num_classes", 2)

    def init(device: Device = None) -> tuple[Tensor, Tensor]:
        empty = torch.zeros(num_classes, dtype=torch.int64, device=device)
        return empty, empty

    def update(
        acc: tuple[Tensor, Tensor], outputs: Tensor, targets: Tensor | Mixture, ignore_index: int = -100
    ) -> tuple[Tensor, Tensor]:
        classes, counted = _classes(name, outputs, targets, ignore_index)
        if outputs.shape[1] != num_classes:
            raise ValueError(
                f"metrics.{name}: expected {num_classes} classes in dim 1, got shape {tuple(outputs.shape)}"
            )
        numbers = torch.arange(num_classes, device=outputs.device)
        found = (outputs.argmax(dim=1)[..., None] == numbers) & counted[..., None]
        wanted = (classes[..., None] == numbers) & counted[..., None]
        both, sizes = (part.flatten(0, -2).sum(0) for part in (found & wanted, found.long() + wanted.long()))
        return acc[0] + both, acc[1] + sizes

    def compute(acc: tuple[Tensor, Tensor]) -> Tensor:
        return score(*acc).nanmean()

    return _of_classes(Metric(init, update, compute, is_sum=True, higher_is_better=True), ignore_index)


def _classes(name: str, outputs: Any, targets: Any, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the class of each position and whether it counts, both (N, ...), for the metric of this name."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor | Mixture):
        first = next(iter(outputs), 0) if isinstance(outputs, Mapping) else 0
        raise TypeError(
            "a metric of classes expects outputs and targets as tensors, got "
            f"{type(outputs).__name__} and {type(targets).__name__}; pick them by a function, such as "
            f"{{'accuracy': lambda outputs, targets: outputs[{first!r}].argmax(1) == targets}}"
        )
    check_classes(outputs, f"metrics.{name}")
    may_read = not (isinstance(targets, Mixture) or torch.compiler.is_compiling() or is_transforming())
    if isinstance(targets, Mixture):
        targets = targets.soft(outputs, ignore_index=ignore_index)
    if has_index_targets(outputs, targets):
        return targets, (targets >= 0) & (targets != ignore_index)
    if may_read and has_values(targets) and bool((targets.sum(dim=1) > 1 + 1e-3).any()):
        raise ValueError(
            f"metrics.{name}: expected one class for each position, got dense targets of several: count each of them, "
            "as by `lambda outputs, targets: (outputs > 0) == targets`, or only examples in which all are right, "
            "`((outputs > 0) == targets).all(1)`"
        )
    return targets.argmax(dim=1), targets.any(dim=1)


accuracy: Metric = top_k(1)  # made last, with all that it needs
"""The share of examples whose target has the highest output; `top_k(1)`."""
