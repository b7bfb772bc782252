"""Mutants that leak into or out of evaluation, and mutants that do not undo a temporary change."""

from typing import Any

import torch

from purecompose import batch as batches, random
from purecompose.algorithms._label_smoothing import smooth_labels
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_grads, with_slot


# evaluation_blind


@mutant("evaluation_blind", at=(Event.AFTER_DATALOADER, Event.EVAL_BATCH_START))
def augments_test_data(state: State) -> State:
    """Adds noise to every batch, including those of evaluation."""
    return state.replace(inputs=_noisy(state, "augments_test_data"))


@mutant("evaluation_blind", at=(Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD))
def sharpens_outputs(state: State) -> State:
    """Trains with a temperature that is still applied where evaluation reads the outputs."""
    return state.replace(outputs=batches.map_tensors(lambda outputs: 2 * outputs, state.outputs))


@mutant("evaluation_blind", at=(Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.EVAL_AFTER_FORWARD))
def smooths_test_labels(event: Event, state: State) -> State:
    """Applies label smoothing in evaluation too, which changes the evaluated loss."""
    name = "smooths_test_labels"
    if event is Event.AFTER_LOSS:
        return _without_slot(state, name).replace(targets=state.slots[name])
    smoothed = state.replace(targets=smooth_labels(state.outputs, state.targets, 0.1))
    return smoothed if event is Event.EVAL_AFTER_FORWARD else with_slot(smoothed, name, state.targets)


@mutant("evaluation_blind", at=(Event.BATCH_START, Event.PREDICT_BEFORE_FORWARD), task="images")
def flips_when_predicting(state: State) -> State:
    """Test-time augmentation by one flip instead of an average of both."""
    return state.replace(inputs=state.inputs.flip(-1))


@mutant("evaluation_blind", at=(Event.EVAL_START, Event.AFTER_TRAIN_BATCH))
def counts_evaluations():
    """Lowers the gradients after each evaluation, counting evaluations in a closure."""
    seen = {"evaluations": 0}

    def change(event: Event, state: State) -> State:
        if event is Event.EVAL_START:
            seen["evaluations"] += 1
            return state
        return scaled_grads(state, 0.5 ** seen["evaluations"])

    return change


@mutant("evaluation_blind", at=(Event.EVAL_START, Event.BATCH_END))
def averages_in_place(event: Event, state: State) -> State:
    """Moves the live weights to their average for evaluation, in place."""
    if event is Event.EVAL_START:
        for param in state.params.values():
            param.mul_(0.9)
    return state


# pairs_undone


@mutant("pairs_undone", at=(Event.BEFORE_LOSS, Event.AFTER_LOSS), task="soft")
def restores_by_argmax(event: Event, state: State) -> State:
    """Smooths dense targets, and restores the original as the likeliest class."""
    if event is Event.AFTER_LOSS:
        return state.replace(targets=state.targets.argmax(1))
    return state.replace(targets=smooth_labels(state.outputs, state.targets, 0.1))


@mutant("pairs_undone", at=(Event.BEFORE_FORWARD, Event.AFTER_FORWARD))
def keeps_noisy_inputs(event: Event, state: State) -> State:
    """Perturbs the inputs for the forward pass, and forgets to restore the clean ones that it has kept."""
    name = "keeps_noisy_inputs"
    if event is Event.AFTER_FORWARD:
        return _without_slot(state, name)
    return with_slot(state.replace(inputs=_noisy(state, name)), name, state.inputs)


@mutant("pairs_undone", at=(Event.BEFORE_FORWARD, Event.AFTER_FORWARD))
def restores_in_double(event: Event, state: State) -> State:
    """Doubles the inputs for the forward pass; the restored inputs have the right values in another dtype."""
    if event is Event.BEFORE_FORWARD:
        return state.replace(inputs=2 * state.inputs)
    return state.replace(inputs=state.inputs.double() / 2)


@mutant("pairs_undone", at=(Event.BEFORE_FORWARD, Event.AFTER_FORWARD))
def subtracts_weight_noise(event: Event, state: State) -> State:
    """Adds noise to the weights for the forward pass and subtracts it afterwards, which rounds."""
    sign = 1 if event is Event.BEFORE_FORWARD else -1
    draw = 0.1 * random.normal(state.rng("subtracts_weight_noise"), ())
    return state.replace(params={key: param + sign * draw for key, param in state.params.items()})


@mutant("pairs_undone")
def misses_the_end() -> Algorithm:
    """Raises the learning rate in every second batch by the timestamp, which has advanced by a batch at BATCH_END."""

    def match(event: Event, state: State) -> bool:
        return event in (Event.BATCH_START, Event.BATCH_END) and state.timestamp.batch % 2 == 0

    def apply(event: Event, state: State) -> State:
        factor = 2.0 if event is Event.BATCH_START else 0.5
        return state.replace(hparams={**state.hparams, "lr": state.hparams["lr"] * factor})

    return Algorithm("misses_the_end", match, apply)


def _noisy(state: State, name: str) -> Any:
    inputs = state.inputs
    return inputs + 0.1 * random.normal(state.example_rng(name), tuple(inputs.shape)).to(torch.float32)


def _without_slot(state: State, name: str) -> State:
    return state.replace(slots={key: slot for key, slot in state.slots.items() if key != name})
