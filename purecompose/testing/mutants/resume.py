"""Mutants that a run which goes on in a new process finds out."""

import itertools
import os
import time

import torch
from torch import Tensor

from purecompose import random
from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.state import State
from purecompose.testing.mutants.mutant import Mutant


__all__ = [
    "MUTANTS",
    "anchors_in_closure",
    "averages_in_closure",
    "counts_in_a_global",
    "normalises_by_the_first_batch",
    "remembers_losses_in_a_list",
    "salts_by_hash",
    "seeds_by_clock",
    "seeds_by_process",
    "warms_up_by_its_own_count",
]


def averages_in_closure() -> Algorithm:
    """Pulls weights to their running average, which lives in a closure: a resumed run begins a new average."""
    averages: dict[str, Tensor] = {}

    def apply(event: Event, state: State) -> State:
        del event
        for name, param in state.params.items():
            old = averages.get(name)
            averages[name] = param if old is None or old.shape != param.shape else old.lerp(param, 0.5)
        return state.replace(params={name: p.lerp(averages[name], 0.1) for name, p in state.params.items()})

    return Algorithm("averages_in_closure", on(Event.BATCH_END), apply)


def anchors_in_closure() -> Algorithm:
    """Decays weights towards those at INIT, kept in a closure: who resumes has other weights there at INIT."""
    anchors: dict[str, Tensor] = {}

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            anchors.update(state.params)
            return state
        return state.replace(params={name: p.lerp(anchors[name], 0.01) for name, p in state.params.items()})

    return Algorithm("anchors_in_closure", on(Event.INIT, Event.BATCH_END), apply)


def normalises_by_the_first_batch() -> Algorithm:
    """Normalises inputs by statistics of the first batch that ever came, cached for good.

    The subtle one: within one process the cache holds, and a resumed run agrees; a new process fills it anew from the
    first batch after the break.
    """
    cache: list[tuple[Tensor, Tensor]] = []

    def apply(event: Event, state: State) -> State:
        del event
        if not cache:
            cache.append((state.inputs.mean(), state.inputs.std() + 1e-3))
        mean, std = cache[0]
        return state.replace(inputs=(state.inputs - mean) / std)

    return Algorithm("normalises_by_the_first_batch", on(Event.AFTER_DATALOADER), apply)


_CALLS = itertools.count(1)


def counts_in_a_global() -> Algorithm:
    """Doubles the gradient in every second step, by a count of its own calls in a global, not by the clock."""

    def apply(event: Event, state: State) -> State:
        del event
        assert state.grads is not None
        factor = 2.0 if next(_CALLS) % 2 == 0 else 1.0
        return state.replace(grads={name: grad * factor for name, grad in state.grads.items()})

    return Algorithm("counts_in_a_global", on(Event.AFTER_TRAIN_BATCH), apply)


class _Ramp:
    """Grows with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 - 0.5**self.calls


def warms_up_by_its_own_count() -> Algorithm:
    """Warms up by an object's own count, and only reports it in the slot, from where nobody reads it back."""
    ramp = _Ramp()

    def apply(event: Event, state: State) -> State:
        name = "warms_up_by_its_own_count"
        if event is Event.INIT:
            return state.replace(slots={**state.slots, name: {"factor": torch.zeros((), device=state.device)}})
        assert state.grads is not None
        factor = ramp()
        slot = {"factor": torch.full((), factor, device=state.device)}
        grads = {key: grad * factor for key, grad in state.grads.items()}
        return state.replace(grads=grads, slots={**state.slots, name: slot})

    return Algorithm("warms_up_by_its_own_count", on(Event.INIT, Event.AFTER_TRAIN_BATCH), apply)


def salts_by_hash() -> Algorithm:
    """Draws noise by `hash` of its name, which Python seeds anew in each process."""
    salt = hash("salts_by_hash") % 2**31

    def apply(event: Event, state: State) -> State:
        del event
        return _with_noise(state, random.fold_in(state.key, salt))

    return Algorithm("salts_by_hash", on(Event.AFTER_DATALOADER), apply)


def seeds_by_process() -> Algorithm:
    """Draws noise by the process's number, to have workers draw apart; a process that resumes has another one."""

    def apply(event: Event, state: State) -> State:
        del event
        return _with_noise(state, random.fold_in(state.key, os.getpid()))

    return Algorithm("seeds_by_process", on(Event.AFTER_DATALOADER), apply)


def seeds_by_clock() -> Algorithm:
    """Draws noise by the time at which it was made: deterministic while it lives, and never again."""
    seed = time.time_ns() % 2**31

    def apply(event: Event, state: State) -> State:
        del event
        return _with_noise(state, random.fold_in(state.key, seed))

    return Algorithm("seeds_by_clock", on(Event.AFTER_DATALOADER), apply)


def remembers_losses_in_a_list() -> Algorithm:
    """A host algorithm that holds weights back when the loss is above its average so far, kept in a list."""
    losses: list[float] = []

    def apply(event: Event, state: State) -> State:
        del event
        assert state.loss is not None
        losses.append(float(state.loss))
        factor = 1 - 0.01 * min(losses[-1] / (sum(losses) / len(losses)), 2.0)
        return state.replace(params={name: param * factor for name, param in state.params.items()})

    return Algorithm("remembers_losses_in_a_list", on(Event.BATCH_END), apply, host=True)


def _with_noise(state: State, key: Tensor) -> State:
    inputs = state.inputs
    return state.replace(inputs=inputs + 0.1 * random.normal(key, tuple(inputs.shape)).to(inputs))


MUTANTS = tuple(
    Mutant(make, "resume_exact")
    for make in (
        averages_in_closure,
        anchors_in_closure,
        normalises_by_the_first_batch,
        counts_in_a_global,
        warms_up_by_its_own_count,
        salts_by_hash,
        seeds_by_process,
        seeds_by_clock,
        remembers_losses_in_a_list,
    )
)
