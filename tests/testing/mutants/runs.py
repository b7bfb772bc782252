"""Mutants of the laws of whole runs: leaks by evaluation, pairs that are not undone, and runs that do not resume."""

import dataclasses
import os
import time
from typing import Any

import torch
from torch import Tensor

from purecompose import random
from purecompose.algorithms._targets import smooth_labels
from purecompose.algorithms._views import test_time_averaging
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import on
from tests.testing.mutants.mutant import mutant, scaled_grads, scaled_params, with_slot


# evaluation_blind


@mutant("evaluation_blind", at=(Event.AFTER_DATALOADER, Event.EVAL_BATCH_START))
def augments_test_data(state: State) -> State:
    """Adds noise to every batch, including those of evaluation."""
    return state.replace(inputs=_noisy(state, "augments_test_data"))


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


@mutant("evaluation_blind", task="images")
def averages_views_in_prediction_only() -> Algorithm:
    """Averages over mirror images in prediction, and leaves evaluation to the network's own outputs."""
    method = test_time_averaging(name="averages_views_in_prediction_only")
    return dataclasses.replace(method, match=on(Event.PREDICT_AFTER_FORWARD))


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


@mutant("resume_exact", at=Event.BATCH_END)
def averages_in_closure():
    """Pulls weights to their running average, which is kept in a closure: a resumed run begins a new average."""
    averages: dict[str, Tensor] = {}

    def change(state: State) -> State:
        for name, param in state.params.items():
            old = averages.get(name)
            averages[name] = param if old is None or old.shape != param.shape else old.lerp(param, 0.5)
        return state.replace(params={name: p.lerp(averages[name], 0.1) for name, p in state.params.items()})

    return change


@mutant("resume_exact", at=Event.AFTER_DATALOADER)
def normalises_by_the_first_batch():
    """Normalises inputs by statistics of the first batch, cached permanently.

    This one is subtle: within one process the cache remains, and a resumed run agrees; a new process fills it from the
    first batch after the interruption.
    """
    cache: list[tuple[Tensor, Tensor]] = []

    def change(state: State) -> State:
        if not cache:
            cache.append((state.inputs.mean(), state.inputs.std() + 1e-3))
        mean, std = cache[0]
        return state.replace(inputs=(state.inputs - mean) / std)

    return change


@mutant("resume_exact", at=(Event.INIT, Event.AFTER_TRAIN_BATCH))
def notes_the_rate_at_init():
    """Keeps the rate of INIT in a closure: a resumed run begins with another one, and loads the saved one after it."""
    rates: list[float] = []

    def change(event: Event, state: State) -> State:
        if event is Event.INIT:
            rates[:] = [float(state.hparams["lr"])]
        return state if event is Event.INIT else scaled_grads(state, 1 + rates[0])

    return change


_CALLS = [0]


@mutant("resume_exact", at=Event.AFTER_TRAIN_BATCH)
def counts_in_a_global(state: State) -> State:
    """Doubles the gradient in every second step, by a global count of its calls instead of the clock."""
    _CALLS[0] += 1
    return scaled_grads(state, 2.0 if _CALLS[0] % 2 == 0 else 1.0)


@mutant("resume_exact", at=Event.AFTER_DATALOADER)
def salts_by_hash(state: State) -> State:
    """Draws noise by `hash` of its name, which Python seeds differently in each process."""
    return _with_noise(state, random.fold_in(state.key, hash("salts_by_hash") % 2**31))


@mutant("resume_exact", at=Event.AFTER_DATALOADER)
def seeds_by_process(state: State) -> State:
    """Draws noise by the process id, to have workers draw different numbers; a resumed process has another id."""
    return _with_noise(state, random.fold_in(state.key, os.getpid()))


@mutant("resume_exact", at=Event.AFTER_DATALOADER)
def seeds_by_clock():
    """Draws noise by its time of creation: deterministic within a process, but not after it."""
    seed = time.time_ns() % 2**31
    return lambda state: _with_noise(state, random.fold_in(state.key, seed))


@mutant("resume_exact", at=Event.AFTER_LOAD)
def shrinks_weights_on_loading(state: State) -> State:
    """Takes 1 % off the weights whenever a checkpoint is loaded, so that a run depends on how often it was resumed."""
    return scaled_params(state, 0.99)


def _with_noise(state: State, key: Tensor) -> State:
    inputs = state.inputs
    return state.replace(inputs=inputs + 0.1 * random.normal(key, tuple(inputs.shape)).to(inputs))
