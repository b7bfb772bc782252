"""Algorithms whose `match` reads more than time and shapes, or whose `apply` gets the time in another way."""

import random as python_random

from torch import Tensor

from purecompose.core.algorithm import Algorithm
from purecompose.core.context import SealedTime
from purecompose.core.state import State
from purecompose.time import Timestamp
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_grads, scaled_params


def _shrunk(event: Event, state: State) -> State:
    del event
    return scaled_params(state, 0.99)


# match_pure


@mutant("match_pure")
def counts_matches() -> Algorithm:
    """Acts in every second step by counting the calls of `match`."""
    asked = 0

    def match(event: Event, state: State) -> bool:
        nonlocal asked
        del state
        if event is not Event.BATCH_END:
            return False
        asked += 1
        return asked % 2 == 0

    return Algorithm("counts_matches", match, _shrunk)


@mutant("match_pure")
def acts_once() -> Algorithm:
    """Remembers the batch of the last `match` call to act once per batch: a second call for the same batch is False."""
    last = -1

    def match(event: Event, state: State) -> bool:
        nonlocal last
        if event is not Event.BATCH_START or state.timestamp.batch == last:
            return False
        last = state.timestamp.batch
        return True

    return Algorithm("acts_once", match, _shrunk)


@mutant("match_pure")
def matches_by_loss() -> Algorithm:
    """Reads the loss with `.item()`, which is not known when matching is decided."""

    def match(event: Event, state: State) -> bool:
        return event is Event.AFTER_TRAIN_BATCH and state.loss is not None and not state.loss.item() < 0.1

    return Algorithm("matches_by_loss", match, _shrunk)


@mutant("match_pure")
def matches_by_kept_loss() -> Algorithm:
    """Bypasses the sealed values: apply keeps the last two losses in a closure, where match reads them."""
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


@mutant("match_pure")
def matches_by_key() -> Algorithm:
    """Reads the run's key at INIT and acts only in runs with an even seed, so that the schedule depends on the seed."""
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


@mutant("match_pure")
def matches_by_global_draw() -> Algorithm:
    """Acts in half of the steps, chosen by Python's random generator."""

    def match(event: Event, state: State) -> bool:
        del state
        return event is Event.BATCH_END and python_random.random() < 0.5

    return Algorithm("matches_by_global_draw", match, _shrunk)


@mutant("match_pure")
def host_match_writes() -> Algorithm:
    """A host algorithm whose match writes its answer into `state.metrics`."""

    def match(event: Event, state: State) -> bool:
        acts = event is Event.BATCH_END
        if acts:
            state.metrics["host_match_writes/acts"] = state.key.sum()
        return acts

    return Algorithm("host_match_writes", match, _shrunk, host=True)


# time_from_clock


@mutant("time_from_clock", at=Event.AFTER_TRAIN_BATCH)
def reads_timestamp(state: State) -> State:
    """Decays by `state.timestamp` inside apply, where it would be compiled in as a constant."""
    return scaled_params(state, 1 / (1 + state.timestamp.batch))


@mutant("time_from_clock", at=Event.AFTER_TRAIN_BATCH)
def opens_the_seal(state: State) -> State:
    """Opens the sealed timestamp, which is there for the host's use only."""
    sealed = state.static.timestamp
    assert isinstance(sealed, SealedTime)
    return scaled_params(state, 1 / (1 + sealed.opened(later=False).batch))


@mutant("time_from_clock")
def time_by_match() -> Algorithm:
    """Its match stores the time in a closure, where apply reads it as a Python number."""
    moment: dict[str, Timestamp] = {}

    def match(event: Event, state: State) -> bool:
        moment["now"] = state.timestamp
        return event is Event.BATCH_START

    def apply(event: Event, state: State) -> State:
        del event
        return scaled_params(state, 0.9 ** moment["now"].batch)

    return Algorithm("time_by_match", match, apply)


@mutant("time_from_clock")
def warms_up_by_match() -> Algorithm:
    """Its match computes the fraction of the run, a Python number, by which apply scales the gradients."""
    share = 0.0

    def match(event: Event, state: State) -> bool:
        nonlocal share
        if event is not Event.AFTER_TRAIN_BATCH:
            return False
        share = 0.1 + (state.timestamp.elapsed() or 0.0)
        return True

    def apply(event: Event, state: State) -> State:
        del event
        return scaled_grads(state, share)

    return Algorithm("warms_up_by_match", match, apply)
