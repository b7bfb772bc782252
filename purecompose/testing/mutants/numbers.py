"""Mutants of the laws of numbers: steps that change in slices, under vmap or where they are differentiated."""

import torch

from purecompose import random, tree
from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.state import State
from purecompose.testing.mutants.mutant import Mutant


__all__ = ["MUTANTS"]


def noise_drawn_per_slice() -> Algorithm:
    """Draws noise for the inputs at BEFORE_FORWARD by `state.rng`, so that every slice gets the same numbers."""

    def apply(event: Event, state: State) -> State:
        del event
        draws = random.normal(state.rng("noise_drawn_per_slice"), tuple(state.inputs.shape))
        return state.replace(inputs=state.inputs + 0.1 * draws.to(state.inputs))

    return Algorithm("noise_drawn_per_slice", on(Event.BEFORE_FORWARD), apply)


def inputs_centred_by_slice() -> Algorithm:
    """Takes the mean over the examples at hand, which between BEFORE_FORWARD and AFTER_BACKWARD are a slice's."""

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(inputs=state.inputs - state.inputs.mean(0))

    return Algorithm("inputs_centred_by_slice", on(Event.BEFORE_FORWARD), apply)


def slices_counted_as_batches() -> Algorithm:
    """Counts batches at AFTER_BACKWARD, which fires once a slice."""

    name = "slices_counted_as_batches"

    def apply(event: Event, state: State) -> State:
        is_init = event is Event.INIT
        num = torch.zeros((), dtype=torch.int64, device=state.device) if is_init else state.slots[name] + 1
        return state.replace(slots={**state.slots, name: num})

    return Algorithm(name, on(Event.INIT, Event.AFTER_BACKWARD), apply)


def gradients_clipped_by_slice() -> Algorithm:
    """Clips at AFTER_BACKWARD: the mean of clipped gradients is not the clipped mean."""

    def apply(event: Event, state: State) -> State:
        del event
        assert state.grads is not None
        factor = 0.1 / tree.global_norm(state.grads).clamp_min(0.1)
        return state.replace(grads={name: factor * grad for name, grad in state.grads.items()})

    return Algorithm("gradients_clipped_by_slice", on(Event.AFTER_BACKWARD), apply)


def decay_times_examples() -> Algorithm:
    """Adds weight decay to the loss with the number of examples as a factor, meant to undo the mean."""

    def apply(event: Event, state: State) -> State:
        del event
        assert state.loss is not None
        penalty = sum((param**2).sum() for param in state.params.values())
        return state.replace(loss=state.loss + 1e-3 * state.num_examples * penalty)

    return Algorithm("decay_times_examples", on(Event.AFTER_LOSS), apply)


def branch_on_the_loss() -> Algorithm:
    """Asks a tensor for its truth in an `if`."""

    def apply(event: Event, state: State) -> State:
        del event
        assert state.loss is not None
        if state.loss > 0:
            return state.replace(loss=2 * state.loss)
        return state

    return Algorithm("branch_on_the_loss", on(Event.AFTER_LOSS), apply)


def loss_read_as_number() -> Algorithm:
    """Scales the gradients by `loss.item()`: a number under no transform."""

    def apply(event: Event, state: State) -> State:
        del event
        assert state.loss is not None and state.grads is not None
        factor = state.loss.item()
        return state.replace(grads={name: factor * grad for name, grad in state.grads.items()})

    return Algorithm("loss_read_as_number", on(Event.AFTER_TRAIN_BATCH), apply)


def large_gradients_by_mask() -> Algorithm:
    """Reports a mean over `x[mask]`, whose shape depends on values."""

    def apply(event: Event, state: State) -> State:
        del event
        assert state.grads is not None
        sizes = torch.cat([grad.flatten() for grad in state.grads.values()]).abs()
        return state.replace(metrics={**state.metrics, "large": sizes[sizes >= sizes.mean()].mean()})

    return Algorithm("large_gradients_by_mask", on(Event.AFTER_TRAIN_BATCH), apply)


def value_or_default() -> Algorithm:
    """Reads a value where that is possible, and goes on with a default where it raises, silently another method."""

    def apply(event: Event, state: State) -> State:
        del event
        assert state.loss is not None and state.grads is not None
        try:
            factor = min(1.0, 0.5 / state.loss.item())
        except RuntimeError:
            factor = 1.0
        return state.replace(grads={name: factor * grad for name, grad in state.grads.items()})

    return Algorithm("value_or_default", on(Event.AFTER_TRAIN_BATCH), apply)


def calls_counted_in_closure() -> Algorithm:
    """Acts in every second call by a counter in its closure, which all members of a population share."""
    calls = 0

    def apply(event: Event, state: State) -> State:
        del event
        nonlocal calls
        calls += 1
        assert state.grads is not None
        factor = 1 + calls % 2
        return state.replace(grads={name: factor * grad for name, grad in state.grads.items()})

    return Algorithm("calls_counted_in_closure", on(Event.AFTER_TRAIN_BATCH), apply)


def decay_without_gradient() -> Algorithm:
    """Shrinks the params under `torch.no_grad`, as imperative loops must: nothing before it has a gradient."""

    def apply(event: Event, state: State) -> State:
        del event
        with torch.no_grad():
            return state.replace(params={name: 0.99 * param for name, param in state.params.items()})

    return Algorithm("decay_without_gradient", on(Event.BATCH_END), apply)


def decay_of_data() -> Algorithm:
    """Subtracts a share of `param.data`, so that the derivative misses that share alone."""

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(params={name: param - 0.01 * param.data for name, param in state.params.items()})

    return Algorithm("decay_of_data", on(Event.BATCH_END), apply)


def norm_detached() -> Algorithm:
    """Normalises the gradients by a norm that is cut off from the graph."""

    def apply(event: Event, state: State) -> State:
        del event
        assert state.grads is not None
        norm = tree.global_norm(state.grads).detach()
        return state.replace(grads={name: grad / (norm + 0.1) for name, grad in state.grads.items()})

    return Algorithm("norm_detached", on(Event.AFTER_TRAIN_BATCH), apply)


def root_at_zero() -> Algorithm:
    """Shortens steps by the distance from the first params, where the root's derivative is infinite, times 0."""

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return state.replace(slots={**state.slots, "root_at_zero": dict(state.params)})
        assert state.grads is not None
        first = state.slots["root_at_zero"]
        distance = (
            torch.stack([((param - first[name]) ** 2).sum() for name, param in state.params.items()]).sum().sqrt()
        )
        return state.replace(grads={name: grad / (1 + distance) for name, grad in state.grads.items()})

    return Algorithm("root_at_zero", on(Event.INIT, Event.AFTER_TRAIN_BATCH), apply)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(noise_drawn_per_slice, "microbatches_agree"),
    Mutant(inputs_centred_by_slice, "microbatches_agree"),
    Mutant(slices_counted_as_batches, "microbatches_agree"),
    Mutant(gradients_clipped_by_slice, "microbatches_agree"),
    Mutant(decay_times_examples, "microbatches_agree", task="tokens"),
    Mutant(branch_on_the_loss, "vmap_agrees"),
    Mutant(loss_read_as_number, "vmap_agrees"),
    Mutant(large_gradients_by_mask, "vmap_agrees"),
    Mutant(value_or_default, "vmap_agrees", task="soft"),
    Mutant(calls_counted_in_closure, "vmap_agrees"),
    Mutant(decay_without_gradient, "gradient_exact"),
    Mutant(decay_of_data, "gradient_exact", task="images"),
    Mutant(norm_detached, "gradient_exact"),
    Mutant(root_at_zero, "gradient_exact"),
)
