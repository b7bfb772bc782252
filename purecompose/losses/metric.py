"""A metric as three pure functions, and metrics of classes, whose outputs are (N, C, ...)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.internals import has_values, is_transforming
from purecompose._support.specs import check_whole
from purecompose.losses.from_model import ModelLoss
from purecompose.losses.targets import Mixture, check_classes, has_index_targets
from purecompose.losses.terms import ignore_index_of


Device = torch.device | str | None


class Metric(NamedTuple):
    """Three pure functions; the accumulator is any pytree of tensors.

    Args:
        init: `init(device) -> accumulator`, without any examples.
        update: `update(accumulator, outputs, targets) -> accumulator`, with one more batch.
        compute: `compute(accumulator) -> value`, 0-d; NaN without examples.

    Example:
        The share of right answers among those for class 1, from two counts that add up:

        >>> def init(device=None):
        ...     return torch.zeros(2, dtype=torch.int64, device=device)
        >>> def update(counts, outputs, targets):
        ...     found = outputs.argmax(1) == 1
        ...     return counts + torch.stack([(found & (targets == 1)).sum(), found.sum()])
        >>> def compute(counts):
        ...     return counts[0] / counts[1]
        >>> precision = Metric(init, update, compute, name="precision", higher_is_better=True, is_sum=True)
        >>> outputs, targets = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> precision.compute(precision.update(precision.init(), outputs, targets)).item()
        0.5
    """

    init: Callable[..., Any]
    update: Callable[..., Any]
    compute: Callable[[Any], Any]
    reads_batch: bool = False
    """True if `update` takes the whole batch in place of the targets, as a model's own loss does."""
    takes_logits: bool = False
    """True if `update` takes logits (N, C, ...) and class indices, so that it also works for a model that computes its
    own loss; see `of_loss`."""
    takes_count: bool = False
    """True if `update` also takes `num_examples`, the batch's number of examples."""
    takes_loss: bool = False
    """True if `update` also takes `loss_fn`, the state's loss with its present parameters and scalars."""
    takes_ignore_index: bool = False
    """True if `update` also takes `ignore_index`, the index that the state's loss leaves out; see `of_loss`."""
    takes_weights: bool = False
    """True if targets may be a `Mixture.weighted`, as the weights of examples require; see `weighted`."""
    is_sum: bool = False
    """True if accumulators add up: that of two batches is the sum, number by number, of what each adds to an empty one.
    Several processes then measure a part each; otherwise each measures everything."""
    higher_is_better: bool | None = None
    """Whether higher values are better, for rules that stop, keep or rank; `None` if it is not known."""
    name: str = ""
    """The name in records, if the metric is given without one; see `as_metrics`."""


class Mean(NamedTuple):
    """Accumulator of a mean, used by most metrics."""

    total: Tensor
    """Sum so far, 0-d: int64 (exact) for accuracies, else float64, or float32 on devices without it."""
    number: Tensor
    """Number of examples or positions that counted so far, 0-d int64; floating if a loss weights them."""

    def value(self) -> Tensor:
        """Return total / number, 0-d float; NaN if nothing counted."""
        return self.total / self.number


def of_loss(metric: Metric, loss_fn: Any) -> Metric:
    """Return the metric, adapted to the loss of a state.

    A metric that ignores an index uses the `ignore_index` of the loss, unless it was given one. If the model computes
    its own loss, a metric of logits reads the outputs' `logits` and the labels named by the loss.

    Args:
        metric: A metric; one that does neither is returned unchanged.
        loss_fn: The state's loss. It declares the index as `ignore_index`: an attribute, or an argument of torch's
            cross entropy and of functools.partial.

    Example:
        >>> from purecompose.losses import CrossEntropy
        >>> from purecompose.metrics import accuracy
        >>> outputs, targets = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]), torch.tensor([1, 0, 0])
        >>> metric = of_loss(accuracy, CrossEntropy(ignore_index=0))
        >>> metric.compute(metric.update(metric.init(), outputs, targets)).item()
        1.0
        >>> metric, batch = of_loss(accuracy, ModelLoss(shift=1)), {"labels": torch.tensor([[0, 1, 1]])}
        >>> outputs = {"logits": torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]])}
        >>> metric.compute(metric.update(metric.init(), outputs, batch)).item()
        0.5
    """
    inner = metric.update
    ignore_index = ignore_index_of(loss_fn)
    if metric.takes_ignore_index and ignore_index is not None:
        inner = functools.partial(inner, ignore_index=ignore_index)
    if not (metric.takes_logits and isinstance(loss_fn, ModelLoss)):
        return metric._replace(update=inner)

    def update(acc: Any, outputs: Any, given: Any, **options: Any) -> Any:
        pair = (outputs, given) if isinstance(outputs, Tensor) else loss_fn.logits_and_labels(outputs, given)
        return inner(acc, *pair, **options)

    return metric._replace(update=update)


def counting(metric: Metric, num_examples: int) -> Callable[..., Any]:
    """Return a metric's `update` for a batch of `num_examples` examples.

    Args:
        metric: A metric.
        num_examples: Number of examples in the batch.
    """
    return functools.partial(metric.update, num_examples=num_examples) if metric.takes_count else metric.update


def is_lower_better(name: str, metric: Metric | None = None) -> bool | None:
    """Return whether lower values of a metric are better; `None` if this is not known.

    A metric declares it by `higher_is_better`, as those of this module and of torchmetrics do. Without a declaration
    the name decides if it is "loss", "error" or "accuracy".

    Args:
        name: Name of the metric, with or without a label before it.
        metric: The metric, if it is at hand.

    Example:
        >>> is_lower_better("eval/loss"), is_lower_better("eval/accuracy"), is_lower_better("eval/rmse")
        (True, False, None)
    """
    if metric is not None and metric.higher_is_better is not None:
        return not metric.higher_is_better
    return {"loss": True, "error": True, "accuracy": False}.get(name.rpartition("/")[2])


def init_mean(device: Device = None) -> Mean:
    """Return a mean of nothing so far."""
    # In float32, further examples are rounded away after some millions; Apple's GPUs have no wider dtype.
    is_mps = device is not None and torch.device(device).type == "mps"
    total = torch.zeros((), dtype=torch.float32 if is_mps else torch.float64, device=device)
    return Mean(total, torch.zeros((), dtype=torch.int64, device=device))


def top_k(k: int, *, ignore_index: int | None = None) -> Metric:
    """Return a metric for the share of positions whose class is among the k with the highest outputs.

    Outputs are (N, C, ...); targets are indices (N, ...), dense (N, C, ...) or a `Mixture`, of which the class with the
    largest weight is used. Positions with a negative index, with `ignore_index`, or with a dense row of zeros do not
    count. The order of equal outputs is torch's. Several labels at a position, dense rows that add up to more than 1,
    are an error, for which compiled steps and populations do not look.

    Args:
        k: Number of guesses allowed, at least 1.
        ignore_index: The target index to ignore; by default that of the state's loss, or -100.

    Raises:
        TypeError, ValueError: k is not an int of at least 1 (raised immediately), or there are fewer than max(2, k)
            classes, or several labels (at an update).

    Example:
        >>> metric, outputs = top_k(2), torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]])
        >>> metric.compute(metric.update(metric.init(), outputs, torch.tensor([1, 2]))).item()
        0.5
    """
    check_whole(k, "top_k: k", 1)
    name, where = ("accuracy", "accuracy") if k == 1 else (f"top_{k}", "top_k")

    def init(device: Device = None) -> Mean:
        none = torch.zeros((), dtype=torch.int64, device=device)
        return Mean(none, none)

    def update(acc: Mean, outputs: Tensor, targets: Tensor | Mixture, ignore_index: int = -100) -> Mean:
        classes, counted = _classes(where, outputs, targets, ignore_index)
        if outputs.shape[1] < k:
            raise ValueError(
                f"{where}: expected outputs (N, C, ...) with at least {k} classes, got shape {tuple(outputs.shape)}"
            )
        if k == 1:
            hits = outputs.argmax(dim=1) == classes
        else:
            hits = (outputs.topk(k, dim=1).indices == classes.unsqueeze(1)).any(dim=1)
        return Mean(acc.total + (hits & counted).sum(), acc.number + counted.sum())

    return _of_classes(Metric(init, update, Mean.value, is_sum=True, higher_is_better=True, name=name), ignore_index)


def iou(num_classes: int, *, ignore_index: int | None = None) -> Metric:
    """Return a metric for the intersection over union of the predicted classes, |P and T| / |P or T|, averaged over the
    classes that occur.

    Sizes are counted over all examples together. Outputs and targets are as for `top_k`.

    Args:
        num_classes: C, the number of classes, at least 2.
        ignore_index: As for `top_k`.

    Raises:
        TypeError, ValueError: `num_classes` is not an integer of at least 2 (raised immediately), or the outputs have
            another number of classes (at the first update).

    Example:
        >>> metric, outputs = iou(2), torch.tensor([[[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]])
        >>> metric.compute(metric.update(metric.init(), outputs, torch.tensor([[1, 0, 0]]))).item()
        0.5
    """
    return _of_counts("iou", num_classes, ignore_index, lambda both, found, wanted: both / (found + wanted - both))


def balanced_accuracy(num_classes: int, *, ignore_index: int | None = None) -> Metric:
    """Return a metric for the accuracy of each class, |P and T| / |T|, averaged over the classes that occur: rare ones
    count as much as frequent ones. It is also called the macro average of the recall.

    Args:
        num_classes: C, the number of classes, at least 2.
        ignore_index: As for `top_k`.

    Raises:
        TypeError, ValueError: As for `iou`.

    Example:
        >>> metric, outputs = balanced_accuracy(2), torch.tensor([[1.0, 0.0]]).expand(4, 2)
        >>> metric.compute(metric.update(metric.init(), outputs, torch.tensor([0, 0, 0, 1]))).item()
        0.5
    """
    return _of_counts("balanced_accuracy", num_classes, ignore_index, lambda both, found, wanted: both / wanted)


def f1(num_classes: int, *, ignore_index: int | None = None) -> Metric:
    """Return a metric for the F1 score of each class, 2 |P and T| / (|P| + |T|), averaged over the classes that occur
    among predictions or targets (the macro average).

    Args:
        num_classes: C, the number of classes, at least 2.
        ignore_index: As for `top_k`.

    Raises:
        TypeError, ValueError: As for `iou`.

    Example:
        >>> metric, outputs = f1(2), torch.tensor([[1.0, 0.0]]).expand(4, 2)
        >>> round(metric.compute(metric.update(metric.init(), outputs, torch.tensor([0, 0, 0, 1]))).item(), 4)
        0.4286
    """
    return _of_counts("f1", num_classes, ignore_index, lambda both, found, wanted: 2 * both / (found + wanted))


_Counts = tuple[Tensor, Tensor, Tensor]
"""Numbers of positions by class, int64 (C,): found and wanted, found, wanted."""


def _of_counts(name: str, num_classes: int, ignore_index: int | None, ratio: Callable[..., Tensor]) -> Metric:
    """Return the mean over classes of a ratio of counts; 0 / 0, of a class that does not occur, is left out."""
    check_whole(num_classes, f"metrics.{name}: num_classes", 2)

    def init(device: Device = None) -> _Counts:
        empty = torch.zeros(num_classes, dtype=torch.int64, device=device)
        return empty, empty, empty

    def update(acc: _Counts, outputs: Tensor, targets: Tensor | Mixture, ignore_index: int = -100) -> _Counts:
        classes, counted = _classes(name, outputs, targets, ignore_index)
        if outputs.shape[1] != num_classes:
            raise ValueError(f"metrics.{name}: expected {num_classes} classes in dim 1, got {tuple(outputs.shape)}")
        numbers = torch.arange(num_classes, device=outputs.device)
        found = (outputs.argmax(dim=1)[..., None] == numbers) & counted[..., None]
        wanted = (classes[..., None] == numbers) & counted[..., None]
        both, found, wanted = (part.flatten(0, -2).sum(0) for part in (found & wanted, found, wanted))
        return acc[0] + both, acc[1] + found, acc[2] + wanted

    def compute(acc: _Counts) -> Tensor:
        return ratio(*acc).nanmean()

    return _of_classes(Metric(init, update, compute, is_sum=True, higher_is_better=True, name=name), ignore_index)


def _of_classes(metric: Metric, ignore_index: int | None) -> Metric:
    """Return a metric of logits and classes, whose `update` takes `ignore_index`, with the given index if there is one.

    Without one it is that of the state's loss.
    """
    update = metric.update
    if ignore_index is not None:
        update = functools.partial(update, ignore_index=ignore_index)
    return metric._replace(update=update, takes_logits=True, takes_ignore_index=ignore_index is None)


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
            "as metrics.binary_accuracy does, or `lambda outputs, targets: ((outputs > 0) == targets).all(1)`"
        )
    return targets.argmax(dim=1), targets.any(dim=1)


accuracy: Metric = top_k(1)  # made last, with all that it needs
"""The share of examples whose target has the highest output; `top_k(1)`."""
