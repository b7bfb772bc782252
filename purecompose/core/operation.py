"""Operations: what a program is lowered to, and how they are folded.

An operation is a function `(carry, purpose) -> carry`. The carry is what changes along the fold; the purpose says what
the run is for and is the same for all of it. Events, stages and scopes lower themselves to operations.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from purecompose.core.algorithm import Algorithm
from purecompose.core.contract import Contract
from purecompose.core.cut import Cut
from purecompose.core.ranks import Sharing
from purecompose.core.state import State
from purecompose.time.event import Event


__all__ = ["NO_PURPOSE", "Carry", "Lowered", "Node", "Operation", "Place", "Purpose", "in_order", "lift"]


class Carry(NamedTuple):
    """What an operation receives and returns."""

    state: State
    used: frozenset[str] = frozenset()
    """The parameters whose gradients an update has applied: no later update applies them again.

    Used gradients stay in the state, for algorithms that look at them, until the next `Grad`. A `Grad` makes new
    ones, and so may a stage; a used gradient that an algorithm has edited is still a used one.
    """
    terms: int | Tensor | None = None
    """In a microbatch, after the loss: the number of terms that the loss is the mean of."""


class Purpose(NamedTuple):
    """What a run is for."""

    sharing: Sharing = "all"
    """What gradients are of, where several processes share the batch."""
    is_again: bool = False
    """Whether this is `state.gradient`, which needs only gradients and loss."""
    watch: Contract | None = None
    """Checks each operation, in the first run of a schedule."""


NO_PURPOSE = Purpose()
"""An ordinary step."""

Operation: TypeAlias = Callable[[Carry, Purpose], Carry]


class Lowered(NamedTuple):
    """An operation and what compiled steps and populations need to know about it."""

    run: Operation
    algorithm: Algorithm | None = None
    """The algorithm that acts, if it is an event's."""
    is_host: bool = False
    """Whether a host algorithm acts in it: it runs outside compiled code."""
    with_slices: Callable[[Callable[[Operation], Operation]], Operation] | None = None
    """For a scope that runs its body on slices of the batch: the scope with its body transformed by a function, such as
    one that compiles it."""
    node: int = 0
    """The index of the program's node that it comes from."""


class Node(Protocol):
    """A part of a program: an event, a stage or a scope."""

    def lower(self, place: "Place", /) -> Sequence[Lowered]:
        """Return the operations that the node stands for in this place."""
        ...


class Place(NamedTuple):
    """Where a node stands, and what it may ask about the step."""

    at: Callable[[Event], Sequence[Lowered]]
    """Return the operations of the algorithms that act at an event, in their order."""
    cut: Cut
    """How `Microbatches` cuts batches where it does not say itself."""
    is_shared: bool = False
    """Whether each of several processes runs a part of the batch."""
    is_slice: bool = False
    """Whether the node runs on slices of the batch, whose gradient is not the step's."""
    is_weighted: bool = False
    """Whether slices are weighted, so that the terms of their losses must be counted."""

    def lower(self, program: Iterable[Node]) -> list[Lowered]:
        """Return the operations of several nodes, in order."""
        return [lowered for node in program for lowered in node.lower(self)]


def in_order(operations: Iterable[Operation]) -> Operation:
    """Return one operation that runs the given ones one after the other: the fold."""
    ops = tuple(operations)

    def run(carry: Carry, purpose: Purpose) -> Carry:
        return functools.reduce(lambda carry, op: op(carry, purpose), ops, carry)

    return run


def lift(fn: Callable[[State, Contract | None], State], *, may_set_gradients: bool = False) -> Operation:
    """Lift a stage or an application of an algorithm to an operation.

    Args:
        fn: A function of the state and of the contract that watches the run, if one does.
        may_set_gradients: Gradients that it replaces are new ones, which an update may apply.
    """

    def run(carry: Carry, purpose: Purpose) -> Carry:
        state, used, terms = carry
        new_state = fn(state, purpose.watch)
        if may_set_gradients and used and new_state.grads:
            old: dict[str, Any] = state.grads or {}
            used -= {name for name, grad in new_state.grads.items() if grad is not old.get(name)}
        return Carry(new_state, used, terms)

    return run
