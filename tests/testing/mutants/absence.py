"""Mutants with an effect where there should be none: when idle or neutral, on others' draws, or by their position."""

from typing import Any

import torch
from torch import Tensor, nn

from purecompose import random
from purecompose.core.state import State
from purecompose.losses.targets import one_hot
from purecompose.time.event import Event
from purecompose.time.predicates import after, on
from tests.testing.mutants.mutant import mutant, scaled_grads, scaled_params, with_slot


# absent_when_unmatched


@mutant("absent_when_unmatched", at=on(Event.INIT) | (on(Event.BATCH_END) & after(0.9)))
def warms_up_at_init(event: Event, state: State) -> State:
    """Lowers the learning rate at INIT for a warm-up that `match` may put off, or never begin."""
    factor = 0.1 if event is Event.INIT else 1.5
    return state.replace(hparams={**state.hparams, "lr": state.hparams["lr"] * factor})


@mutant("absent_when_unmatched", at=(Event.INIT, Event.BATCH_END))
def shares_a_slot(event: Event, state: State) -> State:
    """Makes a slot under a common name at INIT, where another algorithm would find it."""
    zero = torch.zeros((), device=state.device)
    return with_slot(state, "steps", zero if event is Event.INIT else state.slots["steps"] + 1)


def _scale_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    del module, inputs
    return output * 1.01


@mutant("absent_when_unmatched", at=(Event.INIT, Event.BATCH_END))
def hooks_at_init(event: Event, state: State) -> State:
    """Registers forward hooks on the network at INIT, which run whether it matches or not."""
    if event is Event.INIT:
        for child in state.model.module.children():
            child.register_forward_hook(_scale_output)
    return state


# neutral_setting


@mutant("neutral_setting", at=Event.AFTER_DATALOADER)
def rounds_when_neutral(state: State) -> State:
    """Contrast 1 changes nothing, but the inputs go through half precision on the way."""
    if not state.inputs.is_floating_point():
        return state
    return state.replace(inputs=(state.inputs.half() * 1.0).to(state.inputs))


@mutant("neutral_setting", at=(Event.BEFORE_LOSS, Event.AFTER_LOSS), task="tokens")
def densifies_when_neutral(event: Event, state: State) -> State:
    """Smoothing 0 still turns class indices into dense targets, which the loss sums in another order."""
    name, targets = "densifies_when_neutral", state.targets
    if event is Event.AFTER_LOSS:
        slots = {**state.slots}
        return state.replace(targets=slots.pop(name, targets), slots=slots)
    if targets.is_floating_point():
        return state
    dense = one_hot(targets, state.outputs)
    smoothed = (1.0 - 0.0) * dense + 0.0 / dense.shape[1]
    return with_slot(state.replace(targets=smoothed), name, targets)


# chosen_or_absent


@mutant("chosen_or_absent", at=Event.AFTER_FORWARD)
def divides_by_zero(state: State) -> State:
    """Divides by the outputs' distance to themselves, whose gradient is not a number even where nothing is chosen."""
    return state.replace(outputs=state.outputs / (state.outputs - state.outputs))


@mutant("chosen_or_absent", at=(Event.INIT, Event.BATCH_START, Event.BATCH_END))
def changes_while_it_closes(event: Event, state: State) -> State:
    """Changes the inputs where it drops its slot, as if it put back what it had kept there."""
    name = "changes_while_it_closes"
    if event is not Event.BATCH_START:
        return with_slot(state, name, torch.zeros((), device=state.device))
    slots = {key: slot for key, slot in state.slots.items() if key != name}
    inputs = state.inputs * 2 if state.inputs.is_floating_point() else state.inputs
    return state.replace(inputs=inputs, slots=slots)


# draws_independent


def _next_key(state: State) -> State:
    return state.replace(key=random.split(state.key)[0])


@mutant("own_slot", at=(Event.INIT, Event.BATCH_END))
def splits_the_key_at_init(event: Event, state: State) -> State:
    """Splits the run's key once, for itself."""
    return _next_key(state) if event is Event.INIT else state


@mutant("own_slot", at=Event.BEFORE_FORWARD)
def renumbers_examples(state: State) -> State:
    """Renumbers the examples for its own draws, and does not restore the numbers."""
    return state.replace(first_example=(state.first_example or 0) + state.num_examples)


@mutant("own_slot", at=Event.BEFORE_TRAIN_BATCH)
def looks_ahead(state: State) -> State:
    """Moves the clock on, to read what a schedule will be, and does not set it back."""
    assert state.clock is not None
    return state.replace(clock=state.clock.advanced())


# draws_keyed


@mutant("draws_keyed", at=Event.AFTER_DATALOADER)
def constant_key(state: State) -> State:
    """Draws by a key of its own, the same in each run and step: the noise is one fixed offset of the inputs."""
    inputs: Tensor = state.inputs
    return state.replace(inputs=inputs + 0.1 * random.normal(random.key(0), tuple(inputs.shape)).to(inputs))


@mutant("draws_keyed", at=Event.AFTER_TRAIN_BATCH)
def ignores_batch_number(state: State) -> State:
    """Folds its own number into the run's key, not the batch number: the noise is the same in each step."""
    key = random.fold_in(state.key, 7)
    grads = {name: g + 0.01 * random.normal(key, tuple(g.shape)).to(g) for name, g in (state.grads or {}).items()}
    return state.replace(grads=grads)


@mutant("draws_keyed", at=Event.BATCH_END)
def draws_as_network(state: State) -> State:
    """Draws under the name that the network uses for dropout, so that both share their random numbers."""
    return scaled_params(state, 1 + 0.01 * random.uniform(state.rng(".forward"), ()))


# list_position_free


@mutant("list_position_free", at=Event.BATCH_END)
def counts_slots(state: State) -> State:
    """Draws under the number of algorithms that have a slot, which it assumes to be its own number."""
    factor = random.uniform(state.rng(f"counts_slots{len(state.slots)}"), ())
    return scaled_params(state, 1 + 0.01 * factor)


@mutant("list_position_free", at=(Event.INIT, Event.BATCH_START))
def reads_the_first_slot(event: Event, state: State) -> State:
    """Looks for its memory in the first slot, which is its own as long as it is the only algorithm."""
    name = "reads_the_first_slot"
    if event is Event.INIT:
        return with_slot(state, name, {"count": torch.zeros((), device=state.device)})
    count = next(iter(state.slots.values()))["count"]
    return with_slot(scaled_params(state, 1 - 0.01 * count), name, {"count": state.slots[name]["count"] + 1})


@mutant("list_position_free", at=Event.AFTER_TRAIN_BATCH)
def averages_metrics(state: State) -> State:
    """Scales the gradients by the mean of all metrics, although only its own one was meant."""
    assert state.loss is not None
    metrics = {**state.metrics, "averages_metrics/loss": state.loss}
    mean = torch.stack([value.float() for value in metrics.values()]).mean()
    return scaled_grads(state.replace(metrics=metrics), mean.to(state.loss))
