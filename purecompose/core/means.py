"""Means over slices of the batch, weighted by the terms of their losses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purecompose import losses, tree
from purecompose._support.device import as_scalar
from purecompose._support.internals import is_fake, is_transforming
from purecompose.core.state import State
from purecompose.losses.evaluation import check_interpolation
from purecompose.losses.targets import Mixture
from purecompose.losses.terms import denominators_of, has_denominators
from purecompose.losses.weights import has_weights
from purecompose.metrics import Metric


@torch.no_grad()
def num_terms(state: State) -> int | Tensor:
    """Return how many terms the loss is a mean of, from the outputs and targets that it was given.

    It is the weight of a microbatch's gradient in the mean over microbatches.
    """
    loss_fn = state.context.loss
    counts = losses.counts_terms(loss_fn) or has_weights(state.context.target_field)
    if losses.couples_examples(loss_fn) or has_denominators(loss_fn) or not counts:
        return state.num_examples
    # A model that computes its own loss looks up its targets in the batch itself.
    targets = state.batch if isinstance(loss_fn, losses.ModelLoss) else state.targets
    outputs, num = state.outputs, state.num_examples
    return state.call_loss(lambda loss: losses.num_terms(loss, outputs, targets, num), train=True)[0]


@torch.no_grad()
def denominators(state: State, count: Callable[[State], Any] | None = None) -> Any:
    """Return the numbers by which the loss of the state's batch divides; `None` if it does not declare them.

    A slice has its share of those of the whole batch, in proportion to its examples. The mean over slices, weighted by
    examples, of sums divided by them is then the sum over the batch divided by its denominators.

    Args:
        state: The state.
        count: Function that returns those of a stage that computes the loss; by default, they are those of the state's
            loss.
    """
    loss_fn = state.context.loss
    if state.denominators is not None:
        return state.denominators
    if count is not None:
        found = count(state)
    elif losses.couples_examples(loss_fn) or not has_denominators(loss_fn):
        return None
    else:
        targets = state.targets
        found, _ = state.call_loss(lambda loss: denominators_of(loss, targets), train=True)
    return tree.map(lambda number: as_scalar(number, state.context.loss_dtype, state.device), found)


def part_of(denominators: Any, size: int, total: int) -> Any:
    """Return the share of a slice of `size` among `total` examples in the denominators of the loss."""
    return None if denominators is None else tree.map(lambda number: number * (size / total), denominators)


@torch.no_grad()
def check_terms(state: State) -> None:
    """Raise, right after the loss, if terms of a model's own loss, or of interpolated losses, would be miscounted."""
    reads_values = not is_transforming() and not is_fake(state.key)
    if isinstance(state.context.loss, losses.ModelLoss):
        state.context.loss.check(state.outputs, state.batch, reads_values=reads_values)
    elif reads_values:
        outputs, targets = state.outputs, state.targets
        state.call_loss(lambda loss: check_interpolation(loss, outputs, targets), train=True)


def has_mean(metric: Any) -> bool:
    """Return whether `Microbatches` averages a metric over the slices: a single floating number."""
    return isinstance(metric, Tensor) and metric.ndim == 0 and metric.is_floating_point()


def averaged_grads(
    means: dict[str, Tensor] | None, grads: dict[str, Tensor], weight: int | Tensor, total: int | Tensor
) -> dict[str, Tensor]:
    """Return the means updated with one slice's gradients; they are zero for parameters that a slice does not reach."""
    if means is not None and means.keys() != grads.keys():
        means = {**{name: torch.zeros_like(grad) for name, grad in grads.items()}, **means}
        grads = {name: grads[name] if name in grads else torch.zeros_like(mean) for name, mean in means.items()}
    means = means or {}
    return {name: averaged(means.get(name), grad, weight, total) for name, grad in grads.items()}


def averaged(mean: Tensor | None, value: Tensor, weight: int | Tensor, total: int | Tensor) -> Tensor:
    """Return the weighted mean updated with one more value; a value of weight 0 (a mean of nothing, NaN) is ignored.

    It is a running mean, so that only one set of gradients is alive besides the slice's own, whatever the number of
    slices. If no value has weight, the result is the first value, as for the whole batch.
    """
    if mean is None:
        return value
    if not isinstance(weight, Tensor) and not isinstance(total, Tensor):
        return torch.lerp(mean, value, weight / total)
    # Fill on the device: a copy from the host would wait for the GPU.
    weight = weight if isinstance(weight, Tensor) else torch.full((), weight, device=value.device)
    total = total if isinstance(total, Tensor) else torch.full((), total, device=value.device)
    share = weight.to(value.dtype) / torch.where(total > 0, total, 1).to(value.dtype)
    # Before the first value with weight the mean may be NaN, which lerp would keep.
    mixed = torch.where(weight < total, torch.lerp(mean, value, share), value)
    return torch.where(weight > 0, mixed, mean)


def targets_of_loss(state: State) -> Any:
    """Return the targets that the state's loss is given; `None` for a model's own loss."""
    return None if isinstance(state.context.loss, losses.ModelLoss) else state.targets


def targets_of_metric(metric: Metric, state: State) -> Any:
    """Return the second argument of a metric's `update`: the batch's target, without the weights of examples if the
    metric does not take them, or the whole batch for a model with its own loss, whose batches may have no target.

    Args:
        metric: A metric.
        state: A state with a batch.
    """
    if metric.reads_batch or (metric.takes_loss and isinstance(state.context.loss, losses.ModelLoss)):
        return state.batch
    if not isinstance(state.context.loss, losses.ModelLoss):
        targets = state.targets
        drops = isinstance(targets, Mixture) and targets.is_weighted and not metric.takes_weights
        return targets.unweighted() if drops else targets
    try:
        targets = state.targets
    except KeyError:
        return state.batch
    return state.batch if targets is None else targets
