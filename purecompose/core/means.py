"""Losses of slices of the batch: means weighted by terms, and losses that couple the examples of several slices.

The mean over slices is the loss of the batch if the loss is a mean over examples, which `separable` checks. For one
that compares examples (`losses.over_batch`), the outputs of all slices are computed first, without a graph; their loss
has a gradient with respect to each output; and each slice runs again and propagates its part of that gradient back. See
"GradCache": Gao et al.: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup. 2021.
https://arxiv.org/abs/2101.06983
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, losses, tree
from purecompose._support.device import as_scalar
from purecompose._support.internals import has_values, is_any, is_fake, is_transforming
from purecompose._support.specs import shown
from purecompose.core.gradient import value_and_grads
from purecompose.core.operation import Carry, Purpose
from purecompose.core.ranks import SharedPart
from purecompose.core.state import State
from purecompose.losses.evaluation import check_interpolation, has_weights
from purecompose.losses.targets import Mixture
from purecompose.losses.terms import denominators_of, has_denominators
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


def with_whole_loss(carry: Carry, purpose: Purpose) -> Carry:
    """Set `whole_loss`: the loss of the outputs of all examples, whose targets are the batch, and its gradients."""
    del purpose
    state = carry.state
    outputs, targets = state.outputs, state.batch
    given = _differentiable(outputs)
    names = [name for name in state.context.trainable if name in state.context.loss_param_names]

    def evaluate(leaves: list[Tensor]) -> tuple[Tensor, Any]:
        params = {**state.params, **dict(zip(names, leaves[len(given) :], strict=True))}
        fresh = iter(leaves[: len(given)])
        own = batches.map_tensors(lambda tensor: next(fresh) if _has_gradient(tensor) else tensor, outputs)
        inner = state.replace(params=params)
        (loss, parts), buffers = inner.call_loss(
            lambda fn: losses.evaluate_parts(fn, own, targets), train=True, num_examples=len(given[0])
        )
        return loss, (loss, dict(parts), buffers)

    params = [state.params[name] for name in names]
    (loss, parts, buffers), grads = value_and_grads(evaluate, [*given, *params])
    whole = {
        "loss": loss,
        "parts": parts,
        "outputs": given,
        "output_grads": grads[: len(given)],
        "params": dict(zip(names, params, strict=True)),
        "param_grads": dict(zip(names, grads[len(given) :], strict=True)),
    }
    return carry._replace(state=state.replace(whole_loss=whole, buffers=buffers))


def part_of_loss(state: State, start: int, size: int, total: int) -> Any:
    """Return the part of `whole_loss` that belongs to a slice of its examples.

    Gradients are scaled so that the mean over slices, weighted by their sizes, is the sum that is wanted.
    """
    whole = state.whole_loss
    if whole is None:
        return None
    own = {name: [tensor[start : start + size] for tensor in whole[name]] for name in ("outputs", "output_grads")}
    return {**whole, **own, "output_grads": [grad * (total / size) for grad in own["output_grads"]]}


def with_loss_of_slice(state: State) -> State:
    """Return the state with the loss of the whole batch, whose gradient is that of the slice's part.

    The loss is `whole + sum((outputs - earlier outputs) * gradient)`, where the difference is zero.
    """
    whole = state.whole_loss
    loss = whole["loss"]
    outputs = _differentiable(state.outputs)
    for now, earlier, grad in zip(outputs, whole["outputs"], whole["output_grads"], strict=True):
        loss = loss + ((now - earlier) * grad.conj()).real.sum()
    for name, grad in whole["param_grads"].items():
        loss = loss + ((state.params[name] - whole["params"][name]) * grad.conj()).real.sum()
    return state.replace(loss=loss, metrics={**state.metrics, **losses.metrics_of_parts(whole["parts"])})


def check_passes_agree(state: State) -> None:
    """Raise a `RuntimeError` if the two passes of a slice of a coupled loss have different outputs."""
    if state.whole_loss is None or not has_values(state.key):
        return
    outputs = _differentiable(state.outputs)
    for now, earlier in zip(outputs, state.whole_loss["outputs"], strict=True):
        if is_any(~torch.isclose(now.detach(), earlier, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)):
            raise RuntimeError(
                f"the loss {shown(state.context.loss)} couples examples, so that each slice runs twice, but the second "
                "pass has other outputs: an algorithm acts differently in it, or the network reads what a slice has "
                "changed"
            )


def joined(parts: Sequence[Any], sizes: Sequence[int], where: str, batch: Any = None) -> Any:
    """Return a pytree of tensors joined along the examples, their first dimension.

    Args:
        parts: Pytrees of one structure, one for each slice.
        batch: The batch that was cut; those of its tensors that the slices have whole are not joined.
    """
    whole = set(map(id, batches.tensors(batch)))
    columns = list(zip(*map(batches.tensors, parts), strict=True))
    for column in columns:
        for tensor, size in zip(column, sizes, strict=True):
            if tensor.shape[:1] != (size,) and id(tensor) not in whole:
                raise ValueError(
                    f"{where} have a tensor of shape {tuple(tensor.shape)} in a slice of {size} examples: a loss of "
                    "the whole batch needs one row for each example"
                )
    return batches.with_tensors(
        parts[0], (column[0] if id(column[0]) in whole else torch.cat(column) for column in columns)
    )


def gathered(tree: Any, shared: SharedPart) -> Any:
    """Return a pytree of tensors joined along the examples of all ranks, the same on each; see `joined`."""
    whole = set(map(id, batches.tensors(shared.batch)))

    def padded(tensor: Tensor) -> Tensor:
        # The same shapes on all ranks, so that their graphs are alike.
        zeros, end = tensor.new_zeros(shared.total, *tensor.shape[1:]), shared.start + shared.size
        return zeros.slice_scatter(tensor[: shared.size], 0, shared.start, end)

    leaves = [leaf for leaf in batches.tensors(tree) if id(leaf) not in whole]
    sent = [padded(leaf.to(torch.uint8) if leaf.dtype is torch.bool else leaf) for leaf in leaves]
    found = iter(shared.ranks.reduced(sent, "sum"))
    return batches.map_tensors(lambda leaf: leaf if id(leaf) in whole else next(found).to(leaf.dtype), tree)


def _differentiable(outputs: Any) -> list[Tensor]:
    return [tensor for tensor in batches.tensors(outputs) if _has_gradient(tensor)]


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


_TOLERANCE = 1e-3
"""Relative difference that is taken for rounding, in float32."""
