"""Algorithms that change the form of what lasts, or what is not theirs."""

from typing import Any

import torch
from torch import Tensor, nn

from purecompose import random, tree
from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.state import State
from purecompose.testing.mutants.mutant import Mutant


__all__ = ["MUTANTS"]


def _with_slot(state: State, name: str, slot: Any) -> State:
    return state.replace(slots={**state.slots, name: slot})


def late_slot() -> Algorithm:
    """Makes its slot when it first acts, not at INIT: the state before and after a step differ in structure."""

    def apply(event: Event, state: State) -> State:
        del event
        count = state.slots.get("late_slot", torch.zeros(()))
        return _with_slot(state, "late_slot", count + 1)

    return Algorithm("late_slot", on(Event.AFTER_TRAIN_BATCH), apply)


def widens_params() -> Algorithm:
    """Scales weights by a float64 tensor of one element, as comes out of NumPy: they become float64."""

    def apply(event: Event, state: State) -> State:
        del event
        factor = torch.tensor([0.99], dtype=torch.float64)
        return state.replace(params={name: param * factor for name, param in state.params.items()})

    return Algorithm("widens_params", on(Event.BATCH_END), apply)


def wraps_params() -> Algorithm:
    """Wraps new weights in `nn.Parameter`, as a module would: they leave the step asking for gradients."""

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(params={name: nn.Parameter(param * 0.99) for name, param in state.params.items()})

    return Algorithm("wraps_params", on(Event.BATCH_END), apply)


def drops_buffers() -> Algorithm:
    """Hands on the floating buffers only, after averaging them."""

    def apply(event: Event, state: State) -> State:
        del event
        kept = {name: buffer for name, buffer in state.buffers.items() if buffer.is_floating_point()}
        return state.replace(buffers=kept)

    return Algorithm("drops_buffers", on(Event.BATCH_END), apply)


def averages_counters() -> Algorithm:
    """Averages all buffers with the last ones, integer counters too: `num_batches_tracked` becomes float."""

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(buffers={name: 0.5 * (buffer + buffer) for name, buffer in state.buffers.items()})

    return Algorithm("averages_counters", on(Event.BATCH_END), apply)


def momentum_of_shape_one() -> Algorithm:
    """Keeps a number as 0-d at INIT and as shape (1,) afterwards."""

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return _with_slot(state, "momentum_of_shape_one", torch.zeros(()))
        norm = tree.global_norm(state.grads).reshape(1)
        return _with_slot(state, "momentum_of_shape_one", 0.9 * state.slots["momentum_of_shape_one"] + 0.1 * norm)

    return Algorithm("momentum_of_shape_one", on(Event.INIT, Event.AFTER_TRAIN_BATCH), apply)


def slot_at_epoch_end() -> Algorithm:
    """Keeps an average of the weights, and makes it at the first EPOCH_END, an event outside the step."""

    def apply(event: Event, state: State) -> State:
        del event
        return _with_slot(state, "slot_at_epoch_end", state.params)

    return Algorithm("slot_at_epoch_end", on(Event.EPOCH_END), apply)


def freezes_by_context() -> Algorithm:
    """Freezes a layer in the middle of a run: the static part changes inside a step."""

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(frozen=frozenset({next(iter(state.params))}))

    return Algorithm("freezes_by_context", on(Event.BATCH_START), apply)


def decays_all_slots() -> Algorithm:
    """Maps over all of `state.slots` where its own was meant."""

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return _with_slot(state, "decays_all_slots", torch.ones(()))
        return state.replace(slots=tree.map(lambda leaf: leaf * 0.5 + 0.1, state.slots))

    return Algorithm("decays_all_slots", on(Event.INIT, Event.AFTER_TRAIN_BATCH), apply)


def replaces_slots() -> Algorithm:
    """Sets `slots={name: ...}`, without the others: whoever was initialised before has lost its memory."""

    def apply(event: Event, state: State) -> State:
        count = torch.zeros(()) if event is Event.INIT else state.slots["replaces_slots"] + 1
        return state.replace(slots={"replaces_slots": count})

    return Algorithm("replaces_slots", on(Event.INIT, Event.BATCH_END), apply)


def fixed_slot_name() -> Algorithm:
    """Has `name=` in its factory, but a slot of fixed name, so that two of a kind share it."""

    def factory(name: str = "average") -> Algorithm:
        def apply(event: Event, state: State) -> State:
            if event is Event.INIT:
                return _with_slot(state, "average", state.params)
            average = tree.map(lambda old, new: torch.lerp(old, new, 0.1), state.slots["average"], state.params)
            return _with_slot(state, "average", average)

        return Algorithm(name, on(Event.INIT, Event.BATCH_END), apply)

    return factory(name="fixed_slot_name")


def splits_key() -> Algorithm:
    """Splits `state.key` and hands on the rest, as in JAX: adding it changes everybody's draws."""

    def apply(event: Event, state: State) -> State:
        del event
        own, rest = random.split(state.key)
        inputs: Tensor = state.inputs
        return state.replace(inputs=inputs + 0.1 * random.normal(own, tuple(inputs.shape)).to(inputs), key=rest)

    return Algorithm("splits_key", on(Event.AFTER_DATALOADER), apply)


def halves_learning_rate() -> Algorithm:
    """Writes into the optimizer's hparam without naming it in its settings."""

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(hparams={**state.hparams, "lr": state.hparams["lr"] * 0.5})

    return Algorithm("halves_learning_rate", on(Event.BATCH_START), apply)


def second_forward() -> Algorithm:
    """Looks at the outputs by a forward pass in training mode and keeps its buffers: statistics see a batch twice."""

    def apply(event: Event, state: State) -> State:
        del event
        outputs, buffers = state.run_model(state.inputs, train=True, rng_name="second_forward")
        return state.replace(buffers=buffers, metrics={**state.metrics, "outputs": outputs.mean()})

    return Algorithm("second_forward", on(Event.AFTER_DATALOADER), apply)


def resets_statistics() -> Algorithm:
    """Sets running statistics back to where they began, as before a recalibration that never comes."""

    def apply(event: Event, state: State) -> State:
        del event
        begun = {
            name: torch.ones_like(buffer) if name.endswith("running_var") else torch.zeros_like(buffer)
            for name, buffer in state.buffers.items()
        }
        return state.replace(buffers=begun)

    return Algorithm("resets_statistics", on(Event.AFTER_TRAIN_BATCH), apply)


def statistics_in_place() -> Algorithm:
    """Damps running means in place, so that old and new state agree and both are wrong."""

    def apply(event: Event, state: State) -> State:
        del event
        for name, buffer in state.buffers.items():
            if name.endswith("running_mean"):
                buffer.data.mul_(0.9)
        return state

    return Algorithm("statistics_in_place", on(Event.AFTER_TRAIN_BATCH), apply)


def rescales_at_init() -> Algorithm:
    """Multiplies the weights it finds at INIT: pretrained ones are lost, and a second INIT does it again."""

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(params={name: param * 0.5 for name, param in state.params.items()})

    return Algorithm("rescales_at_init", on(Event.INIT), apply)


def slot_by_position() -> Algorithm:
    """Notes at INIT how many slots there are already, to number itself: its memory depends on the order of listing."""

    def apply(event: Event, state: State) -> State:
        del event
        number = torch.tensor(float(len([name for name in state.slots if name != "slot_by_position"])))
        return _with_slot(state, "slot_by_position", number)

    return Algorithm("slot_by_position", on(Event.INIT), apply)


def counts_inits() -> Algorithm:
    """Adds to its slot at INIT if there is one: INIT done twice is not INIT done once."""

    def apply(event: Event, state: State) -> State:
        del event
        return _with_slot(state, "counts_inits", state.slots.get("counts_inits", torch.zeros(())) + 1)

    return Algorithm("counts_inits", on(Event.INIT), apply)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(late_slot, "structure_kept"),
    Mutant(widens_params, "structure_kept"),
    Mutant(wraps_params, "structure_kept"),
    Mutant(drops_buffers, "structure_kept", "images"),
    Mutant(averages_counters, "structure_kept", "images"),
    Mutant(momentum_of_shape_one, "structure_kept"),
    Mutant(slot_at_epoch_end, "structure_kept"),
    Mutant(freezes_by_context, "structure_kept"),
    Mutant(decays_all_slots, "own_slot"),
    Mutant(replaces_slots, "own_slot"),
    Mutant(fixed_slot_name, "own_slot"),
    Mutant(splits_key, "own_slot"),
    Mutant(halves_learning_rate, "own_slot"),
    Mutant(second_forward, "buffers_kept", "images"),
    Mutant(resets_statistics, "buffers_kept", "images"),
    Mutant(statistics_in_place, "buffers_kept", "images"),
    Mutant(rescales_at_init, "init_once"),
    Mutant(slot_by_position, "init_once"),
    Mutant(counts_inits, "init_once"),
)
"""Every mutant of this file."""
