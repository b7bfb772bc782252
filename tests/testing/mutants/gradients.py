"""Mutants of the law of gradients: methods that drop the gradients that they are given."""

from purecompose.core.state import State
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant


@mutant("gradients_taken", at=Event.AFTER_TRAIN_BATCH)
def gradients_of_its_own_losses(state: State) -> State:
    """Computes the gradients again, as methods for several tasks do, without the trait by which it acts first."""
    (grads, _), (again, _) = state.gradients(of=[state.context.loss, state.context.loss])
    return state.replace(grads={name: 0.5 * (grad + again[name]) for name, grad in grads.items()})


@mutant("gradients_taken", at=Event.AFTER_BACKWARD)
def replaces_one_gradient(state: State) -> State:
    """Replaces the gradient of one layer only, by that of a penalty: others' edits of this layer are lost."""
    assert state.grads is not None
    return state.replace(grads={**state.grads, "0.weight": 0.01 * state.params["0.weight"].sign()})
