"""Mutants that are felt where they should not be: when idle or neutral, in others' draws, by their place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import random, tree
from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.predicate import after, on
from purecompose.state import State
from purecompose.targets import one_hot
from purecompose.testing.mutants.mutant import Mutant


__all__ = ["MUTANTS"]

Change = Callable[[State], State]


def _at(name: str, **changes: Change) -> Algorithm:
    """An algorithm from what it does at each event, by the event's name in lower case."""
    by_event = {Event(event): change for event, change in changes.items()}
    return Algorithm(name, on(*by_event), lambda event, state: by_event[event](state))


def _scaled(by_name: dict[str, Tensor], factor: float | Tensor) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in by_name.items()}


def warms_up_at_init() -> Algorithm:
    """Lowers the learning rate at INIT for a warm-up that `match` may put off, or never begin."""

    def apply(event: Event, state: State) -> State:
        factor = 0.1 if event is Event.INIT else 1.5
        return state.replace(hparams={**state.hparams, "lr": state.hparams["lr"] * factor})

    return Algorithm("warms_up_at_init", on(Event.INIT) | (on(Event.BATCH_END) & after(0.9)), apply)


def makes_room_at_init() -> Algorithm:
    """Makes room in the weights at INIT for what it adds to them later on."""

    def apply(event: Event, state: State) -> State:
        factor = 0.9 if event is Event.INIT else 1.01
        return state.replace(params=_scaled(state.params, factor))

    return Algorithm("makes_room_at_init", on(Event.INIT) | (on(Event.BATCH_END) & after("1ep")), apply)


def shares_a_slot() -> Algorithm:
    """Makes a slot under a common name at INIT, where another algorithm would find it."""

    def begin(state: State) -> State:
        return state.replace(slots={**state.slots, "steps": torch.zeros((), device=state.device)})

    def count(state: State) -> State:
        return state.replace(slots={**state.slots, "steps": state.slots["steps"] + 1})

    return _at("shares_a_slot", init=begin, batch_end=count)


def _scale_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    del module, inputs
    return output * 1.01


def hooks_at_init() -> Algorithm:
    """Registers forward hooks on the network at INIT, which run whether it matches or not."""

    def begin(state: State) -> State:
        for child in state.model.module.children():
            child.register_forward_hook(_scale_output)
        return state

    return _at("hooks_at_init", init=begin, batch_end=lambda state: state)


def rounds_when_neutral() -> Algorithm:
    """Contrast 1 changes nothing, but the inputs go through half precision on the way."""

    def scale(state: State) -> State:
        if not state.inputs.is_floating_point():
            return state
        return state.replace(inputs=(state.inputs.half() * 1.0).to(state.inputs))

    return _at("rounds_when_neutral", after_dataloader=scale)


def permutes_when_neutral() -> Algorithm:
    """Mixes with weight 0, but keeps the partners where the examples should stay."""

    def mix(state: State) -> State:
        mixing, partners = 0.0, state.inputs.roll(1, 0)
        mixed = torch.lerp(partners, state.inputs, mixing) if partners.is_floating_point() else partners
        return state.replace(inputs=mixed, targets=state.targets.roll(1, 0))

    return _at("permutes_when_neutral", after_dataloader=mix)


def densifies_when_neutral() -> Algorithm:
    """Smoothing 0 turns class indices into dense targets all the same, which the loss sums up in another order."""
    name = "densifies_when_neutral"

    def smooth(state: State) -> State:
        targets = state.targets
        if targets.is_floating_point():
            return state
        dense = one_hot(targets, state.outputs)
        smoothed = (1.0 - 0.0) * dense + 0.0 / dense.shape[1]
        return state.replace(targets=smoothed, slots={**state.slots, name: targets})

    def restore(state: State) -> State:
        slots = {**state.slots}
        return state.replace(targets=slots.pop(name, state.targets), slots=slots)

    return _at(name, before_loss=smooth, after_loss=restore)


def normalises_when_neutral() -> Algorithm:
    """Brings the weights to their own norm: dividing and multiplying by one number rounds twice."""

    def project(state: State) -> State:
        return state.replace(params={name: p / p.norm() * p.norm() for name, p in state.params.items()})

    return _at("normalises_when_neutral", batch_end=project)


def _next_key(state: State) -> State:
    return state.replace(key=random.split(state.key)[0])


def splits_the_key() -> Algorithm:
    """Splits the run's key in every batch and keeps one half, as one does in JAX."""
    return _at("splits_the_key", batch_start=_next_key)


def splits_the_key_at_init() -> Algorithm:
    """Splits the run's key once, for itself."""
    return _at("splits_the_key_at_init", init=_next_key, batch_end=lambda state: state)


def splits_the_key_each_epoch() -> Algorithm:
    """Takes a new key for each epoch, so that everybody's draws change."""
    return _at("splits_the_key_each_epoch", epoch_start=_next_key, batch_end=lambda state: state)


def forgets_everything() -> Algorithm:
    """Clears its slot at the end of a batch, and with it those of all others."""

    def clear(state: State) -> State:
        return state.replace(slots=tree.map(torch.zeros_like, state.slots))

    return _at("forgets_everything", batch_end=clear)


def renumbers_examples() -> Algorithm:
    """Numbers its examples anew for draws of its own, and lets the numbers stand."""

    def shift(state: State) -> State:
        return state.replace(first_example=(state.first_example or 0) + state.num_examples)

    return _at("renumbers_examples", before_forward=shift)


def looks_ahead() -> Algorithm:
    """Moves the clock on, to read what a schedule will be, and does not set it back."""

    def advance(state: State) -> State:
        assert state.clock is not None
        return state.replace(clock=state.clock.advanced())

    return _at("looks_ahead", before_train_batch=advance)


def counts_slots() -> Algorithm:
    """Draws under a number that it takes for its own: how many algorithms have a slot."""
    name = "counts_slots"

    def perturb(state: State) -> State:
        factor = random.uniform(state.rng(f"{name}{len(state.slots)}"), ())
        return state.replace(params=_scaled(state.params, 1 + 0.01 * factor))

    return _at(name, batch_end=perturb)


def reads_the_first_slot() -> Algorithm:
    """Looks for its memory in the first slot, which is its own as long as it stands alone."""
    name = "reads_the_first_slot"

    def begin(state: State) -> State:
        return state.replace(slots={**state.slots, name: {"count": torch.zeros((), device=state.device)}})

    def decay(state: State) -> State:
        count = next(iter(state.slots.values()))["count"]
        slots = {**state.slots, name: {"count": state.slots[name]["count"] + 1}}
        return state.replace(params=_scaled(state.params, 1 - 0.01 * count), slots=slots)

    return _at(name, init=begin, batch_start=decay)


def averages_metrics() -> Algorithm:
    """Scales the gradients by the mean of the metrics, meaning its own one but taking all there are."""
    name = "averages_metrics"

    def scale(state: State) -> State:
        assert state.loss is not None and state.grads is not None
        metrics = {**state.metrics, f"{name}/loss": state.loss}
        mean = torch.stack([value.float() for value in metrics.values()]).mean()
        return state.replace(metrics=metrics, grads={n: g * mean.to(g) for n, g in state.grads.items()})

    return _at(name, after_train_batch=scale)


def numbers_itself() -> Algorithm:
    """Takes its place in the list of algorithms for the number of its random stream."""
    name = "numbers_itself"

    def perturb(state: State) -> State:
        number = state.context.initialised.index(name)
        draws = random.uniform(random.fold_in(state.rng(name), number), ())
        return state.replace(params=_scaled(state.params, 1 + 0.01 * draws))

    return _at(name, init=lambda state: state, batch_end=perturb)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(warms_up_at_init, "absent_when_unmatched"),
    Mutant(makes_room_at_init, "absent_when_unmatched"),
    Mutant(shares_a_slot, "absent_when_unmatched"),
    Mutant(hooks_at_init, "absent_when_unmatched"),
    Mutant(rounds_when_neutral, "neutral_setting"),
    Mutant(permutes_when_neutral, "neutral_setting"),
    Mutant(densifies_when_neutral, "neutral_setting", "tokens"),
    Mutant(normalises_when_neutral, "neutral_setting"),
    Mutant(splits_the_key, "draws_independent"),
    Mutant(splits_the_key_at_init, "draws_independent"),
    Mutant(splits_the_key_each_epoch, "draws_independent"),
    Mutant(forgets_everything, "draws_independent"),
    Mutant(renumbers_examples, "draws_independent"),
    Mutant(looks_ahead, "draws_independent"),
    Mutant(counts_slots, "list_position_free"),
    Mutant(reads_the_first_slot, "list_position_free"),
    Mutant(averages_metrics, "list_position_free"),
    Mutant(numbers_itself, "list_position_free"),
)
"""Algorithms that break the laws of `suite.absence`."""
