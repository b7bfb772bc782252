"""Algorithms whose `match` wants more than time and shapes, or whose apply learns the time by another way."""

import random as python_random
from typing import Any

from torch import Tensor

from purecompose.algorithm import Algorithm
from purecompose.context import SealedTime
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.state import State
from purecompose.testing.mutants.mutant import Mutant
from purecompose.time import Timestamp


__all__ = ["MUTANTS"]


def _shrunk(event: Event, state: State) -> State:
    del event
    return state.replace(params={name: param * 0.99 for name, param in state.params.items()})


def _scaled(state: State, factor: Any) -> State:
    return state.replace(params={name: param * factor for name, param in state.params.items()})


def counts_matches() -> Algorithm:
    """Acts in every second step by counting how often it was asked."""
    asked = 0

    def match(event: Event, state: State) -> bool:
        nonlocal asked
        del state
        if event is not Event.BATCH_END:
            return False
        asked += 1
        return asked % 2 == 0

    return Algorithm("counts_matches", match, _shrunk)


def acts_once() -> Algorithm:
    """Notes for which batch it was asked last, to act once in each: asked again about the same one it says no."""
    last = -1

    def match(event: Event, state: State) -> bool:
        nonlocal last
        if event is not Event.BATCH_START or state.timestamp.batch == last:
            return False
        last = state.timestamp.batch
        return True

    return Algorithm("acts_once", match, _shrunk)


def matches_by_loss() -> Algorithm:
    """Reads the loss with `.item()`, which is not known when matching is decided."""

    def match(event: Event, state: State) -> bool:
        return event is Event.AFTER_TRAIN_BATCH and state.loss is not None and not state.loss.item() < 0.1

    return Algorithm("matches_by_loss", match, _shrunk)


def matches_by_kept_loss() -> Algorithm:
    """Goes round the seal: apply keeps the last two losses in a closure, match reads them there with `.tolist()`."""
    kept: list[Tensor] = []

    def match(event: Event, state: State) -> bool:
        del state
        rises = len(kept) > 1 and kept[-1].tolist() > kept[-2].tolist()
        return event is Event.AFTER_TRAIN_BATCH or (event is Event.BATCH_END and rises)

    def apply(event: Event, state: State) -> State:
        if event is Event.AFTER_TRAIN_BATCH and state.loss is not None:
            kept[:] = [*kept[-1:], state.loss]
            return state
        return _shrunk(event, state)

    return Algorithm("matches_by_kept_loss", match, apply)


def matches_by_key() -> Algorithm:
    """Reads the run's key at INIT and acts in runs with an even seed only, so that a schedule hangs on the seed."""
    seen = {"seed": 0}

    def match(event: Event, state: State) -> bool:
        del state
        return event is Event.INIT or (event is Event.BATCH_END and seen["seed"] % 2 == 0)

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            seen["seed"] = int(state.key.sum())
            return state
        return _shrunk(event, state)

    return Algorithm("matches_by_key", match, apply)


def matches_by_global_draw() -> Algorithm:
    """Acts in half of the steps by Python's generator."""

    def match(event: Event, state: State) -> bool:
        del state
        return event is Event.BATCH_END and python_random.random() < 0.5

    return Algorithm("matches_by_global_draw", match, _shrunk)


def host_match_writes() -> Algorithm:
    """A host algorithm whose match notes its answer in `state.metrics`."""

    def match(event: Event, state: State) -> bool:
        acts = event is Event.BATCH_END
        if acts:
            state.metrics["host_match_writes/acts"] = state.key.sum()
        return acts

    return Algorithm("host_match_writes", match, _shrunk, host=True)


def reads_timestamp() -> Algorithm:
    """Decays by `state.timestamp` inside apply, where it would be compiled in as a constant."""

    def apply(event: Event, state: State) -> State:
        del event
        return _scaled(state, 1 / (1 + state.timestamp.batch))

    return Algorithm("reads_timestamp", on(Event.AFTER_TRAIN_BATCH), apply)


def opens_the_seal() -> Algorithm:
    """Opens the sealed timestamp, which is there for the host's use only."""

    def apply(event: Event, state: State) -> State:
        del event
        sealed = state.static.timestamp
        assert isinstance(sealed, SealedTime)
        return _scaled(state, 1 / (1 + sealed.opened(later=False).batch))

    return Algorithm("opens_the_seal", on(Event.AFTER_TRAIN_BATCH), apply)


def time_by_match() -> Algorithm:
    """Its match leaves the time in a closure, where apply reads it as a Python number."""
    moment: dict[str, Timestamp] = {}

    def match(event: Event, state: State) -> bool:
        moment["now"] = state.timestamp
        return event is Event.BATCH_START

    def apply(event: Event, state: State) -> State:
        del event
        return _scaled(state, 0.9 ** moment["now"].batch)

    return Algorithm("time_by_match", match, apply)


def warms_up_by_match() -> Algorithm:
    """The same with a number: match works out the fraction of the run, apply scales the gradients by it."""
    share = 0.0

    def match(event: Event, state: State) -> bool:
        nonlocal share
        if event is not Event.AFTER_TRAIN_BATCH:
            return False
        share = 0.1 + (state.timestamp.elapsed() or 0.0)
        return True

    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(grads={name: grad * share for name, grad in (state.grads or {}).items()})

    return Algorithm("warms_up_by_match", match, apply)


MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(make, "match_pure")
        for make in (
            counts_matches,
            acts_once,
            matches_by_loss,
            matches_by_kept_loss,
            matches_by_key,
            matches_by_global_draw,
            host_match_writes,
        )
    ),
    *(Mutant(make, "time_from_clock") for make in (reads_timestamp, opens_the_seal, time_by_match, warms_up_by_match)),
)
"""Every mutant of this file."""
