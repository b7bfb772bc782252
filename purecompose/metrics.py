"""Metrics as three pure functions: `init` an accumulator, `update` it with a batch, `compute` the value.

Accumulators hold a sum over examples and their number, so that a metric does not depend on how the examples
were cut into batches. They stay on the device: nothing is read back before the caller reads the value. Metrics of
classes take outputs (N, C, ...); their targets are indices (N, ...), dense (N, C, ...) or a `Mixture`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.checks import check_whole
from purecompose._support.exports import lister
from purecompose._support.internals import has_values, is_transforming
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
from purecompose.losses.evaluation import check_pairs
from purecompose.losses.targets import Mixture, check_classes, has_index_targets, num_examples as count_examples
from purecompose.losses.terms import ignore_index_of


__dir__ = lister(__name__)


_Device = torch.device | str | None


class Metric(NamedTuple):
    """Three pure functions; the accumulator is any pytree of tensors.

    Args:
        init: `init(device) -> accumulator`, without any examples.
        update: `update(accumulator, outputs, targets) -> accumulator`, with one more batch.
        compute: `compute(accumulator) -> value`, 0-d; NaN without examples.

    Example:
        >>> from purecompose.metrics import accuracy
        >>> acc = accuracy.init()
        >>> acc = accuracy.update(acc, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
        >>> accuracy.compute(acc).item()
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
    is_sum: bool = False
    """True if accumulators add up: that of two batches is the sum, number by number, of what each adds to an empty one.
    Several processes then measure a part each; otherwise each measures everything."""
    higher_is_better: bool | None = None
    """Whether higher values are better, for rules that stop, keep or rank; `None` if it is not known."""


class Mean(NamedTuple):
    """Accumulator of a mean, used by most metrics of this module."""

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


def _init_mean(device: _Device = None) -> Mean:
    """Return a mean of nothing so far.

    Args:
        device: Where its tensors are.
    """
    # In float32, further examples are rounded away after some millions; Apple's GPUs have no wider dtype.
    is_mps = device is not None and torch.device(device).type == "mps"
    total = torch.zeros((), dtype=torch.float32 if is_mps else torch.float64, device=device)
    return Mean(total, torch.zeros((), dtype=torch.int64, device=device))


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

    def init(device: _Device = None) -> Mean:
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
    check_whole(num_classes, "metrics.iou: num_classes", 2)

    def init(device: _Device = None) -> tuple[Tensor, Tensor]:
        empty = torch.zeros(num_classes, dtype=torch.int64, device=device)
        return empty, empty

    def update(
        acc: tuple[Tensor, Tensor], outputs: Tensor, targets: Tensor | Mixture, ignore_index: int = -100
    ) -> tuple[Tensor, Tensor]:
        classes, counted = _classes("iou", outputs, targets, ignore_index)
        if outputs.shape[1] != num_classes:
            raise ValueError(f"metrics.iou: expected {num_classes} classes in dim 1, got shape {tuple(outputs.shape)}")
        numbers = torch.arange(num_classes, device=outputs.device)
        found = (outputs.argmax(dim=1)[..., None] == numbers) & counted[..., None]
        wanted = (classes[..., None] == numbers) & counted[..., None]
        both, sizes = (part.flatten(0, -2).sum(0) for part in (found & wanted, found.long() + wanted.long()))
        return acc[0] + both, acc[1] + sizes

    def compute(acc: tuple[Tensor, Tensor]) -> Tensor:
        both, sizes = acc
        return (both / (sizes - both)).nanmean()  # NaN for a class that does not occur

    return _of_classes(Metric(init, update, compute, is_sum=True, higher_is_better=True), ignore_index)


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
            "as by `lambda outputs, targets: (outputs > 0) == targets`, or only examples in which all are right, "
            "`((outputs > 0) == targets).all(1)`"
        )
    return targets.argmax(dim=1), targets.any(dim=1)


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
    return _sum_of(_init_mean, update, Mean.value, reads_batch, takes_logits, higher_is_better=False)


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

    return _sum_of(_init_mean, update, Mean.value, takes_ignore_index=True, higher_is_better=higher_is_better)


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

    def init(device: _Device = None) -> dict[str, Any]:
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
        total, number = acc.get(name) or _init_mean(loss.device)
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


accuracy: Metric = top_k(1)  # made last, with all that it needs
"""The share of examples whose target has the highest output; `top_k(1)`."""
