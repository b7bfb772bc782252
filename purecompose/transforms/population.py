"""`population`: a step of many states simultaneously, by `torch.vmap` over their stacked tensors.

Members differ in their tensors: seeds, weights, memory, and hyper-parameters in `hparams`. They share architecture,
loss, optimizer and time, and so the schedule of each step. On the same batches, each member computes the same as in a
single run, with the same draws.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.device import is_shard
from purecompose._support.specs import check_whole
from purecompose.combinations import unsupported
from purecompose.core.compose import Step
from purecompose.core.context import Context
from purecompose.core.operation import SINGLE, Carry, Lowered, Members, Operation, Purpose, in_order
from purecompose.core.state import State
from purecompose.core.values import NO_TEMPORARY, fields_where
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER
from purecompose.transforms.members import common, expanded, explained, mapped, member, stacked


_FIELDS = (*fields_where(persists=True), *NO_TEMPORARY)
_CONTEXT_FIELDS = tuple(field.name for field in dataclasses.fields(Context) if field.init)
_BATCHES = ("shared", "each")


@dataclass(frozen=True)
class Stacked(Members):
    """The stacked members of a population, which make a step one of n states.

    Attributes:
        n: The number of members.
        chunk_size: The number of members computed at a time; `None` for all.
        batches: "shared" for one batch for all, "each" for batches with a leading member dimension.
    """

    n: int
    chunk_size: int | None = None
    batches: str = "shared"

    def check(self, state: State) -> None:
        if state.key.shape == (self.n, 2):
            return
        came = f"one of {state.key.shape[0]}" if state.key.ndim == 2 else "a single one"
        hint = "population(step, n) has to have its n" if state.key.ndim == 2 else "stack_states([...]) makes one"
        raise ValueError(f"population: expected a stacked state of {self.n} members, got {came}; {hint}")

    def in_chunks(self) -> "tuple[Stacked, int]":
        """Return the members of one chunk and the number of chunks; all and 1 if chunks would differ in size."""
        if self.chunk_size is None or self.n % self.chunk_size:
            return self, 1
        return dataclasses.replace(self, n=self.chunk_size, chunk_size=None), self.n // self.chunk_size

    def one(self, state: State) -> State:
        # Schedules depend only on what all members have in common.
        return member(state, 0)

    def example(self, batch: Any) -> Any:
        if self.batches == "shared":
            return batch
        for tensor in batches.tensors(batch):
            if not tensor.ndim or tensor.shape[0] != self.n:
                raise ValueError(
                    f"batches='each': expected tensors with a leading dimension of {self.n} members, got "
                    f"{tree.describe(tensor)}; stack the members' batches, or use batches='shared' for one batch"
                )
        return member(batch, 0)

    def spread(self, batch: Any) -> Any:
        return batch if self.batches == "each" else common(batch)

    def adapt(self, lowered: Lowered) -> Lowered:
        if lowered.is_host:
            return lowered._replace(run=self._one_by_one(lowered), with_slices=None)
        return lowered._replace(with_slices=None)

    def in_order(self, operations: Sequence[Lowered]) -> Operation:
        parts: list[Operation] = []
        for is_host, group in groupby(operations, lambda lowered: lowered.is_host):
            runs = [lowered.run for lowered in group]
            parts += runs if is_host else [self._together(in_order(runs))]
        return in_order(parts)

    def each(self, fn: Callable[[State], State], state: State, where: str) -> State:
        return _joined([fn(one) for one in self._members(state)], where)

    def settle(self, state: State) -> State:
        return state.replace(batch=expanded(state.batch, self.n), outputs=expanded(state.outputs, self.n))

    def describe(self, step: str) -> str:
        return f"population({step}, {self.n})"

    def _together(self, operation: Operation) -> Operation:
        def run(carry: Carry, purpose: Purpose) -> Carry:
            if purpose.watch is not None:
                purpose.watch.refuse_observer(unsupported("a population", "traced"))
            ends: list[Carry] = []

            def one(state: State) -> dict[str, Any]:
                # Each chunk starts from the same carry; otherwise the first would mark the gradients of all as used.
                ends.append(operation(Carry(state, carry.used), purpose))
                new_state = ends[-1].state
                return {name: new for name in _FIELDS if (new := getattr(new_state, name)) is not getattr(state, name)}

            rest = "step the members one after the other (unstack_states)"
            with explained("population", "member", rest, carry.state, self.n):
                changed = mapped(one, self.chunk_size)(carry.state)
            state = carry.state.replace(static=ends[-1].state.static, **self._with_rows(changed))
            return Carry(state, ends[-1].used, carry.terms)

        return run

    def _one_by_one(self, lowered: Lowered) -> Operation:
        def run(carry: Carry, purpose: Purpose) -> Carry:
            ends = [lowered.run(carry._replace(state=one), purpose).state for one in self._members(carry.state)]
            joined = _joined(ends, str(lowered.algorithm), with_common=True)
            fields = self._with_rows({name: getattr(joined, name) for name in _FIELDS})
            return carry._replace(state=joined.replace(**fields))

        return run

    def _with_rows(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields; those that persist get a separate row for each member."""

        def rows(leaf: Any) -> Any:
            # A leaf that is the same for all members is one row expanded to n, which cannot be written into.
            is_one = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.stride(0) == 0
            return leaf.contiguous() if is_one else leaf

        return {
            name: value if name in NO_TEMPORARY else tree.map(rows, expanded(value, self.n))
            for name, value in fields.items()
        }

    def _members(self, state: State) -> list[State]:
        return [member(state, index) for index in range(self.n)]


def population(step: Step, n: int, chunk_size: int | None = None, batches: str = "shared") -> Step:
    """Return a step of n stacked states: `pop(states, batch) -> states`.

    Args:
        step: The step of one member, as `compose` makes it.
        n: The number of members.
        chunk_size: Number of members computed at a time, which bounds the memory for activations; by default all. If it
            divides n, a compiled step on the CPU calls one graph for each chunk.
        batches: "shared": all members train on the given batch. "each": every tensor of the batch has a
            leading dimension of n, with a batch for each member.

    Returns:
        A `Step` over stacked states, whose tensors have a leading member dimension (see `stack_states`); static part
        and time are the same for all. `loss` has shape (n,). Members draw by their own keys. Host algorithms act on
        one member after the other.

    Raises:
        TypeError: `step` is not a step.
        ValueError: `n` or `chunk_size` is below 1, or `batches` has another value.
        UnsupportedError: The step is of a population or of several processes, or a host algorithm acts inside a scope
            of the program or has a `match` that reads more than the time.

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
    if not isinstance(step, Step):
        raise TypeError(f"population(step, n): expected a step made by compose, got {type(step).__name__}")
    if step.members != SINGLE:
        raise unsupported("a population", "another population", f"population({step!r}, {n})")
    if step.ranks is not None:
        raise unsupported("a population", "several processes", f"population({step!r}, {n})")
    check_whole(n, "population: n", 1)
    if chunk_size is not None:
        check_whole(chunk_size, "population: chunk_size", 1)
    if batches not in _BATCHES:
        raise ValueError(f"population: batches={batches!r}: expected one of {', '.join(map(repr, _BATCHES))}")
    _check_host(step)
    return step.replace(members=Stacked(n, chunk_size, batches))


def stack_states(states: Sequence[State]) -> State:
    """Return the state of a population: every tensor has a leading dimension, with a row for each state.

    Args:
        states: States of one architecture, loss and optimizer, at the same time. They may differ in every number.

    Returns:
        A state with the static part of the first state.

    Raises:
        TypeError: An element is not a state.
        ValueError: There is no state, or two differ in more than numbers; the message names member and key path.

    Example:
        >>> import torch
        >>> from purecompose import losses, optim
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> stack_states([state, state]).params["weight"].shape
        torch.Size([2, 1, 2])
    """
    given = list(states)
    for state in given:
        if not isinstance(state, State):
            raise TypeError(f"stack_states: expected States, got {type(state).__name__}")
    if not given:
        raise ValueError("stack_states: expected at least one state")
    if any(map(is_shard, tree.leaves(given))):
        raise unsupported("a population", "several processes", "stack_states")
    return _joined(given, "stack_states")


def unstack_states(state: State) -> list[State]:
    """Return the members of a stacked state, as copies; the inverse of `stack_states`.

    Args:
        state: A state of `stack_states`, or one that a population has trained.

    Raises:
        TypeError: `state` is not a state.
        ValueError: The state is not stacked, or a tensor has another number of rows; the message names the key path.

    Example:
        >>> import torch
        >>> from purecompose import losses, optim
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> len(unstack_states(stack_states([state, state, state])))
        3
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


def by_form(fn: Callable[[State, int], Any], states: Iterable[State]) -> list[Any]:
    """Call a function once for all states of one form, stacked, and return its results in the order of the states.

    So an ensemble may have members of several widths or architectures, one population for each form. States have one
    form if `stack_states` can stack them.

    Args:
        fn: Function `(states, n) -> result` of the stacked states of n members. Each member gets its part of the
            result: a state; its row of every tensor, and its place in every list of n numbers, also in dicts, lists and
            tuples.
        states: The members.

    Raises:
        TypeError: An element is not a state.
        ValueError: A tensor in a result does not have a row for each member.

    Example:
        >>> import torch
        >>> from purecompose import compose, loop_events, losses, optim
        >>> nets = [torch.nn.Linear(2, 1), torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 1))]
        >>> states = State.create_many([nets[0], nets[1], nets[0]], loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> batch = torch.ones(4, 2), torch.zeros(4, 1)
        >>> states = by_form(lambda group, n: population(compose(loop_events), n)(group, batch), states)
        >>> [len(state.params) for state in states], by_form(lambda group, n: group.loss, states)[2].shape
        ([2, 4, 2], torch.Size([]))
    """
    groups: list[tuple[State, dict[str, str], list[tuple[int, State]]]] = []
    for index, state in enumerate(states):
        if not isinstance(state, State):
            raise TypeError(f"by_form: expected States, got {type(state).__name__}")
        own = _described(state)
        for first, described, members in groups:
            is_same = own == described and state.timestamp == first.timestamp
            if is_same and _differing_field(first.context, state.context) is None:
                members.append((index, state))
                break
        else:
            groups.append((state, own, [(index, state)]))
    found: dict[int, Any] = {}
    for _, _, members in groups:
        result = fn(stack_states([state for _, state in members]), len(members))
        parts = _parts_of_members(result, len(members))
        found |= {index: part for (index, _), part in zip(members, parts, strict=True)}
    return [found[index] for index in range(len(found))]


def _parts_of_members(result: Any, num: int) -> list[Any]:
    """Return each member's part of what a function of stacked states returned."""
    if isinstance(result, State):
        return unstack_states(result)

    def is_list_of_numbers(value: Any) -> bool:
        return isinstance(value, list) and len(value) == num and all(isinstance(one, int | float) for one in value)

    def part(index: int) -> Any:
        def own(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.shape[:1] != (num,):
                raise ValueError(f"by_form: expected a row for each of {num} members, got {tree.describe(leaf)}")
            return leaf[index] if isinstance(leaf, Tensor) or is_list_of_numbers(leaf) else leaf

        return tree.map(own, result, is_leaf=is_list_of_numbers)

    return [part(index) for index in range(num)]


def _joined(members: list[State], role: str, *, with_common: bool = False) -> State:
    """Return the members stacked, if they agree in structure, shapes and dtypes; errors begin with `role`."""
    first = members[0]
    described = _described(first)
    for index, other in enumerate(members[1:], 1):
        _check_static(first, other, index, role)
        theirs = _described(other)
        if described != theirs:
            path = next(p for p in {**described, **theirs} if described.get(p) != theirs.get(p))
            raise ValueError(
                f"{role}: state{path} is {theirs.get(path, 'absent')} in member {index}, and "
                f"{described.get(path, 'absent')} in member 0; members of a population have the same structure, "
                "shapes and dtypes"
            )
    return stacked([one.replace(static=first.static) for one in members], with_common=with_common)


def _described(state: State) -> dict[str, str]:
    """Return a description of each leaf, equal in all members, by key path."""
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
            'population differ in tensors only: give all the same named scalar, such as lr=pc.hparam("lr", 0.1), and '
            'then each its value, states.replace(hparams={"lr": torch.tensor([0.1, 0.2])})'
        )
    ours, theirs = first.static.timestamp, other.static.timestamp
    if ours != theirs:
        raise ValueError(
            f"{role}: member {index} stands at another time than member 0: {theirs!r} and {ours!r}; a population has "
            "one time for all"
        )


def _differing_field(first: Context, other: Context) -> str | None:
    """Return the first field in which two contexts differ, including schedules, which `==` ignores."""
    if first.schedules == other.schedules and first == other:
        return None
    for name in _CONTEXT_FIELDS:
        if first != first.replace(**{name: getattr(other, name)}):
            return name
    return "schedules"


def _check_host(step: Step) -> None:
    """Raise an `UnsupportedError` for host algorithms that cannot act on one member after the other."""
    outermost = {node for node in step.program if isinstance(node, Event)}
    for algorithm in step.algorithms:
        if not algorithm.host:
            continue
        for event in step.events:
            left = algorithm.predicate.at(event)
            if left != NEVER and event not in outermost:
                raise unsupported(
                    "a population",
                    "a host algorithm inside Microbatches or another scope",
                    f"{algorithm.name} at {event}",
                )
            if not left.is_timed:
                raise unsupported(
                    "a population", "a host algorithm that matches by values", f"{algorithm.name} at {event}"
                )
