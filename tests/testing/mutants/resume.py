"""Mutants that are detected by resuming a run in a new process."""

import os
import time

import torch
from torch import Tensor

from purecompose import random
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import on
from tests.testing.mutants.mutant import mutant, scaled_grads, scaled_params, with_slot


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


@mutant("resume_exact", at=(Event.INIT, Event.BATCH_END))
def anchors_in_closure():
    """Decays weights towards those at INIT, kept in a closure: a resumed run has other weights at INIT."""
    anchors: dict[str, Tensor] = {}

    def change(event: Event, state: State) -> State:
        if event is Event.INIT:
            anchors.update(state.params)
            return state
        return state.replace(params={name: p.lerp(anchors[name], 0.01) for name, p in state.params.items()})

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


class _Ramp:
    """A factor that grows with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 - 0.5**self.calls


@mutant("resume_exact", at=(Event.INIT, Event.AFTER_TRAIN_BATCH))
def warms_up_by_its_own_count():
    """Warms up by an object's count; the slot only reports it and is never read back."""
    ramp = _Ramp()

    def change(event: Event, state: State) -> State:
        factor = 0.0 if event is Event.INIT else ramp()
        reported = {"factor": torch.full((), factor, device=state.device)}
        state = with_slot(state, "warms_up_by_its_own_count", reported)
        return state if event is Event.INIT else scaled_grads(state, factor)

    return change


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


@mutant("resume_exact")
def remembers_losses_in_a_list() -> Algorithm:
    """A host algorithm that shrinks weights by the loss relative to its average so far, kept in a list."""
    losses: list[float] = []

    def apply(event: Event, state: State) -> State:
        del event
        assert state.loss is not None
        losses.append(float(state.loss))
        return scaled_params(state, 1 - 0.01 * min(losses[-1] / (sum(losses) / len(losses)), 2.0))

    return Algorithm("remembers_losses_in_a_list", on(Event.BATCH_END), apply, host=True)


@mutant("resume_exact", at=Event.AFTER_LOAD)
def shrinks_weights_on_loading(state: State) -> State:
    """Takes 1 % off the weights whenever a checkpoint is loaded, so that a run depends on how often it was resumed."""
    return scaled_params(state, 0.99)


def _with_noise(state: State, key: Tensor) -> State:
    inputs = state.inputs
    return state.replace(inputs=inputs + 0.1 * random.normal(key, tuple(inputs.shape)).to(inputs))
