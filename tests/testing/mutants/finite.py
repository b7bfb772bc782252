"""Mutants of the law of finite numbers."""

import torch

from purecompose import tree
from purecompose.core.state import State
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_grads


@mutant("stays_finite", at=Event.AFTER_TRAIN_BATCH)
def root_of_what_is_left(state: State) -> State:
    """Fades out by a root until half of the run is over, and does not think of what comes then."""
    assert state.clock is not None
    return scaled_grads(state, torch.sqrt(0.5 - state.clock.elapsed).to(torch.float32))


@mutant("stays_finite", at=Event.AFTER_TRAIN_BATCH)
def divides_by_the_excess(state: State) -> State:
    """Scales gradients by how far their norm exceeds a bound, which most of the time is not at all: 1 / 0."""
    return scaled_grads(state, 1 / (tree.global_norm(state.grads) - 10).clamp_min(0))
