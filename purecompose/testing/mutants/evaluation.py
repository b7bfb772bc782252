"""Mutants that leak into evaluation or out of it, and mutants that leave behind what they put up for a while."""

from typing import Any

import torch

from purecompose import batch as batches, random
from purecompose.algorithm import Algorithm
from purecompose.algorithms.label_smoothing import smooth_labels
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.state import State
from purecompose.testing.mutants.mutant import Mutant


__all__ = ["MUTANTS"]


def augments_test_data() -> Algorithm:
    """Adds noise to every batch there is, those of evaluation included."""
    name = "augments_test_data"

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(inputs=_noisy(state, name))

    return Algorithm(name, on(Event.AFTER_DATALOADER, Event.EVAL_BATCH_START), apply)


def sharpens_outputs() -> Algorithm:
    """Trains with a temperature and leaves it on where evaluation reads the outputs."""

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(outputs=batches.map_tensors(lambda outputs: 2 * outputs, state.outputs))

    return Algorithm("sharpens_outputs", on(Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD), apply)


def smooths_test_labels() -> Algorithm:
    """Label smoothing that is left on in evaluation, whose loss then is another one."""
    name = "smooths_test_labels"

    def apply(event: Event, state: State) -> State:
        if event is Event.AFTER_LOSS:
            return _restored(state, name)
        smoothed = smooth_labels(state.outputs, state.targets, 0.1)
        slots = state.slots if event is Event.EVAL_AFTER_FORWARD else {**state.slots, name: state.targets}
        return state.replace(targets=smoothed, slots=slots)

    return Algorithm(name, on(Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.EVAL_AFTER_FORWARD), apply)


def flips_when_predicting() -> Algorithm:
    """Test-time augmentation by one flip instead of an average of both."""

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(inputs=state.inputs.flip(-1))

    return Algorithm("flips_when_predicting", on(Event.BATCH_START, Event.PREDICT_BEFORE_FORWARD), apply)


def counts_evaluations() -> Algorithm:
    """Lowers the gradients after each evaluation, counting evaluations in a closure."""
    seen = {"evaluations": 0}

    def apply(event: Event, state: State) -> State:
        if event is Event.EVAL_START:
            seen["evaluations"] += 1
            return state
        factor = 0.5 ** seen["evaluations"]
        return state.replace(grads={name: grad * factor for name, grad in (state.grads or {}).items()})

    return Algorithm("counts_evaluations", on(Event.EVAL_START, Event.AFTER_TRAIN_BATCH), apply)


def averages_in_place() -> Algorithm:
    """Moves the live weights to their average for evaluation, in place."""

    def apply(event: Event, state: State) -> State:
        if event is Event.EVAL_START:
            for param in state.params.values():
                param.mul_(0.9)
        return state

    return Algorithm("averages_in_place", on(Event.EVAL_START, Event.BATCH_END), apply)


def restores_by_argmax() -> Algorithm:
    """Smooths dense targets, and computes the original back as the likeliest class."""

    def apply(event: Event, state: State) -> State:
        if event is Event.AFTER_LOSS:
            return state.replace(targets=state.targets.argmax(1))
        return state.replace(targets=smooth_labels(state.outputs, state.targets, 0.1))

    return Algorithm("restores_by_argmax", on(Event.BEFORE_LOSS, Event.AFTER_LOSS), apply)


def keeps_noisy_inputs() -> Algorithm:
    """Perturbs the inputs for the forward pass, and forgets to put back the clean ones that it has kept."""
    name = "keeps_noisy_inputs"

    def apply(event: Event, state: State) -> State:
        if event is Event.BEFORE_FORWARD:
            return state.replace(inputs=_noisy(state, name), slots={**state.slots, name: state.inputs})
        return state.replace(slots={key: slot for key, slot in state.slots.items() if key != name})

    return Algorithm(name, on(Event.BEFORE_FORWARD, Event.AFTER_FORWARD), apply)


def restores_in_double() -> Algorithm:
    """Doubles the inputs for the forward pass; what comes back has the right values in another dtype."""

    def apply(event: Event, state: State) -> State:
        if event is Event.BEFORE_FORWARD:
            return state.replace(inputs=2 * state.inputs)
        return state.replace(inputs=state.inputs.double() / 2)

    return Algorithm("restores_in_double", on(Event.BEFORE_FORWARD, Event.AFTER_FORWARD), apply)


def subtracts_weight_noise() -> Algorithm:
    """Adds noise to the weights for the forward pass and subtracts it afterwards, which rounds."""
    name = "subtracts_weight_noise"

    def apply(event: Event, state: State) -> State:
        sign = 1 if event is Event.BEFORE_FORWARD else -1
        draw = 0.1 * random.normal(state.rng(name), ())
        return state.replace(params={key: param + sign * draw for key, param in state.params.items()})

    return Algorithm(name, on(Event.BEFORE_FORWARD, Event.AFTER_FORWARD), apply)


def misses_the_end() -> Algorithm:
    """Raises the learning rate in every second batch by the timestamp, which at BATCH_END is a batch further."""

    def match(event: Event, state: State) -> bool:
        return event in (Event.BATCH_START, Event.BATCH_END) and state.timestamp.batch % 2 == 0

    def apply(event: Event, state: State) -> State:
        factor = 2.0 if event is Event.BATCH_START else 0.5
        return state.replace(hparams={**state.hparams, "lr": state.hparams["lr"] * factor})

    return Algorithm("misses_the_end", match, apply)


def _noisy(state: State, name: str) -> Any:
    inputs = state.inputs
    return inputs + 0.1 * random.normal(state.example_rng(name), tuple(inputs.shape)).to(torch.float32)


def _restored(state: State, name: str) -> State:
    slots = {key: slot for key, slot in state.slots.items() if key != name}
    return state.replace(targets=state.slots[name], slots=slots)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(augments_test_data, "evaluation_blind"),
    Mutant(sharpens_outputs, "evaluation_blind"),
    Mutant(smooths_test_labels, "evaluation_blind"),
    Mutant(flips_when_predicting, "evaluation_blind", "images"),
    Mutant(counts_evaluations, "evaluation_blind"),
    Mutant(averages_in_place, "evaluation_blind"),
    Mutant(restores_by_argmax, "pairs_undone", "soft"),
    Mutant(keeps_noisy_inputs, "pairs_undone"),
    Mutant(restores_in_double, "pairs_undone"),
    Mutant(subtracts_weight_noise, "pairs_undone"),
    Mutant(misses_the_end, "pairs_undone"),
)
"""Algorithms that break the laws of `suite.evaluation`."""
