"""Mutants of the law of finite numbers."""

import torch

from purecompose import tree
from purecompose.core.state import State
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_grads


@mutant("stays_finite", at=Event.AFTER_TRAIN_BATCH)
def root_of_what_is_left(state: State) -> State:
    """Fades out by a root that is only defined for the first half of the run."""
    assert state.clock is not None
    return scaled_grads(state, torch.sqrt(0.5 - state.clock.elapsed).to(torch.float32))


@mutant("stays_finite", at=Event.AFTER_TRAIN_BATCH)
def divides_by_the_excess(state: State) -> State:
    """Divides gradients by the excess of their norm over a bound, which is usually 0."""
    return scaled_grads(state, 1 / (tree.global_norm(state.grads) - 10).clamp_min(0))
