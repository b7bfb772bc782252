"""Operations, to which a program is lowered, their fold, and the kinds of states that they are folded over.

An operation is a function `(carry, purpose) -> carry`. The carry changes along the fold; the purpose describes the
run and is the same for all of it. Events, stages and scopes lower themselves to operations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from purecompose.core.algorithm import Algorithm
from purecompose.core.context import Cut
from purecompose.core.contract import Contract
from purecompose.core.ranks import Ranks, SharedPart, Sharing
from purecompose.core.state import State, check_single
from purecompose.nn.keyed.draws import CURRENT, Part
from purecompose.time.event import Event


class Carry(NamedTuple):
    """The value that an operation receives and returns."""

    state: State
    """The state so far."""
    used: frozenset[str] = frozenset()
    """The parameters whose gradients an update has applied: no later update applies them again.

    Used gradients stay in the state, for algorithms that look at them, until the next `Grad`. A `Grad` computes new
    ones, and a stage may do so too; a used gradient that an algorithm edits is still a used one.
    """
    terms: int | Tensor | None = None
    """Number of terms that the loss is the mean of; set in a microbatch, after the loss."""


class Purpose(NamedTuple):
    """The purpose of a run, and what its parts have in common; user code finds it by `nn.keyed.draws.current_run`."""

    sharing: Sharing = "all"
    """Part of the batch whose gradients are computed, if several processes share it."""
    is_again: bool = False
    """True for `state.gradient`, which needs only gradients and loss."""
    is_first: bool = False
    """True in the first run of a schedule, and within it also for `state.gradient`."""
    watch: Contract | None = None
    """Contract that checks each operation, in the first run of a schedule."""
    whole_batch: Ranks | None = None
    """The processes that all have the whole batch here, of which each may compute a part; see `state.per_example`."""
    part: SharedPart | None = None
    """The part of the batch that this process runs, if several processes share it."""
    replaces_gradients: bool = False
    """True if a method replaces all gradients before anything reads them, so that processes need not send them."""
    is_compared: bool = False
    """True in a check that compares a few examples with halves of them; see `purecompose.core.separable`."""
    forwards: dict[Any, Any] | None = None
    """The forward passes so far, by their operations, if the gradients of several losses share them; see `gradient`."""
    frees_fields: bool = False
    """True if nothing reads gradients and outputs after the update, so that their memory is free for the new values."""

    @property
    def shared_batch(self) -> SharedPart | None:
        """This process's part, if batch normalisation uses the statistics of the whole batch."""
        return self.part if self.part is not None and self.part.shares_statistics else None


NO_PURPOSE = Purpose()
"""The purpose of an ordinary step."""

Operation: TypeAlias = Callable[[Carry, Purpose], Carry]


class Lowered(NamedTuple):
    """An operation with the facts that compiled steps and populations need."""

    run: Operation
    """The operation."""
    algorithm: Algorithm | None = None
    """Algorithm that acts, if the operation belongs to an event."""
    is_host: bool = False
    """True if a host algorithm acts in it, so that it runs outside compiled code."""
    with_slices: Callable[[Callable[[Operation], Operation]], Operation] | None = None
    """Function that returns the scope with its body transformed, for example compiled; only for scopes that run their
    body on slices of the batch."""
    sets_loss: bool = False
    """True if it is a stage that sets the loss from the outputs, or a scope around one."""
    until_loss: Operation | None = None
    """The part of a scope that comes before its loss, if there is one such stage."""
    separable: Callable[[Carry, Iterable[Operation]], None] | None = None
    """Check that a scope's batch may be cut; only for scopes that compute means over parts."""
    check: Callable[[Carry], None] | None = None
    """Check of the operation's input in a first run that needs values, which a traced run does not have."""
    node: int = 0
    """Index of the program's node that it comes from."""


class Node(Protocol):
    """A part of a program: an event, a stage or a scope."""

    def lower(self, place: "Place", /) -> Sequence[Lowered]:
        """Return the operations of the node in this place."""
        ...


class Place(NamedTuple):
    """The place of a node in the program, with the facts about the step that it may use."""

    at: Callable[[Event, str, int], Sequence[Lowered]]
    """Function that returns the operations of the algorithms that act at an event, in their order, from the event, the
    name of the draws of forward passes there, and how often the event occurs before."""
    cut: Cut
    """Number or size of slices for a `Microbatches` without its own."""
    is_shared: bool = False
    """True if each of several processes runs a part of the batch."""
    is_slice: bool = False
    """True if the node runs on slices of the batch, whose gradient is not the step's."""
    is_weighted: bool = False
    """True if slices are weighted, so that the terms of their losses must be counted."""
    accumulates: bool = False
    """True if a method takes means over several batches."""
    earlier: tuple[Node, ...] = ()
    """The nodes before it in the program."""

    def lower(self, program: Iterable[Node]) -> list[Lowered]:
        """Return the operations of several nodes, in order."""
        found: list[Lowered] = []
        place = self
        for node in program:
            found += node.lower(place)
            place = place._replace(earlier=(*place.earlier, node))
        return found

    def pass_name(self, name: str) -> str:
        """Return the name of the draws of forward passes at a node: of a stage, or of an event.

        It depends on the node's name and on how often that occurs before it, so that no other node, and no scope around
        it, changes these draws. The network's own pass, in the first stage `forward`, is named ".forward".
        """
        number = self.turn(name)
        words = [*([] if name in _OWN_PASSES else [name]), *([str(number)] if number else [])]
        return " ".join([".forward", *words])

    def turn(self, name: str) -> int:
        """Return how often a node's name occurs before this place in the program."""
        return sum(getattr(node, "name", None) == name for node in walk(self.earlier))


_OWN_PASSES = ("forward", "eval_forward")


def walk(program: Iterable[Node]) -> Iterator[Node]:
    """Yield every node of a program in order, including those inside scopes."""
    for node in program:
        yield node
        yield from walk(getattr(node, "body", ()))


def in_order(operations: Iterable[Operation]) -> Operation:
    """Return one operation that runs the given ones one after the other: the fold.

    The carry is in a list, which is empty while an operation runs: so nothing else holds what an operation drops.
    """
    ops = tuple(operations)
    if len(ops) == 1:
        return ops[0]

    def run(carry: Carry, purpose: Purpose) -> Carry:
        held = [carry]
        del carry
        for operation in ops:
            held.append(operation(held.pop(), purpose))
        return held.pop()

    return run


def lift(
    fn: Callable[[State, Contract | None], State], pass_name: str, *, turn: int = 0, may_set_gradients: bool = False
) -> Operation:
    """Lift a stage or an application of an algorithm to an operation.

    Args:
        fn: A function of the state and of the contract that watches the run, if any.
        pass_name: Name of the draws of its first forward pass; it differs between the parts of a step.
        turn: Number of earlier nodes of the same name, whose draws by name differ from those of this one.
        may_set_gradients: If true, gradients that it replaces count as new ones, which an update may apply.
    """

    def run(carry: Carry, purpose: Purpose) -> Carry:
        state, used, terms = carry
        # Not a `with` block, which would cost three times as much, in every step.
        token = CURRENT.set(Part(pass_name, purpose, turn))
        try:
            new_state = fn(state, purpose.watch)
        finally:
            CURRENT.reset(token)
        if may_set_gradients and used and new_state.grads and new_state.grads is not state.grads:
            old: dict[str, Any] = state.grads or {}
            used -= {name for name, grad in new_state.grads.items() if grad is not old.get(name)}
        return Carry(new_state, used, terms)

    return run


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
