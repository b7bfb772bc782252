"""Microbatches: a body run on slices of the batch, with averaged results."""

from typing import Any

from torch import Tensor

from purecompose import batch as batches
from purecompose.core.cut import Cut
from purecompose.core.gradient import averaged, averaged_by_name, averaged_grads
from purecompose.core.operation import Carry, Operation, Purpose
from purecompose.core.state import State


__all__ = ["check_rows", "has_mean", "run_slices"]


def has_mean(metric: Any) -> bool:
    """Return whether `Microbatches` averages a metric over the slices: a single floating number."""
    return isinstance(metric, Tensor) and metric.ndim == 0 and metric.is_floating_point()


def run_slices(body: Operation, carry: Carry, purpose: Purpose, cut: Cut) -> Carry:
    """Run the body on slices of the batch and average loss, gradients and metrics, weighted by each slice's terms."""
    state = carry.state
    if purpose.watch is not None:
        check_rows(state)
    current, offset, total = carry, 0, 0
    mean_loss: Tensor | None = None
    mean_grads: dict[str, Tensor] | None = None
    mean_metrics: dict[str, Tensor] = {}
    # A ragged last batch, or one that a method made smaller, may have fewer examples than slices.
    layout = state.context.layout
    for part in layout.split(state.batch, cut.num_slices(state.num_examples)):
        size = layout.num_examples(part)
        first = offset if state.first_example is None else state.first_example + offset
        # Each slice computes these itself, and does not receive them from the slice before.
        own = {"loss": None, "outputs": state.outputs, "grads": None, "metrics": state.metrics}
        start = current.state.replace(batch=part, first_example=first, **own)
        current = body(Carry(start, current.used), purpose)
        after, weight = current.state, size if current.terms is None else current.terms
        total, offset = total + weight, offset + size
        if after.loss is not None:
            mean_loss = averaged(mean_loss, after.loss, weight, total)
        if after.grads is not None:
            mean_grads = averaged_grads(mean_grads, after.grads, weight, total)
        if after.metrics is not state.metrics:
            numbers = {name: value for name, value in after.metrics.items() if has_mean(value)}
            mean_metrics = averaged_by_name(mean_metrics, numbers, state.metrics, weight, total)
    means = {"loss": mean_loss, "grads": mean_grads, "metrics": {**current.state.metrics, **mean_metrics}}
    end = current.state.replace(batch=state.batch, first_example=state.first_example, **means)
    # The total is used if this batch is itself a slice.
    return Carry(end, current.used, carry.terms if current.terms is None else total)


def check_rows(state: State) -> None:
    """Raise a `ValueError` if inputs and targets of a batch to be cut differ in their number of examples."""
    if state.context.layout.splitter is not None:
        return
    dim = state.context.layout.dim
    try:
        inputs, targets = (batches.leading_size(member, dim) for member in (state.inputs, state.targets))
    except KeyError:  # a batch without targets, or with those of a model's own loss
        return
    if inputs is not None and targets is not None and inputs != targets:
        raise ValueError(
            f"the batch cannot be cut into parts: expected the same number of examples along dimension {dim} of inputs "
            f"and targets, got {inputs} and {targets}; for sequences (T, N, ...) give State.create batch_dim=1"
        )
