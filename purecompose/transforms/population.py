"""population: a step of many states at once, by `torch.vmap` over their stacked tensors.

Members differ in their tensors: seeds, weights, memory, and hyper-parameters in `hparams`. They share architecture,
loss, optimizer and time, and so the schedule of each step. On the same batches each does what its own single run would
do, with the same draws.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.checks import check_whole
from purecompose.core.application import Observe
from purecompose.core.compose import Prepared, Step
from purecompose.core.context import Context
from purecompose.core.folding import Body, Notes, Unit, in_turn
from purecompose.core.plan import Plan
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER
from purecompose.transforms.members import expanded, mapped, member, shared, stacked
from purecompose.transforms.unmappable import explained


__all__ = ["Population", "population", "stack_states", "unstack_states"]

_FIELDS = tuple(field.name for field in dataclasses.fields(State) if field.name != "static")
# What ends with the step; here members may have leaves in common.
_PASSING = frozenset({"batch", "outputs", "grads", "clock", "first_example", "regrad"})
_CONTEXT_FIELDS = tuple(field.name for field in dataclasses.fields(Context) if field.init)
_BATCHES = ("shared", "each")


class Population(Step):
    """A training step of stacked states; made by `population`.

    Attributes:
        step: The step of one member.
        n: The number of members.
        chunk_size: How many are computed at a time; `None` for all.
        batches: "shared" for one batch for all, "each" for batches with a leading member dimension.
    """

    def __init__(self, step: Step, n: int, chunk_size: int | None, batches: str) -> None:
        """Takes checked arguments, as `population` does."""
        super().__init__(step.program, step.algorithms, step.passes, step.microbatches, step.microbatch_size)
        self.step, self.n, self.chunk_size, self.batches = step, n, chunk_size, batches
        _check_host(self)
        self._asks = any(not question.predicate.is_timed for question in self.matcher.questions)

    def prepare(self, state: State, batch: Any, *, purpose: str = "", draw: int | None = None) -> Prepared:
        """As a step does, for what all members have in common: they are asked as a single member.

        Raises:
            ValueError: The state is not that of `n` members, or a batch of `batches="each"` is not.
        """
        self._check_members(state)
        own, given = self._batch_of_one(batch), batch if self.batches == "each" else shared(batch)
        prepared = self._prepared(self._one(state), own, purpose, draw)

        def start() -> State:
            one = prepared.start()
            return state.replace(static=one.static, clock=one.clock, batch=given, metrics={})

        return prepared._replace(start=start)

    def num_examples(self, state: State, batch: Any) -> int:
        """How many examples each member's batch holds."""
        return super().num_examples(state, self._batch_of_one(batch))

    def fold(
        self,
        state: State,
        batch: Any,
        observe: Observe | None = None,
        *,
        purpose: str = "",
        draw: int | None = None,
    ) -> State:
        """As a step's, all tensors with a member dimension, those of the batch included.

        Raises:
            TypeError: With `observe`: what algorithms see under `vmap` are no values.
        """
        if observe is not None:
            raise TypeError(
                "nobody can look on while a population runs, since its tensors have no values of their own then: "
                "look at a member, traced(population.step)(unstack_states(state)[0], batch)"
            )
        end = super().fold(state, batch, purpose=purpose, draw=draw)
        return end.replace(batch=expanded(end.batch, self.n), outputs=expanded(end.outputs, self.n))

    def units(self, bits: int, observe: Observe | None = None) -> tuple[Unit, ...]:
        """As a step's. Host algorithms take stacked states, and act on member after member."""
        return tuple(
            unit._replace(run=self._one_by_one(unit)) if unit.is_host else unit._replace(sliced=None)
            for unit in super().units(bits, observe)
        )

    def body(self, units: Sequence[Unit]) -> Body:
        """Some of a schedule's units, those of traced code for all members at once."""
        parts: list[Unit] = []
        for is_host, part in groupby(units, lambda unit: unit.is_host):
            stretch = list(part)
            parts += stretch if is_host else [Unit(self._together(in_turn(stretch)), True, stretch[0].node)]
        return in_turn(parts)

    def init(self, state: State) -> State:
        """As a step's, of every member.

        Raises:
            ValueError: The state is not that of `n` members, or they come out in different forms.
        """
        self._check_members(state)
        init = super().init
        return _joined([init(one) for one in self._members(state)], "init")

    def fire(self, event: Event | str, state: State) -> State:
        """As a step's, of every member, one after the other."""
        event, fire = Event(event), super().fire
        self._check_members(state)
        if event in self.events or event is Event.INIT:
            return fire(event, state)  # which says why not
        is_timed = all(algorithm.predicate.at(event).is_timed for algorithm in self.algorithms)
        if is_timed and not self._matched_now(event, state, self.algorithms):
            return state
        return _joined([fire(event, one) for one in self._members(state)], str(event))

    def plan(self, state: State, batch: Any = None) -> Plan:
        """As a step's, of any member."""
        self._check_members(state)
        return super().plan(member(state, 0), None if batch is None else self._batch_of_one(batch))

    def replace(self, **changes: Any) -> "Population":
        """The population of the step with these changes."""
        return Population(self.step.replace(**changes), self.n, self.chunk_size, self.batches)

    def _together(self, body: Body) -> Body:
        def run(state: State, notes: Notes) -> State:
            ends: list[tuple[Any, set[str]]] = []

            def one(inner: State) -> dict[str, Any]:
                # Every chunk has notes of its own: else the first would have used up the gradients of all.
                inside = Notes(set(notes.used), contract=notes.contract)
                after = body(inner, inside)
                ends.append((after.static, inside.used))
                return {name: new for name in _FIELDS if (new := getattr(after, name)) is not getattr(inner, name)}

            with explained(state, self.n):
                changed = mapped(one, self.chunk_size)(state)
            static, notes.used = ends[-1]
            return state.replace(static=static, **self._lasting(changed))

        return run

    def _one_by_one(self, unit: Unit) -> Callable[[State], State]:
        def run(state: State) -> State:
            ends = _joined([unit.run(one) for one in self._members(state)], str(unit.algorithm), with_shared=True)
            return ends.replace(**self._lasting({name: getattr(ends, name) for name in _FIELDS}))

        return run

    def _lasting(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields; those that outlive the step have rows of their own for every member."""

        def rows(leaf: Any) -> Any:
            # A leaf that came out alike for all has one row, read n times: nobody could write into such a tensor.
            is_one = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.stride(0) == 0
            return leaf.contiguous() if is_one else leaf

        return {
            name: value if name in _PASSING else tree.map(rows, expanded(value, self.n))
            for name, value in fields.items()
        }

    def _members(self, state: State) -> list[State]:
        return [member(state, index) for index in range(self.n)]

    def _one(self, state: State) -> State:
        """What `match` may see. Where all ask for the time alone, that is the same in the stacked state."""
        return member(state, 0) if self._asks else state

    def _batch_of_one(self, batch: Any) -> Any:
        if self.batches == "shared":
            return batch
        for tensor in batches.tensors(batch):
            if not tensor.ndim or tensor.shape[0] != self.n:
                raise ValueError(
                    f"batches='each': expected tensors with a leading dimension of {self.n} members, got "
                    f"{tree.describe(tensor)}; stack the members' batches, or use batches='shared' for one batch"
                )
        return member(batch, 0)

    def _check_members(self, state: State) -> None:
        if state.key.shape == (self.n, 2):
            return
        came = f"one of {state.key.shape[0]}" if state.key.ndim == 2 else "a single one"
        hint = "population(step, n) has to have its n" if state.key.ndim == 2 else "stack_states([...]) makes one"
        raise ValueError(f"{self!r}: expected a stacked state of {self.n} members, got {came}; {hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Population, (self.step, self.n, self.chunk_size, self.batches)

    def __repr__(self) -> str:
        return f"population({self.step!r}, {self.n})"


def population(step: Step, n: int, chunk_size: int | None = None, batches: str = "shared") -> Population:
    """A step of n states at once: `pop(states, batch) -> states`.

    Args:
        step: The step of one member, as `compose` makes it.
        n: The number of members.
        chunk_size: How many members are computed at a time, which bounds the memory for activations; by default
            all.
        batches: "shared": all members train on the batch that is given. "each": every tensor of the batch has a
            leading dimension of n, with a batch for each.

    Returns:
        A `Step` over stacked states, in whose tensors the members come first (see `stack_states`); static part and
        time are one for all. `loss` has shape (n,). Members draw by their own keys. Host algorithms act on member
        after member.

    Raises:
        TypeError: The step is not a composed one; a population is compiled, not the other way round.
        ValueError: n or chunk_size below 1, other batches, or a host algorithm that acts inside a scope of the
            program or whose `match` reads more than the time.

    Example:
        >>> import torch, purecompose as pc
        >>> def new_state(seed):
        ...     net = torch.nn.Linear(3, 2)
        ...     return State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), key=seed)
        >>> pop = population(pc.compose(pc.loop_events), 4)
        >>> states = pop.init(stack_states([new_state(seed) for seed in range(4)]))
        >>> states = pop(states, (torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)))
        >>> states.loss.shape
        torch.Size([4])
    """
    if type(step) is not Step:
        raise TypeError(
            f"population(step, n): expected a step made by compose, got {type(step).__name__}; transforms go around a "
            "population: compile(population(step, n))"
        )
    check_whole(n, "population: n", 1)
    if chunk_size is not None:
        check_whole(chunk_size, "population: chunk_size", 1)
    if batches not in _BATCHES:
        raise ValueError(f"population: batches={batches!r}: expected one of {', '.join(map(repr, _BATCHES))}")
    return Population(step, n, chunk_size, batches)


def stack_states(states: Sequence[State]) -> State:
    """The state of a population: every tensor has a leading dimension, with a row for each state.

    Args:
        states: States of one architecture, loss and optimizer, at one time. They may differ in every number.

    Returns:
        A state whose static part is the first one's.

    Raises:
        TypeError: Something that is no state.
        ValueError: No state, or two that differ in more than numbers; the message names member and key path.
    """
    given = list(states)
    for state in given:
        if not isinstance(state, State):
            raise TypeError(f"stack_states: expected States, got {type(state).__name__}")
    if not given:
        raise ValueError("stack_states: expected at least one state")
    return _joined(given, "stack_states")


def unstack_states(state: State) -> list[State]:
    """The members of a stacked state, with tensors of their own; the inverse of `stack_states`.

    Raises:
        TypeError: It is no state.
        ValueError: It is not stacked, or a tensor has another number of rows; the message names the key path.
    """
    if not isinstance(state, State):
        raise TypeError(f"unstack_states: expected a State, got {type(state).__name__}")
    if state.key.ndim < 2:
        raise ValueError("unstack_states: expected a stacked state, got a single one; stack_states([...]) makes one")
    num = state.key.shape[0]
    for path, leaf in tree.leaves_with_paths(state).items():
        if isinstance(leaf, Tensor) and leaf.shape[:1] != (num,):
            raise ValueError(
                f"unstack_states: expected {num} rows, one for each member as in state.key, got {tree.describe(leaf)} "
                f"in state{path}"
            )
    return [member(state, index).copy() for index in range(num)]


def _joined(members: list[State], role: str, *, with_shared: bool = False) -> State:
    """The members stacked, if they have one form; errors begin with the role."""
    first = members[0]
    described = _described(first)
    for index, other in enumerate(members[1:], 1):
        _check_static(first, other, index, role)
        theirs = _described(other)
        if described != theirs:
            path = next(p for p in {**described, **theirs} if described.get(p) != theirs.get(p))
            raise ValueError(
                f"{role}: state{path} is {theirs.get(path, 'absent')} in member {index}, and "
                f"{described.get(path, 'absent')} in member 0; members of a population have one form"
            )
    return stacked([one.replace(static=first.static) for one in members], with_shared=with_shared)


def _described(state: State) -> dict[str, str]:
    """What is equal in all members, by key path."""
    return {
        path: tree.describe(leaf) if isinstance(leaf, Tensor) else type(leaf).__name__
        for path, leaf in tree.leaves_with_paths(state).items()
    }


def _check_static(first: State, other: State, index: int, role: str) -> None:
    name = _differing_field(first.context, other.context)
    if name is not None:
        ours, theirs = getattr(first.context, name), getattr(other.context, name)
        raise ValueError(
            f"{role}: member {index} has another {name} than member 0: {theirs!r} and {ours!r}; members of a "
            'population differ in tensors alone, such as named scalars: lr=pc.hparam("lr", 0.1)'
        )
    ours, theirs = first.static.timestamp, other.static.timestamp
    if ours != theirs:
        raise ValueError(
            f"{role}: member {index} stands at another time than member 0: {theirs!r} and {ours!r}; a population has "
            "one time for all"
        )


def _differing_field(first: Context, other: Context) -> str | None:
    """The first field in which two contexts differ; schedules, which follow from the others, as well."""
    if first.schedules == other.schedules and first == other:
        return None
    for name in _CONTEXT_FIELDS:
        if first != first.replace(**{name: getattr(other, name)}):
            return name
    return "schedules"


def _check_host(step: Step) -> None:
    """Raises a `ValueError` for host algorithms that cannot take member by member."""
    outermost = {node for node in step.program if isinstance(node, Event)}
    for algorithm in step.algorithms:
        if not algorithm.host:
            continue
        for event in step.events:
            left = algorithm.predicate.at(event)
            if left != NEVER and event not in outermost:
                raise ValueError(
                    f"{algorithm.name} is a host algorithm and acts at {event}, inside a scope of the program, where "
                    "all members of a population are computed as one: let it act outside, or drop host=True"
                )
            if not left.is_timed:
                raise ValueError(
                    f"{algorithm.name} is a host algorithm whose match at {event} reads more than the time: members "
                    "could differ in it, and a population has one schedule. Match by time, and decide in apply"
                )
