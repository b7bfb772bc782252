"""The kinds of states that a step accepts: single ones, or the stacked members of a population."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from purecompose.core.operation import Lowered, Operation, in_order
from purecompose.core.state import State, check_single


@dataclass(frozen=True)
class Members:
    """The treatment of the states that are given to a step: single ones; a population overrides all of it."""

    def check(self, state: State) -> None:
        """Raise a `ValueError` for a state of another kind."""
        if state.key.ndim > 1:
            remedy = "population(step, n) steps all of them, unstack_states(state) gives each of them"
            check_single(state, "step(state, batch)", remedy)

    def one(self, state: State) -> State:
        """Return a single state, on which `match` is evaluated."""
        return state

    def example(self, batch: Any) -> Any:
        """Return the batch of a single state."""
        return batch

    def spread(self, batch: Any) -> Any:
        """Return the batch in the form in which it enters the state."""
        return batch

    def adapt(self, lowered: Lowered) -> Lowered:
        """Return an operation in the form that is folded and compiled."""
        return lowered

    def in_order(self, operations: Sequence[Lowered]) -> Operation:
        """Return one operation that runs adapted operations one after the other."""
        return in_order(lowered.run for lowered in operations)

    def each(self, fn: Callable[[State], State], state: State, where: str) -> State:
        """Return the state after a function that runs on the host; `where` begins its error messages."""
        del where
        return fn(state)

    def settle(self, state: State) -> State:
        """Return the state at the end of a fold as observers see it."""
        return state

    def describe(self, step: str) -> str:
        """Return the printed form of a step of such states, given that of a step of single ones."""
        return step


SINGLE = Members()
