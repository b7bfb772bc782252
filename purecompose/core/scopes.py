"""The parts of a program besides events: stages, the update, and the scopes `Grad` and `Microbatches`.

Each node lowers itself to operations (see `purecompose.core.operation`). Your own scope is a frozen dataclass that
derives from `Scope` and defines `lower`.
"""

import fnmatch
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import Tensor

from purecompose import batch as batches, losses, tree
from purecompose.core.again import repeatable
from purecompose.core.contract import Contract
from purecompose.core.coupling import check_passes_agree, with_whole_loss
from purecompose.core.cut import Cut
from purecompose.core.gradient import check_terms, differentiate, num_terms
from purecompose.core.operation import Carry, Lowered, Node, Operation, Place, Purpose, in_order, lift, walk
from purecompose.core.ranks import Ranks
from purecompose.core.slices import run_slices, run_until_loss
from purecompose.core.state import State
from purecompose.losses.evaluation import advice
from purecompose.time.event import Event


__all__ = [
    "as_nodes",
    "Grad",
    "Microbatches",
    "Program",
    "Scope",
    "Stage",
    "StateFn",
    "Update",
    "events_in",
    "matching_params",
    "walk",
    "with_own_gradients",
]

StateFn: TypeAlias = Callable[[State], State]
Program: TypeAlias = tuple[Node, ...]


@dataclass(frozen=True)
class Stage:
    """A named core part of a program: a pure function of the state."""

    name: str
    fn: StateFn
    sets_loss: bool = False
    """True if it sets `state.loss` from the outputs and the batch, so that slices are weighted by its terms."""

    def __call__(self, state: State) -> State:
        return self.fn(state)

    def lower(self, place: Place) -> list[Lowered]:
        """Return the stage as an operation; a loss whose slices are weighted also counts its terms."""
        run = lift(self._run, place.pass_name(self.name), may_set_gradients=True)
        ops = [Lowered(run, sets_loss=self.sets_loss)]
        return [*ops, Lowered(_count_terms)] if self.sets_loss and place.is_weighted else ops

    def _run(self, state: State, watch: Contract | None) -> State:
        try:
            new_state = self.fn(state)
        except Exception as error:
            given = {"batch": state.batch, "outputs": state.outputs}
            forms = [f"{name} {_form(value)}" for name, value in given.items() if value is not None]
            error.add_note(f"in the stage {self.name}, with {', '.join(forms)}")
            if self.sets_loss:
                for note in advice(state.outputs, _targets_if_any(state)):
                    error.add_note(note)
            raise
        if watch is not None:
            watch.note_stage(self)
            if self.sets_loss:
                check_terms(new_state)
                check_passes_agree(new_state)
        return new_state

    def __repr__(self) -> str:
        return self.name


def _targets_if_any(state: State) -> Any:
    try:
        return state.targets
    except Exception:  # what is missing is reported already, or is not needed
        return None


def _form(value: Any) -> str:
    return f"{type(value).__name__}({', '.join(map(tree.describe, batches.tensors(value)))})"


def _count_terms(carry: Carry, purpose: Purpose) -> Carry:
    del purpose
    return carry._replace(terms=num_terms(carry.state))


@dataclass(frozen=True)
class Update:
    """The node that updates the parameters with the optimizer; `update(wrt=pattern)` updates only those that match."""

    wrt: str | None = None

    def __call__(self, *, wrt: str) -> "Update":
        return Update(wrt)

    def lower(self, place: Place) -> list[Lowered]:
        """Return the update as an operation."""
        del place
        return [Lowered(self._run)]

    def _run(self, carry: Carry, purpose: Purpose) -> Carry:
        state, used, terms = carry
        if state.grads is None:
            raise RuntimeError("the program's update comes before any Grad: there are no gradients")
        if not state.grads:  # a method has removed them all, for a later step
            return carry
        if self.wrt is None:
            chosen = state.grads
        else:
            # Match all trainable names, because gradients that an earlier update has used are gone after the next Grad.
            chosen = matching_params(tuple(dict.fromkeys([*state.context.trainable, *state.grads])), self.wrt)
        grads = {name: state.grads[name] for name in chosen if name in state.grads and name not in used}
        if not grads:
            if used.isdisjoint(chosen):  # the loss does not reach them
                return carry
            raise RuntimeError(
                f"{self!r} has nothing to apply: an earlier update has used every gradient of these parameters; put "
                "a Grad before it, or leave it out"
            )
        try:
            result = state.optimizer.update(grads, state.opt_state, state.params, state.scalar)
        except Exception as error:
            error.add_note(f"in the update of the optimizer {state.optimizer!r}")
            if frozen := [name for name in grads if name in state.context.frozen]:
                error.add_note(
                    f"state.grads has gradients of frozen parameters, for which the optimizer has no memory: {frozen}; "
                    "take those of state.context.trainable only"
                )
            raise
        if purpose.watch is not None:
            purpose.watch.note_update(state, result)
        params, opt_state = result
        return Carry(state.replace(params=params, opt_state=opt_state), used.union(grads), terms)

    def __repr__(self) -> str:
        return "update" if self.wrt is None else f"update(wrt={self.wrt!r})"


class Scope:
    """The base class of scopes, with a body of events, stages and further scopes."""

    body: Program
    ranks: Ranks | None = None
    """The processes that share the scope's batch, if there are several."""

    def __init__(self, *body: Any, **settings: Any) -> None:
        object.__setattr__(self, "body", as_nodes(body))
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    def lower(self, place: Place) -> Sequence[Lowered]:
        """Return the operations of the scope."""
        raise NotImplementedError(f"{type(self).__name__} must define lower(place), which returns operations")

    def guard(self, step: Any, state: State, batch: Any, *, is_first: bool) -> AbstractContextManager[Any] | None:
        """Return a context manager in which each step runs on the host, or `None`.

        Args:
            step: The step whose program contains the scope.
            state: The state given to the step.
            batch: The batch.
            is_first: True in the first run of a schedule, which is watched.
        """
        del step, state, batch, is_first
        return None

    def describe(self, step: str) -> str:
        """Return the printed form of a step whose program contains the scope, given the form without it."""
        return step

    def __repr__(self) -> str:
        nodes = [str(node) if isinstance(node, Event) else repr(node) for node in self.body]
        settings = {name: value for name, value in vars(self).items() if name != "body" and value is not None}
        parts = [*nodes, *(f"{name}={value!r}" for name, value in settings.items())]
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, init=False, repr=False)
class Grad(Scope):
    """Differentiate the loss that the body sets with respect to the trainable parameters.

    Changes of parameters and of the batch inside the body end with it.

    Args:
        body: Events and stages, one of which sets `state.loss`.
        wrt: A pattern (as in `fnmatch`) of parameter names; by default all that are trainable.
    """

    body: Program
    wrt: str | None

    def __init__(self, *body: Any, wrt: str | None = None) -> None:
        super().__init__(*body, wrt=wrt)

    def lower(self, place: Place) -> list[Lowered]:
        """Return the gradient of the body as one operation."""
        inner = place.lower(self.body)
        body = in_order(lowered.run for lowered in inner)

        def run(carry: Carry, purpose: Purpose) -> Carry:
            state, used, _ = carry
            names = matching_params(state.context.trainable, self.wrt)
            if used and state.grads is not None:
                carry = carry._replace(state=state.replace(grads=_without(state.grads, used) or None))
            after = differentiate(lambda inner: body(inner, purpose), carry, names)
            return Carry(after.state, after.used.difference(names), after.terms) if after.used else after

        is_host = any(lowered.is_host for lowered in inner)
        operation = run if place.is_slice else repeatable(run, self.body)
        return [Lowered(operation, is_host=is_host, until_loss=until_loss(inner))]


@dataclass(frozen=True, init=False, repr=False)
class Microbatches(Scope):
    """Run the body on slices of the batch, so that k slices give the gradient of the whole batch.

    Loss, gradients and metrics that are single numbers (0-d, floating) become means over the slices, weighted by the
    terms in each slice's loss. `outputs` and other metrics are those of the last slice; buffers and slots are passed
    from slice to slice.

    Args:
        body: Events, stages and a `Grad`.
        microbatches: The number of slices. A batch of fewer examples is cut into single ones.
        microbatch_size: The largest number of examples in a slice, instead of the number of slices: each batch is cut
            into as few slices of (nearly) equal size as possible, a short batch into fewer. Without either argument,
            the settings of `compose` are used.

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is below 1, or both are given.
    """

    body: Program
    microbatches: int | None
    microbatch_size: int | None

    def __init__(self, *body: Any, microbatches: int | None = None, microbatch_size: int | None = None) -> None:
        super().__init__(*body, **Cut.checked(microbatches, microbatch_size, "Microbatches")._asdict())

    @property
    def cut(self) -> Cut | None:
        """The number or size of the slices; `None` if the step decides."""
        cut = Cut(self.microbatches, self.microbatch_size)
        return None if cut == (None, None) else cut

    def lower(self, place: Place) -> list[Lowered]:
        """Return the scope as one operation."""
        cut = self.cut or place.cut
        # A single slice is the whole batch of the enclosing scope, and its loss has the same weight in both.
        is_cut = cut.may_slice or place.is_shared
        inner = place._replace(is_shared=False, is_slice=True, is_weighted=place.is_weighted or is_cut)
        lowered = inner.lower(self.body)
        body, to_loss = in_order(one.run for one in lowered), until_loss(lowered)

        def sliced(transform: Callable[[Operation], Operation]) -> Operation:
            if not is_cut:
                return repeatable(with_own_gradients(body), self.body)
            on_slice = transform(body)
            on_outputs, on_whole = (None, None) if to_loss is None else (transform(to_loss), transform(with_whole_loss))

            def run(carry: Carry, purpose: Purpose) -> Carry:
                if losses.couples_examples(carry.state.context.loss):
                    carry = run_until_loss(on_outputs, on_whole, carry, purpose, cut)
                return run_slices(on_slice, carry, purpose, cut, is_checked=to_loss is not None)

            return run if place.is_shared else repeatable(with_own_gradients(run), self.body)

        return [
            Lowered(
                sliced(lambda body: body),
                is_host=any(one.is_host for one in lowered),
                with_slices=sliced if is_cut and not place.is_slice else None,
                sets_loss=to_loss is not None,
            )
        ]


def until_loss(operations: Sequence[Lowered]) -> Operation | None:
    """Return the part of a program before the stage that sets its loss; `None` if there is no such stage or several."""
    found = [i for i, one in enumerate(operations) if one.sets_loss or one.until_loss is not None]
    if len(found) != 1:
        return None
    before = [one.run for one in operations[: found[0]]]
    inside = operations[found[0]].until_loss
    return in_order(before if inside is None else [*before, inside])


def with_own_gradients(run_inner: Operation) -> Operation:
    """Return the operation with earlier gradients hidden from it, so that slices neither see nor edit them."""

    def run(carry: Carry, purpose: Purpose) -> Carry:
        state, used, _ = carry
        if state.grads is None:
            return run_inner(carry, purpose)
        inside = run_inner(Carry(state.replace(grads=None)), purpose)
        new_state, grads = inside.state, inside.state.grads
        if not grads:
            return Carry(new_state.replace(grads=state.grads), used, inside.terms)
        merged = {**_without(state.grads, used), **grads}
        return Carry(new_state.replace(grads=merged), used.difference(grads) | inside.used, inside.terms)

    return run


def matching_params(names: tuple[str, ...], wrt: str | None) -> tuple[str, ...]:
    """Return the names that match a pattern, or all names if it is `None`.

    Raises:
        ValueError: No name matches.
    """
    if wrt is None:
        return names
    found = tuple(name for name in names if fnmatch.fnmatchcase(name, wrt))
    if not found:
        raise ValueError(f"wrt={wrt!r} matches no trainable parameter; there are {', '.join(names) or 'none'}")
    return found


def _without(grads: dict[str, Tensor], used: frozenset[str]) -> dict[str, Tensor]:
    return {name: grad for name, grad in grads.items() if name not in used}


def as_nodes(given: Iterable[Any]) -> Program:
    """Return the nodes of a program, with names of events replaced by events and plain functions by stages.

    Raises:
        TypeError: An element is not an event, a stage, a function or a scope.
    """
    return tuple(map(_as_node, given))


def _as_node(given: Any) -> Node:
    if isinstance(given, str):
        return Event(given)
    if not isinstance(given, type) and callable(getattr(given, "lower", None)):
        return given
    if not callable(given):
        raise TypeError(f"{given!r} is neither an event, a stage (a function State -> State), nor a scope")
    return Stage(_name_of(given), cast(StateFn, given))


def _name_of(fn: Any) -> str:
    """Return a stage's name, which keys its draws: without an address, which would differ in a resumed run."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", None) or type(fn).__name__


def events_in(program: Iterable[Node]) -> tuple[Event, ...]:
    """Return the events of a program in order, including those inside scopes, each once.

    Example:
        >>> from purecompose.core.loop import predict_events
        >>> [event.name for event in events_in(predict_events)[-2:]]
        ['PREDICT_AFTER_FORWARD', 'PREDICT_BATCH_END']
    """
    return tuple(dict.fromkeys(node for node in walk(program) if isinstance(node, Event)))
