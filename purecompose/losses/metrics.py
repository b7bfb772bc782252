"""Metrics as three pure functions: `init` an accumulator, `update` it by a batch, `compute` the value.

Accumulators are sums over examples and their number, so that a metric does not depend on how the examples
were cut into batches. They stay on the device: nothing is read back before the caller reads the value.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from purecompose._support.checks import check_whole
from purecompose.losses import (
    CrossEntropy,
    ModelLoss,
    check_loss,
    counts_terms,
    cross_entropy,
    evaluate_loss,
    num_terms,
    share_of_mean,
)
from purecompose.losses.targets import Mixture, has_index_targets, num_examples as leading_size


__all__ = [
    "Mean",
    "Metric",
    "accuracy",
    "as_metric",
    "counting",
    "dice",
    "from_function",
    "from_torchmetrics",
    "is_lower_better",
    "mean_loss",
    "of_model",
    "perplexity",
    "read_by",
    "top_k",
]

Device = torch.device | str | None


class InitFn(Protocol):
    """`init(device=None) -> acc`: the accumulator of no examples."""

    def __call__(self, device: Device = None) -> Any: ...


class UpdateFn(Protocol):
    """`update(acc, outputs, targets) -> acc`: the accumulator with one more batch."""

    def __call__(self, acc: Any, outputs: Any, targets: Any) -> Any: ...


class ComputeFn(Protocol):
    """`compute(acc) -> value`, 0-d; NaN of no examples."""

    def __call__(self, acc: Any, /) -> Tensor: ...


class Metric(NamedTuple):
    """Three pure functions; the accumulator is any pytree of tensors.

    Example:
        >>> acc = accuracy.init()
        >>> acc = accuracy.update(acc, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
        >>> accuracy.compute(acc).item()
        0.5
    """

    init: InitFn
    update: UpdateFn
    compute: ComputeFn
    reads_batch: bool = False
    """Whether `update` takes the whole batch in the targets' place, as a model's own loss does."""
    takes_logits: bool = False
    """Whether `update` takes logits (N, C, ...) and class indices, so that it can be given those of a model with a loss
    of its own; see `of_model`."""
    takes_count: bool = False
    """Whether `update` takes a further `num_examples`, the batch's number of examples where they are not its rows."""


class Mean(NamedTuple):
    """The accumulator of the metrics here."""

    total: Tensor
    """0-d, the sum so far: int64, exact, for accuracies; else float64, or float32 on devices without it."""
    number: Tensor
    """0-d, int64: how many examples or positions counted so far; floating where a loss weighs them."""

    def value(self) -> Tensor:
        """0-d, float: total / number; NaN where nothing counted."""
        return self.total / self.number


def top_k(k: int, *, ignore_index: int = -100) -> Metric:
    """Return the share of positions whose class is among the k with the highest outputs.

    Outputs are (N, C, ...), targets indices (N, ...), dense (N, C, ...) or a `Mixture`; of the last two the
    class is the heaviest. Positions with a negative index, with `ignore_index`, or with a dense row of zeros
    do not count. Which of equal outputs ranks first is torch's choice.

    Args:
        k: How many guesses are allowed, at least 1.
        ignore_index: The index that stands for no class.

    Raises:
        ValueError: k below 1, at once; fewer than max(2, k) classes, at the first update.

    Example:
        >>> metric, outputs = top_k(2), torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]])
        >>> metric.compute(metric.update(metric.init(), outputs, torch.tensor([1, 2]))).item()
        0.5
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"top_k: expected k as an int of at least 1, got k={k!r} ({type(k).__name__})")

    def init(device: Device = None) -> Mean:
        return Mean(_zero(torch.int64, device), _zero(torch.int64, device))

    def update(acc: Mean, outputs: Tensor, targets: Tensor | Mixture) -> Mean:
        classes, counted = _classes(outputs, targets, ignore_index)
        if outputs.shape[1] < max(2, k):
            raise ValueError(
                f"top_k: expected outputs (N, C, ...) with at least {max(2, k)} classes, got shape "
                f"{tuple(outputs.shape)}; for one logit per example use a function: "
                "`lambda outputs, targets: (outputs > 0) == targets`"
            )
        if k == 1:
            hits = outputs.argmax(dim=1) == classes
        else:
            hits = (outputs.topk(k, dim=1).indices == classes.unsqueeze(1)).any(dim=1)
        return Mean(acc.total + (hits & counted).sum(), acc.number + counted.sum())

    return Metric(init, update, Mean.value, takes_logits=True)


accuracy = top_k(1)


def dice(num_classes: int, *, ignore_index: int = -100) -> Metric:
    """Return the Dice coefficient of the predicted classes, 2 |P and T| / (|P| + |T|), a mean over the classes that
    occur.

    Sizes are counted over all examples together. Outputs and targets as for `top_k`.

    Args:
        num_classes: C, the number of classes.
        ignore_index: The index that stands for no class.

    Raises:
        TypeError, ValueError: No whole number from 1 on, at once; outputs of other classes, at the first update.

    Example:
        >>> metric, outputs = dice(2), torch.tensor([[[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]])
        >>> round(metric.compute(metric.update(metric.init(), outputs, torch.tensor([[1, 0, 0]]))).item(), 4)
        0.6667
    """
    check_whole(num_classes, "metrics.dice: num_classes", 1)

    def init(device: Device = None) -> tuple[Tensor, Tensor]:
        empty = torch.zeros(num_classes, dtype=torch.int64, device=device)
        return empty, empty

    def update(acc: tuple[Tensor, Tensor], outputs: Tensor, targets: Tensor | Mixture) -> tuple[Tensor, Tensor]:
        if outputs.shape[1] != num_classes:
            raise ValueError(f"metrics.dice: expected {num_classes} classes in dim 1, got {tuple(outputs.shape)}")
        classes, counted = _classes(outputs, targets, ignore_index)
        numbers = torch.arange(num_classes, device=outputs.device)
        found = (outputs.argmax(dim=1)[..., None] == numbers) & counted[..., None]
        wanted = (classes[..., None] == numbers) & counted[..., None]
        both, either = (part.flatten(0, -2).sum(0) for part in (found & wanted, found.long() + wanted.long()))
        return acc[0] + both, acc[1] + either

    def compute(acc: tuple[Tensor, Tensor]) -> Tensor:
        both, either = acc
        return (2 * both / either).nanmean()  # an absent class is 0 / 0

    return Metric(init, update, compute, takes_logits=True)


def mean_loss(loss_fn: Callable[..., Tensor]) -> Metric:
    """Return the loss of all batches as if they were one: each batch's mean weighted by its `losses.num_terms`.

    That is by examples or, for a loss that tells what it counts, by those positions: tokens, not padding.

    Raises:
        TypeError: Not a loss.

    Example:
        >>> metric = mean_loss(torch.nn.functional.mse_loss)
        >>> acc = metric.update(metric.init(), torch.tensor([3.0]), torch.tensor([0.0]))
        >>> metric.compute(metric.update(acc, torch.zeros(2), torch.zeros(2))).item()
        3.0
    """
    check_loss(loss_fn)

    def update(acc: Mean, outputs: Any, targets: Any, num_examples: int | None = None) -> Mean:
        loss = evaluate_loss(loss_fn, outputs, targets).detach().to(acc.total.dtype)
        if num_examples is None or counts_terms(loss_fn):
            terms = num_terms(loss_fn, outputs, targets)
        else:
            terms = num_examples
        # Over a total of one the share is loss * terms, and zero where the batch has none to count.
        return Mean(acc.total + share_of_mean(loss, terms, 1), acc.number + terms)

    # A model's own loss does not read targets, but counts its labels in the batch.
    reads_batch, takes_logits = isinstance(loss_fn, ModelLoss), isinstance(loss_fn, CrossEntropy)
    return Metric(_init_mean, update, Mean.value, reads_batch, takes_logits, takes_count=True)


def perplexity(loss_fn: Callable[..., Tensor] = cross_entropy) -> Metric:
    """exp(loss), of `mean_loss`: out of how many equally likely classes a language model chooses on average.

    Args:
        loss_fn: A mean of -log p over positions, in nats.

    Raises:
        TypeError: Not a loss.

    Example:
        >>> metric = perplexity()
        >>> round(metric.compute(metric.update(metric.init(), torch.zeros(2, 8, 5), torch.ones(2, 5).long())).item(), 4)
        8.0
    """
    mean = mean_loss(loss_fn)
    return mean._replace(compute=lambda acc: mean.compute(acc).exp())


def from_function(fn: Callable[[Any, Any], Tensor]) -> Metric:
    """Return the mean over examples of a plain function of (outputs, targets).

    The function gives a value for each example, (N,) or (N, ...), averaged over the other dims; or a 0-d mean
    of the batch, weighted by its number of examples. A `Mixture` reaches it as dense targets.

    Raises:
        TypeError: Not callable, or it returns no tensor.
        ValueError: What it returns is neither 0-d nor one row per example.

    Example:
        >>> metric = from_function(lambda outputs, targets: (outputs - targets).abs())
        >>> metric.compute(metric.update(metric.init(), torch.tensor([1.0, 2.0]), torch.zeros(2))).item()
        1.5
    """
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"expected a function (outputs, targets) -> tensor, got {fn!r} ({type(fn).__name__})")

    def update(acc: Mean, outputs: Any, targets: Any, num_examples: int | None = None) -> Mean:
        if isinstance(targets, Mixture):
            targets = targets.soft(outputs)
        values = fn(outputs, targets)
        count = leading_size(outputs, targets) if num_examples is None else num_examples
        _check_values(fn, values, count)
        values = values.detach().to(acc.total.dtype)
        rows = values.flatten(1).mean(1).sum() if values.ndim > 1 else values.sum()
        return Mean(acc.total + (rows if values.ndim else values * count), acc.number + count)

    return Metric(_init_mean, update, Mean.value, takes_count=True)


def as_metric(value: Metric | Callable[..., Tensor]) -> Metric:
    """Return a metric as it is; one of torchmetrics by `from_torchmetrics`; a loss that tells its number of terms as
    `mean_loss`; a function by `from_function`.

    Raises:
        TypeError: None of these, or another object that accumulates by itself.
    """
    if isinstance(value, Metric):
        return value
    if hasattr(value, "metric_state"):
        return from_torchmetrics(value)
    if hasattr(value, "compute") and hasattr(value, "reset"):
        raise TypeError(
            f"expected a metric without state of its own, got {type(value).__name__}, which accumulates "
            "inside; use its functional form, one of torchmetrics, or write a Metric"
        )
    if not callable(value) or isinstance(value, type):
        raise TypeError(
            "expected a Metric or a function (outputs, targets) -> value per example, got "
            f"{value!r} ({type(value).__name__}); see purecompose.metrics"
        )
    return mean_loss(value) if counts_terms(value) else from_function(value)


def from_torchmetrics(metric: Any) -> Metric:
    """Return a metric of torchmetrics as three pure functions; the object itself is copied and stays as it was.

    Its states (`metric_state`) are the accumulator. It sees `(outputs, targets)`, as `update(preds, target)`; a
    `Mixture` as dense targets. What it computes should be a single number, to appear in records. For a population it
    must not look at values: `validate_args=False`.

    Args:
        metric: Such as `torchmetrics.classification.MulticlassF1Score(num_classes=10)`.

    Raises:
        TypeError: It is none: a `MetricCollection`, for one, whose members
            are given one by one.
    """
    if isinstance(metric, type) or not all(
        hasattr(metric, name) for name in ("metric_state", "higher_is_better", "compute")
    ):
        raise TypeError(f"expected a metric of torchmetrics, got {metric!r:.80}; of a collection, give the members")
    inside = [member for member in metric.modules() if member is not metric and hasattr(member, "metric_state")]
    if inside or not metric.metric_state:
        raise TypeError(
            f"{type(metric).__name__} keeps its numbers in other metrics, out of sight: give these one by one"
        )
    blank = copy.deepcopy(metric)
    blank.reset()

    def filled(acc: dict[str, Any]) -> Any:
        # A copy for each call: what torchmetrics adds up in place, or remembers, belongs to this call.
        worker = copy.deepcopy(blank)
        for name, value in acc.items():
            setattr(worker, name, list(value) if isinstance(value, list) else value.clone())
        return worker

    def init(device: Device = None) -> dict[str, Any]:
        fresh = copy.deepcopy(blank)
        return dict((fresh if device is None else fresh.to(device)).metric_state)

    def update(acc: dict[str, Any], outputs: Any, targets: Any) -> dict[str, Any]:
        worker = filled(acc)
        worker.update(outputs, targets.soft(outputs) if isinstance(targets, Mixture) else targets)
        return dict(worker.metric_state)

    def compute(acc: dict[str, Any]) -> Tensor:
        worker = filled(acc)
        worker._update_count = 1  # else it warns that it has seen nothing
        return worker.compute()

    return Metric(init, update, compute)


def of_model(metric: Metric, loss_fn: Any) -> Metric:
    """Return the metric for outputs with a loss of their own: of these the `logits`, beside the labels that the loss
    names.

    Args:
        metric: A metric; one that does not take logits stays as it is.
        loss_fn: The state's loss; only for a `ModelLoss` something changes.

    Example:
        >>> metric, batch = of_model(accuracy, ModelLoss(shift=1)), {"labels": torch.tensor([[0, 1, 1]])}
        >>> outputs = {"logits": torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]])}
        >>> metric.compute(metric.update(metric.init(), outputs, batch)).item()
        0.5
    """
    if not (metric.takes_logits and isinstance(loss_fn, ModelLoss)):
        return metric
    inner: Callable[..., Any] = metric.update

    def update(acc: Any, outputs: Any, given: Any, **options: Any) -> Any:
        pair = (outputs, given) if isinstance(outputs, Tensor) else loss_fn.logits_and_labels(outputs, given)
        return inner(acc, *pair, **options)

    return metric._replace(update=update)


def counting(metric: Metric, num_examples: int | None) -> Callable[..., Any]:
    """Return a metric's `update` for a batch of so many examples; `None` where its rows are its examples."""
    if num_examples is None or not metric.takes_count:
        return metric.update
    update: Callable[..., Any] = metric.update
    return functools.partial(update, num_examples=num_examples)


def read_by(metric: Metric, state: Any) -> Any:
    """Return a metric's second argument: the batch's target, or the whole batch for a model with its own
    loss, whose batches may name no target.
    """
    if metric.reads_batch:
        return state.batch
    if not isinstance(state.context.loss, ModelLoss):
        return state.targets
    try:
        targets = state.targets
    except KeyError:
        return state.batch
    return state.batch if targets is None else targets


def is_lower_better(name: str) -> bool:
    """Return whether a metric is one of those that training makes smaller, by its name.

    Example:
        >>> is_lower_better("eval/loss"), is_lower_better("eval/accuracy")
        (True, False)
    """
    return any(word in name.lower() for word in ("loss", "error", "perplexity"))


def _zero(dtype: torch.dtype, device: Device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _init_mean(device: Device = None) -> Mean:
    # Single precision forgets examples after some millions; Apple's GPUs have nothing wider.
    is_mps = device is not None and torch.device(device).type == "mps"
    return Mean(_zero(torch.float32 if is_mps else torch.float64, device), _zero(torch.int64, device))


def _classes(outputs: Tensor, targets: Tensor | Mixture, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the class of each position and whether it counts, both (N, ...)."""
    if isinstance(targets, Mixture):
        targets = targets.soft(outputs, ignore_index=ignore_index)
    if has_index_targets(outputs, targets):
        return targets, (targets >= 0) & (targets != ignore_index)
    return targets.argmax(dim=1), targets.any(dim=1)


def _check_values(fn: object, values: object, count: int) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(
            f"expected a tensor from the metric {fn!r}, got {type(values).__name__}; return a 0-d tensor, "
            "or one value for each example (a Python number would wait for the device)"
        )
    if values.ndim and values.shape[0] != count:
        raise ValueError(
            f"expected a 0-d tensor or {count} rows, one per example, from the metric {fn!r}, got shape "
            f"{tuple(values.shape)}; keep the batch dim first or average over it"
        )
