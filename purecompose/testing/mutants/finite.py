"""Mutants of the law of finite numbers."""

import torch

from purecompose.event import Event
from purecompose.state import State
from purecompose.testing.mutants.mutant import mutant, scaled_grads


@mutant("stays_finite", at=Event.AFTER_TRAIN_BATCH)
def root_of_what_is_left(state: State) -> State:
    """Fades out by a root until half of the run is over, and does not think of what comes then."""
    assert state.clock is not None
    return scaled_grads(state, torch.sqrt(0.5 - state.clock.elapsed).to(torch.float32))


@mutant("stays_finite", at=Event.AFTER_TRAIN_BATCH, task="tokens")
def unit_rows(state: State) -> State:
    """Gives each row of a gradient unit length; those of tokens that did not occur are 0 / 0."""
    assert state.grads is not None
    grads = {name: grad / torch.linalg.vector_norm(grad, dim=-1, keepdim=True) for name, grad in state.grads.items()}
    return state.replace(grads=grads)
