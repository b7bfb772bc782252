"""Losses that couple examples, in microbatches and on several processes.

The mean over slices is the loss of the batch only if the loss is a mean over examples, which `separable` checks. A
loss that compares examples with each other is declared by `losses.over_batch`. The outputs of all slices are then
computed first, without a graph; the loss of all of them together has a gradient with respect to each output; and
each slice runs again and propagates its part of that gradient back to the parameters. See "GradCache": Gao, Zhang,
Han, Callan: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup. 2021.
https://arxiv.org/abs/2101.06983
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, losses
from purecompose._support.checks import shown
from purecompose._support.internals import has_values, is_any
from purecompose.core.gradient import value_and_grads
from purecompose.core.operation import Carry, Purpose
from purecompose.core.ranks import SharedPart
from purecompose.core.state import State


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
        sizes: Number of examples in each.
        where: Description of the pytree, for errors.
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
