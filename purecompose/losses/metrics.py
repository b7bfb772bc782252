"""Metrics as three pure functions: `init` an accumulator, `update` it with a batch, `compute` the value.

Accumulators hold a sum over examples and their number, so that a metric does not depend on how the examples
were cut into batches. They stay on the device: nothing is read back before the caller reads the value.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purecompose.losses import (
    CrossEntropy,
    ModelLoss,
    check_loss,
    counts_terms,
    cross_entropy,
    evaluate_parts,
    num_terms,
    share_of_mean,
)
from purecompose.losses.class_metrics import accuracy as accuracy, dice as dice, iou as iou, top_k as top_k
from purecompose.losses.evaluation import check_pairs
from purecompose.losses.metric import (
    Device,
    Mean as Mean,
    Metric as Metric,
    counting as counting,
    init_mean,
    is_lower_better as is_lower_better,
    of_loss as of_loss,
    read_by as read_by,
)
from purecompose.losses.targets import Mixture, num_examples as count_examples


def mean_loss(loss_fn: Callable[..., Any] | None = None) -> Metric:
    """Return a metric for the loss of all batches as if they were one: batch means weighted by `losses.num_terms`.

    The weights are numbers of examples or, for a loss that reports what it counts, numbers of those positions: tokens,
    not padding.

    Args:
        loss_fn: A loss without parameters; by default that of the evaluated state, with its parts, whose means are
            reported as "loss/part". Terms that algorithms add to the training loss at AFTER_LOSS are not included.

    Raises:
        TypeError: `loss_fn` is not a loss.
        ValueError: It is a module with parameters, whose trained values are in the state.

    Example:
        >>> metric = mean_loss(torch.nn.functional.mse_loss)
        >>> acc = metric.update(metric.init(), torch.tensor([3.0]), torch.tensor([0.0]))
        >>> metric.compute(metric.update(acc, torch.zeros(2), torch.zeros(2))).item()
        3.0
    """
    if loss_fn is None:
        return _sum_of(lambda device=None: {}, _with_parts, _values, takes_loss=True, higher_is_better=False)
    check_loss(loss_fn)
    if isinstance(loss_fn, torch.nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ValueError(
            f"metrics.mean_loss: {type(loss_fn).__name__} has parameters, whose trained values are in the state: write "
            "mean_loss(), which is the loss of the state"
        )

    def update(acc: Mean, outputs: Any, targets: Any, num_examples: int | None = None) -> Mean:
        return _with_parts({"": acc}, outputs, targets, num_examples, loss_fn)[""]

    # A model's own loss does not read targets, but it counts the labels in the batch.
    reads_batch, takes_logits = isinstance(loss_fn, ModelLoss), isinstance(loss_fn, CrossEntropy)
    return _sum_of(init_mean, update, Mean.value, reads_batch, takes_logits, higher_is_better=False)


def perplexity(loss_fn: Callable[..., Tensor] | None = None) -> Metric:
    """Return a metric for exp(`mean_loss`): how many equally likely classes a language model chooses from on average.

    Args:
        loss_fn: A mean of -log p over positions, in nats; by default cross entropy without the index that the state's
            loss leaves out.

    Raises:
        TypeError: `loss_fn` is not a loss.

    Example:
        >>> metric = perplexity()
        >>> round(metric.compute(metric.update(metric.init(), torch.zeros(2, 8, 5), torch.ones(2, 5).long())).item(), 4)
        8.0
    """
    mean = mean_loss(cross_entropy if loss_fn is None else loss_fn)

    def update(acc: Mean, outputs: Any, targets: Any, ignore_index: int = -100, **options: Any) -> Mean:
        return mean_loss(CrossEntropy(ignore_index)).update(acc, outputs, targets, **options)

    if loss_fn is None:
        mean = mean._replace(update=update, takes_ignore_index=True)
    return mean._replace(compute=lambda acc: Mean.value(acc).exp())


def from_function(fn: Callable[[Any, Any], Tensor], *, higher_is_better: bool | None = None) -> Metric:
    """Return a metric for the mean over examples of a plain function of (outputs, targets).

    The function returns a value for each example, (N,) or (N, ...), averaged over the other dims; or a 0-d mean
    of the batch, weighted by its number of examples. A `Mixture` is passed to it as dense targets.

    Args:
        fn: A function of (outputs, targets).
        higher_is_better: Whether higher values are better, if a rule is to stop, keep or rank by them.

    Raises:
        TypeError: `fn` is not callable, or it does not return a tensor.
        ValueError: The tensor it returns is neither 0-d nor has one row per example, or it compares each output with
            each target, as (N, 1) with (N,).

    Example:
        >>> metric = from_function(lambda outputs, targets: (outputs - targets).abs())
        >>> metric.compute(metric.update(metric.init(), torch.tensor([1.0, 2.0]), torch.zeros(2))).item()
        1.5
    """
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"expected a function (outputs, targets) -> tensor, got {fn!r} ({type(fn).__name__})")

    def update(
        acc: Mean, outputs: Any, targets: Any, num_examples: int | None = None, ignore_index: int = -100
    ) -> Mean:
        if isinstance(targets, Mixture):
            targets = targets.soft(outputs, ignore_index=ignore_index)
        values = fn(outputs, targets)
        count = count_examples(outputs, targets) if num_examples is None else num_examples
        _check_values(fn, values, count)
        check_pairs(fn, outputs, targets)
        values = values.detach().to(acc.total.dtype)
        rows = values.flatten(1).mean(1).sum() if values.ndim > 1 else values.sum()
        return Mean(acc.total + (rows if values.ndim else values * count), acc.number + count)

    return _sum_of(init_mean, update, Mean.value, takes_ignore_index=True, higher_is_better=higher_is_better)


def as_metric(value: Metric | Callable[..., Tensor]) -> Metric:
    """Return a metric unchanged; convert one of torchmetrics by `from_torchmetrics`, a loss that reports its number of
    terms by `mean_loss`, and any other function by `from_function`.

    Args:
        value: A metric, a metric of torchmetrics, a loss, or a function of (outputs, targets).

    Raises:
        TypeError: The value is none of these, or is another object that accumulates internally.

    Example:
        >>> as_metric(accuracy) is accuracy
        True
    """
    if isinstance(value, Metric):
        return value
    if hasattr(value, "metric_state"):
        return from_torchmetrics(value)
    if hasattr(value, "compute") and hasattr(value, "reset"):
        raise TypeError(
            f"expected a metric without internal state, got {type(value).__name__}, which accumulates "
            "values; use its functional form, one of torchmetrics, or write a Metric"
        )
    if not callable(value) or isinstance(value, type):
        raise TypeError(
            "expected a Metric or a function (outputs, targets) -> value per example, got "
            f"{value!r} ({type(value).__name__}); see purecompose.metrics"
        )
    return mean_loss(value) if counts_terms(value) else from_function(value)


def from_torchmetrics(metric: Any) -> Metric:
    """Return a metric of torchmetrics as three pure functions; the object itself is copied and not changed.

    Its states (`metric_state`) are the accumulator. Its `update(preds, target)` is called with `(outputs, targets)`; a
    `Mixture` is passed as dense targets. The result should be a single number, to appear in records. For a population
    it must not inspect values: use `validate_args=False`.

    Args:
        metric: A metric such as `torchmetrics.classification.MulticlassF1Score(num_classes=10)`.

    Raises:
        TypeError: The object is not a metric, or contains other metrics, as a `MetricCollection` does; pass its
            members one by one.
    """
    if isinstance(metric, type) or not all(
        hasattr(metric, name) for name in ("metric_state", "higher_is_better", "compute")
    ):
        raise TypeError(
            f"expected a metric of torchmetrics, got {metric!r:.80}; pass members of a collection one by one"
        )
    inside = [member for member in metric.modules() if member is not metric and hasattr(member, "metric_state")]
    if inside or not metric.metric_state:
        raise TypeError(
            f"{type(metric).__name__} keeps its state in other metrics, which is not supported: pass these one by one"
        )
    blank = copy.deepcopy(metric)
    blank.reset()

    def filled(acc: dict[str, Any]) -> Any:
        # Each call works on its own copy, because torchmetrics adds up in place and caches results.
        worker = copy.deepcopy(blank)
        for name, value in acc.items():
            setattr(worker, name, list(value) if isinstance(value, list) else value.clone())
        return worker

    def init(device: Device = None) -> dict[str, Any]:
        fresh = copy.deepcopy(blank)
        return dict((fresh if device is None else fresh.to(device)).metric_state)

    def update(acc: dict[str, Any], outputs: Any, targets: Any, ignore_index: int = -100) -> dict[str, Any]:
        worker = filled(acc)
        if isinstance(targets, Mixture):
            targets = targets.soft(outputs, ignore_index=ignore_index)
        worker.update(outputs, targets)
        return dict(worker.metric_state)

    def compute(acc: dict[str, Any]) -> Tensor:
        worker = filled(acc)
        worker._update_count = 1  # otherwise it warns that `update` was not called
        return worker.compute()

    reductions = getattr(blank, "_reductions", {"": None}).values()
    is_sum = all(getattr(reduction, "__name__", "") == "dim_zero_sum" for reduction in reductions)
    higher = blank.higher_is_better
    return Metric(init, update, compute, takes_ignore_index=True, is_sum=is_sum, higher_is_better=higher)


_sum_of = functools.partial(Metric, takes_count=True, is_sum=True)


def _with_parts(
    acc: dict[str, Mean], outputs: Any, targets: Any, num_examples: int | None = None, loss_fn: Any = None
) -> dict[str, Mean]:
    """Return the means of the loss, called "", and of its parts, with one more batch."""
    assert loss_fn is not None
    loss, parts = evaluate_parts(loss_fn, outputs, targets)
    if loss.ndim:
        raise ValueError(
            f"expected the mean over the batch, a 0-d tensor, from the loss {loss_fn!r}, got shape {tuple(loss.shape)}"
        )
    check_pairs(loss_fn, outputs, targets)
    terms, found = num_terms(loss_fn, outputs, targets, num_examples), dict(acc)
    for name, value in {"": loss, **parts}.items():
        total, number = acc.get(name) or init_mean(loss.device)
        # With a total of 1 the share is value * terms, or zero if nothing in the batch counts.
        found[name] = Mean(total + share_of_mean(value.detach().to(total.dtype), terms, 1), number + terms)
    return found


def _values(acc: dict[str, Mean]) -> Any:
    return {name: mean.value() for name, mean in acc.items()}


def _check_values(fn: object, values: object, count: int) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(
            f"expected a tensor from the metric {fn!r}, got {type(values).__name__}; return a 0-d tensor, "
            "or one value for each example (a Python number would wait for the device)"
        )
    if values.ndim and values.shape[0] != count:
        raise ValueError(
            f"expected a 0-d tensor or {count} rows, one per example, from the metric {fn!r}, got shape "
            f"{tuple(values.shape)}; keep the batch dim first or average over it; to leave examples out, write a "
            "Metric(init, update, compute), whose accumulator counts those that it includes"
        )
