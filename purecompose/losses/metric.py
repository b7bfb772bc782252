"""A metric as three pure functions, and the accumulator of a mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose.losses.from_model import ModelLoss
from purecompose.losses.terms import ignore_index_of


Device = torch.device | str | None


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


def init_mean(device: Device = None) -> Mean:
    """Return a mean of nothing so far.

    Args:
        device: Where its tensors are.
    """
    # In float32, further examples are rounded away after some millions; Apple's GPUs have no wider dtype.
    is_mps = device is not None and torch.device(device).type == "mps"
    total = torch.zeros((), dtype=torch.float32 if is_mps else torch.float64, device=device)
    return Mean(total, torch.zeros((), dtype=torch.int64, device=device))
