"""Mutants of the laws of parts: steps that change in slices, or on several processes."""

from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, random, tree
from purecompose.core.state import State
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_grads, scaled_params, with_slot


# microbatches_agree


@mutant("microbatches_agree", at=Event.BEFORE_FORWARD)
def noise_drawn_per_slice(state: State) -> State:
    """Draws noise for the inputs at BEFORE_FORWARD with `state.rng`, so that every slice gets the same numbers."""
    draws = random.normal(state.rng("noise_drawn_per_slice"), tuple(state.inputs.shape))
    return state.replace(inputs=state.inputs + 0.1 * draws.to(state.inputs))


@mutant("microbatches_agree", at=Event.BEFORE_FORWARD)
def inputs_centred_by_slice(state: State) -> State:
    """Takes the mean over the current examples, which between BEFORE_FORWARD and AFTER_BACKWARD are only a slice."""
    return state.replace(inputs=state.inputs - state.inputs.mean(0))


@mutant("microbatches_agree", at=(Event.INIT, Event.AFTER_BACKWARD))
def slices_counted_as_batches(event: Event, state: State) -> State:
    """Counts batches at AFTER_BACKWARD, which fires once a slice."""
    name = "slices_counted_as_batches"
    is_init = event is Event.INIT
    num = torch.zeros((), dtype=torch.int64, device=state.device) if is_init else state.slots[name] + 1
    return with_slot(state, name, num)


@mutant("microbatches_agree", at=Event.AFTER_BACKWARD)
def gradients_clipped_by_slice(state: State) -> State:
    """Clips at AFTER_BACKWARD: the mean of clipped gradients is not the clipped mean."""
    return scaled_grads(state, 0.1 / tree.global_norm(state.grads).clamp_min(0.1))


@mutant("microbatches_agree", at=Event.AFTER_LOSS, task="tokens")
def decay_times_examples(state: State) -> State:
    """Adds weight decay to the loss with the number of examples as a factor, meant to undo the mean."""
    assert state.loss is not None
    penalty = sum((param**2).sum() for param in state.params.values())
    return state.replace(loss=state.loss + 1e-3 * state.num_examples * penalty)


# ranks_agree


@mutant("ranks_agree", at=(Event.INIT, Event.AFTER_BACKWARD))
def mean_kept_as_a_mean(event: Event, state: State) -> State:
    """Remembers the mean loss of each slice, although only sums and counts can be added up over processes."""
    name = "mean_kept_as_a_mean"
    zero = torch.zeros((), dtype=torch.float64, device=state.device)
    if event is Event.INIT:
        return with_slot(state, name, (zero, zero.clone()))
    mean, num = state.slots[name]
    assert state.loss is not None
    num = num + state.num_examples
    return with_slot(state, name, (mean + (state.loss - mean) * state.num_examples / num, num))


@mutant("ranks_agree", at=(Event.AFTER_FORWARD, Event.BATCH_END))
def decay_by_the_outputs(event: Event, state: State) -> State:
    """Shrinks the weights by a metric with a row for each example, of which each process has those of its own part."""
    name = "decay_by_the_outputs"
    if event is Event.AFTER_FORWARD:
        rows = batches.tensors(state.outputs)[0].detach().flatten(1)
        return state.replace(metrics={**state.metrics, name: rows})
    return scaled_params(state, 1 - 1e-3 * state.metrics[name].abs().mean().clamp(max=1))


# shards_agree


@mutant("shards_agree", at=Event.AFTER_TRAIN_BATCH)
def norm_of_its_own_rows(state: State) -> State:
    """Scales the gradients by the norm of the rows that a process holds, which is another one in each."""
    own = [_own_rows(grad) for grad in (state.grads or {}).values()]
    return scaled_grads(state, 0.1 / torch.stack([rows.square().sum() for rows in own]).sum().sqrt().clamp_min(0.1))


@mutant("shards_agree", at=(Event.INIT, Event.AFTER_TRAIN_BATCH))
def sum_of_its_own_rows(event: Event, state: State) -> State:
    """Remembers the sum of all gradients in a number, to which each process adds only the rows that it holds."""
    name = "sum_of_its_own_rows"
    if event is Event.INIT:
        return with_slot(state, name, torch.zeros((), dtype=torch.float64, device=state.device))
    own = [_own_rows(grad).sum() for grad in (state.grads or {}).values()]
    return with_slot(state, name, state.slots[name] + torch.stack(own).sum())


@mutant("shards_agree", at=(Event.INIT, Event.AFTER_TRAIN_BATCH))
def average_of_whole_tensors(event: Event, state: State) -> State:
    """Keeps averages in a list, not under the parameters' names, so that they stay whole when gradients are divided."""
    name = "average_of_whole_tensors"
    if event is Event.INIT:
        return with_slot(state, name, [torch.zeros_like(state.params[key]) for key in state.context.trainable])
    grads = state.grads or {}
    kept = dict(zip(state.context.trainable, state.slots[name], strict=True))
    return with_slot(state, name, [0.9 * old + 0.1 * grads[key] for key, old in kept.items()])


def _own_rows(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
