"""Scopes, the nodes of a program with a body: `Grad`, `Microbatches`, and those of your own."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from purecompose import losses
from purecompose.combinations import unsupported
from purecompose.core.context import Cut
from purecompose.core.gradient import Forward, differentiate
from purecompose.core.means import with_whole_loss
from purecompose.core.operation import Carry, Lowered, Node, Operation, Place, Purpose, in_order, walk
from purecompose.core.program import Program, Stage, Update, as_nodes, matching_params
from purecompose.core.ranks import Ranks
from purecompose.core.repeated import in_slices, repeatable
from purecompose.core.separable import Check, check_scope
from purecompose.core.state import State
from purecompose.errors import ContractError
from purecompose.nn.differentiable import OwnDerivatives
from purecompose.nn.keyed.draws import Part, running
from purecompose.random.keys import fold_in, salt
from purecompose.time.event import Event


class Scope:
    """The base class of scopes, with a body of events, stages and further scopes.

    A scope of your own annotates its settings, which it is given by keyword, and defines `around`.

    Raises:
        TypeError: A setting is not annotated in the class, or one without a default is not given.

    Example::

        class Clipped(loop.Scope):
            norm: float

            def around(self, body, state):
                state = body(state)
                return state.replace(grads=clip_by_norm(state.grads, self.norm))

        gradient = Clipped(loop.Grad(BEFORE_FORWARD, loop.forward, loop.loss), norm=1.0)
        program = gradient, AFTER_TRAIN_BATCH, loop.update, loop.advance
    """

    body: Program
    """The nodes in it, in order."""
    ranks: Ranks | None = None
    """The processes that share the scope's batch, if there are several."""

    def __init__(self, *body: Any, **settings: Any) -> None:
        known = {name for cls in type(self).__mro__ for name in inspect.get_annotations(cls)} - {"body"}
        names = ", ".join(sorted(known - {"ranks"})) or "none"
        if unknown := settings.keys() - known:
            raise TypeError(f"{type(self).__name__}: unknown setting {min(unknown)!r}; those annotated are {names}")
        if missing := [name for name in known - settings.keys() if not hasattr(type(self), name)]:
            raise TypeError(f"{type(self).__name__}: expected a value for {min(missing)!r}; its settings are {names}")
        object.__setattr__(self, "body", as_nodes(body))
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    def around(self, body: Callable[..., State], state: State) -> State:
        """Return the state after the scope.

        If there is a `Grad` in the body, and no `update`, then `state.gradient` runs the scope again, so that methods
        such as `sam` see its gradients.

        Args:
            body: Function of a state that runs the body, once for each call. Its first call draws what the body draws
                without the scope, and later ones draw other numbers; `body(state, turn=0)` repeats the draws of the
                first.
            state: The state before the scope.
        """
        raise NotImplementedError(f"{type(self).__name__} must define around(body, state), which returns a state")

    def lower(self, place: Place) -> Sequence[Lowered]:
        """Return the operations of the scope."""
        inner = place.lower(self.body)
        body = in_order(lowered.run for lowered in inner)
        name = type(self).__name__
        number = sum(type(node) is type(self) for node in walk(place.earlier))
        pass_name = " ".join([".scope", name, *([str(number)] if number else [])])
        depth = _depth(self)

        def run(carry: Carry, purpose: Purpose) -> Carry:
            current, watch, num_calls = carry, purpose.watch, 0

            def run_body(state: State, turn: int | None = None) -> State:
                nonlocal current, num_calls
                turn, num_calls = num_calls if turn is None else turn, num_calls + 1
                # By the depth, so that scopes within each other number their turns independently.
                given = state.replace(key=fold_in(state.key, salt("turn", depth, turn))) if turn else state
                current = body(current._replace(state=given), purpose)
                return current.state.replace(key=state.key) if turn else current.state

            with running(Part(pass_name, purpose, number)):
                if watch is None:
                    end = self.around(run_body, carry.state)
                else:
                    end = watch.run_scope(name, self.around, run_body, carry.state)
            if not isinstance(end, State):
                raise ContractError(
                    f"{name}.around must return a State, got {type(end).__name__}"
                    f"{' (is a return statement missing?)' if end is None else ''}"
                )
            return current._replace(state=end.replace(key=carry.state.key))

        kinds = {type(node) for node in walk(self.body)}
        is_gradient = not place.is_slice and not kinds.isdisjoint({Grad, Microbatches}) and Update not in kinds
        is_host = any(lowered.is_host for lowered in inner)
        operation = repeatable(run, self.body) if is_gradient else run
        return [Lowered(operation, is_host=is_host, separable=_check_inside(inner))]

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

    Example::

        Grad(BEFORE_FORWARD, forward, AFTER_FORWARD, BEFORE_LOSS, loss, AFTER_LOSS, BEFORE_BACKWARD, wrt="D.*")
    """

    body: Program
    wrt: str | None

    def __init__(self, *body: Any, wrt: str | None = None) -> None:
        super().__init__(*body, wrt=wrt)

    def lower(self, place: Place) -> list[Lowered]:
        """Return the gradient of the body as one operation."""
        inner = place.lower(self.body)
        body = in_order(lowered.run for lowered in inner)
        forward, rest = (in_order(one.run for one in part) for part in _after_forward(inner))
        own = OwnDerivatives()

        def run(carry: Carry, purpose: Purpose) -> Carry:
            state, used, _ = carry
            names = state.context.trainable
            if self.wrt is not None:
                names = matching_params(names, self.wrt)
            if used and state.grads is not None:
                carry = carry._replace(state=state.replace(grads=_without(state.grads, used) or None))
            forwards = None if place.is_weighted else purpose.forwards
            if forwards is None:
                after = differentiate(body, carry, names, own, purpose)
            else:
                one = forwards.setdefault(forward, Forward())
                shared = in_order([functools.partial(one.run, forward), rest])
                after = differentiate(shared, carry, names, own, purpose, one)
            return Carry(after.state, after.used.difference(names), after.terms) if after.used else after

        is_host, to_loss = any(lowered.is_host for lowered in inner), until_loss(inner)
        check = _check(run, to_loss, self.body, place.cut) if place.accumulates and not place.is_slice else None
        operation = run if place.is_slice else repeatable(run, self.body)
        return [Lowered(operation, is_host=is_host, until_loss=to_loss, separable=check)]


@dataclass(frozen=True, init=False, repr=False)
class Microbatches(Scope):
    """Run the body on slices of the batch, so that k slices give the gradient of the whole batch.

    Loss, gradients and metrics that are single numbers (0-d, floating) become means over the slices, weighted by the
    terms in each slice's loss; other metrics are those of the last slice. Buffers and slots are passed from slice to
    slice. After several slices `outputs` cannot be read.

    Args:
        body: Events, stages and a `Grad`.
        microbatches: The number of slices. A batch of fewer examples is cut into single ones.
        microbatch_size: The largest number of examples in a slice, instead of the number of slices: each batch is cut
            into as few slices of (nearly) equal size as possible, a short batch into fewer. Without either argument,
            the settings of `compose` are used.

    Example::

        Microbatches(Grad(BEFORE_FORWARD, forward, AFTER_FORWARD, BEFORE_LOSS, loss, AFTER_LOSS), AFTER_BACKWARD)
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
        stages = [node for node in walk(self.body) if isinstance(node, Stage)]
        is_whole = any(losses.couples_examples(stage.fn) for stage in stages)
        count = self._denominators_of(stages)
        if (is_whole or count is not None) and place.is_shared:
            what = "a stage of your own with denominators or losses.over_batch"
            raise unsupported("several processes", what, repr(self))
        is_cut = not is_whole and (cut.may_slice or place.is_shared)
        inner = place._replace(is_shared=False, is_slice=True, is_weighted=place.is_weighted or is_cut)
        lowered = inner.lower(self.body)
        body, to_loss = in_order(one.run for one in lowered), until_loss(lowered)
        is_mean = is_cut or (place.accumulates and not is_whole)
        check = _check(body, to_loss, self.body, cut) if is_mean else None

        def sliced(transform: Callable[[Operation], Operation]) -> Operation:
            if not is_cut:
                return repeatable(with_own_gradients(body), self.body, separable=check)
            to_whole = None if to_loss is None else (transform(to_loss), transform(with_whole_loss))
            run = in_slices(transform(body), cut, to_whole, count)
            return run if place.is_shared else repeatable(with_own_gradients(run), self.body, separable=check)

        return [
            Lowered(
                sliced(lambda body: body),
                is_host=any(one.is_host for one in lowered),
                with_slices=sliced if is_cut and not place.is_slice else None,
                sets_loss=to_loss is not None,
                until_loss=to_loss,
                separable=None if place.is_slice else check,
            )
        ]

    def _denominators_of(self, stages: Iterable[Stage]) -> Callable[[State], Any] | None:
        """Return the function that returns the denominators of the only stage that has some, or `None`."""
        counts = [stage.denominators for stage in stages if stage.denominators is not None]
        if len(counts) > 1:
            raise unsupported("Microbatches", "several stages with denominators", repr(self))
        return counts[0] if counts else None


def _depth(node: Node) -> int:
    """Return how many scopes lie within each other in a node, itself included."""
    return 1 + max(map(_depth, node.body), default=0) if isinstance(node, Scope) else 0


def _check_inside(inner: Sequence[Lowered]) -> Check | None:
    """Return the check of the first operation in a scope of your own that has one, after those before it."""
    places = [place for place, one in enumerate(inner) if one.separable is not None]
    if not places:
        return None
    before = [one.run for one in inner[: places[0]]]

    def check(carry: Carry, earlier: Iterable[Operation] = ()) -> None:
        own = inner[places[0]].separable
        assert own is not None
        own(carry, [*earlier, *before])

    return check


def _check(body: Operation, to_loss: Operation | None, nodes: Program, cut: Cut) -> Check | None:
    if any(isinstance(node, Update) for node in walk(nodes)):  # after each slice, on purpose
        return None
    stages = [node for node in walk(nodes) if isinstance(node, Stage)]
    count = next((stage.denominators for stage in stages if stage.denominators is not None), None)
    name = "" if not stages or any(stage.sets_loss for stage in stages) else stages[-1].name
    # A scope of your own may do something to each slice on purpose, such as clip its gradients.
    is_own = any(isinstance(node, Scope) and type(node) not in (Grad, Microbatches) for node in walk(nodes))
    return functools.partial(check_scope, body, to_loss, name, count, cut, warns=is_own)


def until_loss(operations: Sequence[Lowered]) -> Operation | None:
    """Return the part of a program before the stage that sets its loss; `None` if there is no such stage or several."""
    found = [i for i, one in enumerate(operations) if one.sets_loss or one.until_loss is not None]
    if len(found) != 1:
        return None
    before = [one.run for one in operations[: found[0]]]
    inside = operations[found[0]].until_loss
    return in_order(before if inside is None else [*before, inside])


def _after_forward(operations: Sequence[Lowered]) -> tuple[Sequence[Lowered], Sequence[Lowered]]:
    """Return the operations up to the last stage before the loss, such as `forward`, and the others."""
    end = next((i for i, one in enumerate(operations) if one.sets_loss), 0)
    num = max((i + 1 for i in range(end) if operations[i].algorithm is None), default=0)
    return operations[:num], operations[num:]


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


def _without(grads: dict[str, Tensor], used: frozenset[str]) -> dict[str, Tensor]:
    return {name: grad for name, grad in grads.items() if name not in used}
