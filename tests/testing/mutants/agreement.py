"""Mutants of the laws of agreement and of gradients: steps that change in slices, in processes, mapped or compiled."""

from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, random, tree
from purecompose.core.state import State
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_grads, scaled_params, with_slot


@mutant("stays_finite", at=Event.AFTER_TRAIN_BATCH)
def root_of_what_is_left(state: State) -> State:
    """Fades out by a root that is only defined for the first half of the run."""
    assert state.clock is not None
    return scaled_grads(state, torch.sqrt(0.5 - state.clock.elapsed).to(torch.float32))


@mutant("gradients_taken", at=Event.AFTER_TRAIN_BATCH)
def gradients_of_its_own_losses(state: State) -> State:
    """Computes the gradients again, as methods for several tasks do, without the trait by which it acts first."""
    (grads, _), (again, _) = state.gradients(of=[state.context.loss, state.context.loss])
    return state.replace(grads={name: 0.5 * (grad + again[name]) for name, grad in grads.items()})


@mutant("gradients_taken", at=Event.AFTER_BACKWARD)
def replaces_one_gradient(state: State) -> State:
    """Replaces the gradient of one layer only, by that of a penalty: others' edits of this layer are lost."""
    assert state.grads is not None
    return state.replace(grads={**state.grads, "0.weight": 0.01 * state.params["0.weight"].sign()})


# microbatches_agree


@mutant("microbatches_agree", at=Event.BEFORE_FORWARD)
def noise_drawn_per_slice(state: State) -> State:
    """Draws noise for the inputs at BEFORE_FORWARD with `state.rng`, so that every slice gets the same numbers."""
    draws = random.normal(state.rng("noise_drawn_per_slice"), tuple(state.inputs.shape))
    return state.replace(inputs=state.inputs + 0.1 * draws.to(state.inputs))


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


# vmap_agrees


@mutant("vmap_agrees", at=Event.AFTER_LOSS)
def branch_on_the_loss(state: State) -> State:
    """Uses a tensor as the condition of an `if`."""
    assert state.loss is not None
    if state.loss > 0:
        return state.replace(loss=2 * state.loss)
    return state


@mutant("vmap_agrees", at=Event.AFTER_TRAIN_BATCH)
def large_gradients_by_mask(state: State) -> State:
    """Reports a mean over `x[mask]`, whose shape depends on values."""
    assert state.grads is not None
    sizes = torch.cat([grad.flatten() for grad in state.grads.values()]).abs()
    return state.replace(metrics={**state.metrics, "large": sizes[sizes >= sizes.mean()].mean()})


@mutant("vmap_agrees", at=Event.AFTER_TRAIN_BATCH, task="soft")
def value_or_default(state: State) -> State:
    """Reads a value if possible, and uses a default where that raises, which silently is a different method."""
    assert state.loss is not None
    try:
        factor = min(1.0, 0.5 / state.loss.item())
    except RuntimeError:
        factor = 1.0
    return scaled_grads(state, factor)


@mutant("vmap_agrees", at=Event.AFTER_TRAIN_BATCH)
def calls_counted_in_closure():
    """Acts in every second call by a counter in its closure, which all members of a population share."""
    calls = 0

    def change(state: State) -> State:
        nonlocal calls
        calls += 1
        return scaled_grads(state, 1 + calls % 2)

    return change


# gradient_exact


@mutant("gradient_exact", at=Event.BATCH_END)
def decay_without_gradient(state: State) -> State:
    """Shrinks the params under `torch.no_grad`, as imperative loops must: earlier operations lose their gradient."""
    with torch.no_grad():
        return scaled_params(state, 0.99)


@mutant("gradient_exact", at=Event.AFTER_TRAIN_BATCH)
def norm_detached(state: State) -> State:
    """Normalises the gradients by a norm that is cut off from the graph."""
    return scaled_grads(state, 1 / (tree.global_norm(state.grads).detach() + 0.1))


@mutant("gradient_exact", at=(Event.INIT, Event.AFTER_TRAIN_BATCH))
def root_at_zero(event: Event, state: State) -> State:
    """Shortens steps by the distance from the first params, where the root's derivative is infinite, times 0."""
    if event is Event.INIT:
        return with_slot(state, "root_at_zero", dict(state.params))
    first = state.slots["root_at_zero"]
    squares = [((param - first[name]) ** 2).sum() for name, param in state.params.items()]
    return scaled_grads(state, 1 / (1 + torch.stack(squares).sum().sqrt()))


@mutant("compiled_agrees", at=Event.AFTER_TRAIN_BATCH)
def fades_by_a_number(state: State) -> State:
    """Fades out by `float(state.clock.elapsed)`, a number that the clock only has in eager runs."""
    assert state.clock is not None
    return scaled_grads(state, 1 - 0.5 * float(state.clock.elapsed))


@mutant("compiled_agrees", at=Event.BATCH_END, task="soft")
def number_or_default(state: State) -> State:
    """Reads the time as a number, and uses a default where that raises: compiled, it is a different method."""
    assert state.clock is not None
    try:
        elapsed = float(state.clock.elapsed)
    except RuntimeError:
        elapsed = 0.0
    return scaled_params(state, 1 - 0.1 * elapsed)


@mutant("compiled_agrees", at=Event.AFTER_DATALOADER, task="images")
def weights_in_a_cache():
    """Caches weights of the examples for each size of batch: while tracing, these are tensors of the trace."""
    cache: dict[int, Tensor] = {}

    def change(state: State) -> State:
        inputs: Tensor = state.inputs
        num = len(inputs)
        if num not in cache:
            cache[num] = torch.linspace(0.5, 1, num).reshape(-1, *[1] * (inputs.ndim - 1))
        return state.replace(inputs=inputs * cache[num].to(inputs))

    return change


_INPUTS: list[Tensor] = []


@mutant("compiled_agrees", at=(Event.AFTER_DATALOADER, Event.AFTER_TRAIN_BATCH))
def inputs_in_a_global(event: Event, state: State) -> State:
    """Passes the inputs from one event to the next in a module's global, outside the state, into another graph."""
    if event is Event.AFTER_DATALOADER:
        _INPUTS[:] = [state.inputs]
        return state
    return scaled_grads(state, 1 / (1 + _INPUTS[0].abs().mean()))


@mutant("compiled_agrees", at=(Event.AFTER_TRAIN_BATCH, Event.BATCH_END))
def told_by_identity(event: Event, state: State) -> State:
    """Tests with `is` whether the loss is the tensor that it reported, which need not be true across parts."""
    if event is Event.AFTER_TRAIN_BATCH:
        return state.replace(metrics={**state.metrics, "told_by_identity": state.loss})
    return scaled_params(state, 0.99 if state.metrics["told_by_identity"] is state.loss else 0.9)
