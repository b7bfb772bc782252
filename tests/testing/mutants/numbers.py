"""Mutants of the laws of numbers: steps that change under vmap or when differentiated."""

import torch

from purecompose import tree
from purecompose.core.state import State
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_grads, scaled_params, with_slot


# vmap_agrees


@mutant("vmap_agrees", at=Event.AFTER_LOSS)
def branch_on_the_loss(state: State) -> State:
    """Uses a tensor as the condition of an `if`."""
    assert state.loss is not None
    if state.loss > 0:
        return state.replace(loss=2 * state.loss)
    return state


@mutant("vmap_agrees", at=Event.AFTER_TRAIN_BATCH)
def loss_read_as_number(state: State) -> State:
    """Scales the gradients by `loss.item()`, which is impossible under transforms."""
    assert state.loss is not None
    return scaled_grads(state, state.loss.item())


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


@mutant("gradient_exact", at=Event.BATCH_END, task="images")
def decay_of_data(state: State) -> State:
    """Subtracts a fraction of `param.data`, so that the derivative misses only that term."""
    return state.replace(params={name: param - 0.01 * param.data for name, param in state.params.items()})


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
