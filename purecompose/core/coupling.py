"""Losses that couple examples, in microbatches and on several processes.

The mean over slices is the loss of the batch only if the loss is a mean over examples. A loss that compares examples
with each other is declared by `losses.over_batch`. The outputs of all slices are then computed first, without a graph;
the loss of all of them together has a gradient with respect to each output; and each slice runs again and propagates
its part of that gradient back to the parameters. See "GradCache": Gao, Zhang, Han, Callan: Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup. 2021. https://arxiv.org/abs/2101.06983
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, losses
from purecompose._support.checks import shown
from purecompose._support.functorch import is_fake, is_transforming
from purecompose.core.gradient import value_and_grads
from purecompose.core.means import averaged, num_terms
from purecompose.core.operation import Carry, Purpose
from purecompose.core.ranks import Shard
from purecompose.core.state import State
from purecompose.random.keys import fold_in


__all__ = [
    "check_passes_agree",
    "check_separable",
    "gathered",
    "halves",
    "joined",
    "part_of_loss",
    "targets_of_loss",
    "with_loss_of_slice",
    "with_whole_loss",
]


def targets_of_loss(state: State) -> Any:
    """Return the targets that the state's loss is given; `None` for a model's own loss."""
    return None if isinstance(state.context.loss, losses.ModelLoss) else state.targets


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

    Args:
        state: The state, with the loss of `total` examples.
        start: Index of the slice's first example.
        size: Number of its examples.
        total: Number of all examples.
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
    if state.whole_loss is None or not _has_values(state):
        return
    outputs = _differentiable(state.outputs)
    for now, earlier in zip(outputs, state.whole_loss["outputs"], strict=True):
        if not torch.allclose(now.detach(), earlier, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
            raise RuntimeError(
                f"the loss {shown(state.context.loss)} couples examples, so that each slice runs twice, but the second "
                "pass has other outputs: an algorithm acts differently in it, or the network reads what a slice has "
                "changed"
            )


def joined(parts: Sequence[Any], sizes: Sequence[int], where: str) -> Any:
    """Return a pytree of tensors joined along the examples, their first dimension.

    Args:
        parts: Pytrees of one structure, one for each slice.
        sizes: Number of examples in each.
        where: Description of the pytree, for errors.

    Raises:
        ValueError: A tensor does not have one row for each of the slice's examples.
    """
    columns = list(zip(*map(batches.tensors, parts), strict=True))
    for column in columns:
        for tensor, size in zip(column, sizes, strict=True):
            if tensor.shape[:1] != (size,):
                raise ValueError(
                    f"{where} have a tensor of shape {tuple(tensor.shape)} in a slice of {size} examples: a loss of "
                    "the whole batch needs one row for each example"
                )
    return batches.with_tensors(parts[0], map(torch.cat, columns))


def gathered(tree: Any, shard: Shard) -> Any:
    """Return a pytree of tensors joined along the examples of all ranks, the same on each.

    Args:
        tree: The tensors of this rank's part of the examples.
        shard: The part.
    """
    rest = shard.total - shard.start - shard.size

    def padded(tensor: Tensor) -> Tensor:
        before, after = (tensor.new_zeros(num, *tensor.shape[1:]) for num in (shard.start, rest))
        return torch.cat([before, tensor[: shard.size], after])

    leaves = batches.tensors(tree)
    sent = [padded(leaf.to(torch.uint8) if leaf.dtype is torch.bool else leaf) for leaf in leaves]
    found = zip(shard.ranks.reduced(sent, "sum"), leaves, strict=True)
    return batches.with_tensors(tree, (tensor.to(leaf.dtype) for tensor, leaf in found))


def halves(state: State) -> list[State]:
    """Return the two halves of a batch that has run, with their outputs; nothing if they cannot be cut."""
    size, layout = state.num_examples, state.context.layout
    if (
        size < 2
        or not layout.has_rows(state.batch)
        or any(leaf.shape[:1] != (size,) for leaf in batches.tensors(state.outputs))
    ):
        return []
    first, found, start = 0 if state.first_example is None else state.first_example, [], 0
    for part in layout.split(state.batch, 2):
        rows = slice(start, start + layout.num_examples(part))
        outputs = batches.map_tensors(lambda leaf, rows=rows: leaf[rows], state.outputs)
        found.append(state.replace(batch=part, outputs=outputs, first_example=first + start))
        start = rows.stop
    return found


def check_separable(whole: State, parts: Sequence[State]) -> None:
    """Raise if the loss of a batch is not the mean of the losses of its slices.

    Losses that draw random numbers or change buffers are not compared.

    Args:
        whole: A state with the whole batch.
        parts: States with a slice of the batch and its outputs each.

    Raises:
        ValueError: The two differ by more than rounding.
    """
    loss_fn = whole.context.loss
    if len(parts) < 2 or not _has_values(whole):
        return
    if isinstance(loss_fn, losses.ModelLoss) or losses.couples_examples(loss_fn):
        return
    if not whole.context.layout.has_rows(whole.batch):
        return
    sizes = [part.num_examples for part in parts]
    try:
        outputs = joined([part.outputs for part in parts], sizes, "outputs")
    except ValueError:  # outputs that are not per example
        return
    whole = whole.replace(outputs=outputs)
    total, again = _loss_of(whole), _loss_of(whole.replace(key=fold_in(whole.key, 1)))
    if total is None or again is None or not torch.equal(total, again):
        return
    mean, weights, values = None, 0, []
    for part in parts:
        value, weight = _loss_of(part), num_terms(part)
        if value is None:
            return
        weights, values = weights + weight, [*values, value]
        mean = averaged(mean, value, weight, weights)
    assert mean is not None
    largest = max(value.abs().item() for value in (total, *values))
    tolerance = max(_TOLERANCE, 8 * torch.finfo(total.dtype).eps)
    if not abs(total.item() - mean.item()) > tolerance * largest + 1e-6:
        return
    raise ValueError(
        f"the loss {shown(loss_fn)} is {total.item():.6g} for {sum(sizes)} examples together, but {mean.item():.6g} as "
        f"the mean over {len(parts)} slices, as which microbatches and several processes compute it. If it is a sum "
        "over examples, make it a mean (reduction='mean'); if it is a mean over some positions, let it report their "
        "number in a method num_terms(outputs, targets); if it compares examples with each other, as contrastive "
        "losses do, write losses.over_batch(loss)"
    )


def _has_values(state: State) -> bool:
    """Return whether the tensors of a state can be read."""
    return not (is_transforming() or is_fake(state.key) or state.key.is_meta)


def _differentiable(outputs: Any) -> list[Tensor]:
    return [tensor for tensor in batches.tensors(outputs) if _has_gradient(tensor)]


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


_TOLERANCE = 1e-3
"""Relative difference that is taken for rounding, in float32."""


def _loss_of(state: State) -> Tensor | None:
    """Return the loss of a state's outputs; `None` if it is not a number or has changed buffers."""
    outputs, targets = state.outputs, targets_of_loss(state)
    loss, buffers = state.call_loss(lambda fn: losses.evaluate_loss(fn, outputs, targets), train=True)
    names = state.context.loss_buffer_names
    is_changed = any(not torch.equal(buffers[name], state.buffers[name]) for name in names)
    return None if is_changed or loss.ndim or not loss.isfinite() else loss.detach()
