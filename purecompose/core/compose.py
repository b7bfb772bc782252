"""`compose`: a training step from a loop program and algorithms.

The step is a fold. For each schedule (which algorithms act at which events) the program is turned into one function
once, with the algorithms in the order determined by the passes; a step looks up this function and runs it.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from purecompose._support import INSTALLED
from purecompose._support.contexts import NOTHING, together
from purecompose._support.device import arithmetic
from purecompose._support.internals import GradMode, called_by_dynamo, get_eval_frame_callback, without_dynamo
from purecompose._support.specs import suggests_keywords
from purecompose.batch.fields import aliases
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.application import Matcher, Outside, application
from purecompose.core.clock import Clock, Constant, check_constants, constants_of
from purecompose.core.composable import (
    as_algorithms,
    as_passes,
    as_program,
    check_collects_once,
    check_constraints,
    check_layout,
    check_no_host,
    check_no_hosts_in_grad,
    events_in_grad,
    run_checked,
    warn_of_idle_algorithms,
    warn_of_whole_batches,
    with_usual_loop,
)
from purecompose.core.context import Context, Cut, SealedTime, Static, describe_moment
from purecompose.core.contract import Contract, Observe
from purecompose.core.gradient import wants_outer_gradient
from purecompose.core.loop import Plan, advance, make_plan
from purecompose.core.operation import SINGLE, Carry, Lowered, Members, Node, Operation, Place, Purpose, walk
from purecompose.core.passes import DEFAULT_PASSES, Pass, compose_passes
from purecompose.core.program import Program, StateFn, Update, events_in
from purecompose.core.ranks import Ranks
from purecompose.core.scopes import Scope
from purecompose.core.separable import check_operations, is_due
from purecompose.core.state import State
from purecompose.core.values import NO_TEMPORARY
from purecompose.time import Timestamp
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER


_WHOLE = Cut(1)
WHY_UNTRACED = (
    "a step decides in Python, by the time in its state, which algorithms act. So a step breaks Dynamo's graph and "
    "runs as a graph of its own. Leave out fullgraph=True, or call pc.compile(step) outside of torch.compile"
)


class Prepared(NamedTuple):
    """The host's decisions about a step that is about to run."""

    bits: int
    """Schedule of the step: the algorithms that act, as returned by `Matcher.schedule`."""
    num_examples: int
    """Number of examples in the batch of a single state."""
    later: Timestamp
    """The time after the step."""
    start: Callable[[], State]
    """Function that makes the state at the start of the fold, with batch and clock, and the timestamp sealed."""


@dataclass
class _Cache:
    """Values that a step has computed before; none of them changes a result."""

    lowered: dict[tuple[int, int], list[Lowered]] = field(default_factory=dict)
    """The operations of a node, by its index and its part of the schedule."""
    operations: dict[int, Operation] = field(default_factory=dict)
    """The whole program as one operation, by schedule."""
    purposes: dict[int, Purpose] = field(default_factory=dict)
    """The purpose of a step of which only the result of the clean-up is read, by schedule."""
    checked: dict[tuple[int, int], Context] = field(default_factory=dict)
    """The context in which a schedule was last checked, by schedule and number of examples."""
    ready: Context | None = None
    """The last context that is known to be initialised and to fit the program."""
    loss: Any = None
    """The loss of the last context."""
    constants: tuple[Constant, ...] = ()
    """The numbers and tensors that this loss reads from Python, as they were at its first step."""
    within_torch_compile: list[tuple[Any, "Step"]] = field(default_factory=list)
    """The backends of `torch.compile` within which the step was called, with the compiled step for each."""


class Step:
    """A training step: `step(state, batch) -> state`. Made by `compose`; immutable.

    A step is data. Transforms such as `population` and `data_parallel` return a step with other data.

    Attributes:
        program: The loop program.
        algorithms: The algorithms, in the order given.
        passes: The passes that order them at each event.
        cut: The number or size of the slices into which `Microbatches` cuts batches.
        members: The kind of states that the step accepts: single ones, or those of a population.

    Example::

        step = compose(loop_events, [alg.mixup(0.2)])
        state = step(step.init(state), batch)
    """

    def __init__(
        self,
        program: Program,
        algorithms: tuple[Algorithm, ...],
        passes: tuple[Pass, ...],
        cut: Cut = _WHOLE,
        members: Members = SINGLE,
    ) -> None:
        self.program: Program = program
        self.algorithms: tuple[Algorithm, ...] = algorithms
        self.passes: tuple[Pass, ...] = passes
        self.cut: Cut = cut
        self.members: Members = members
        self.events: tuple[Event, ...] = events_in(program)
        self.differentiated: tuple[Event, ...] = tuple(events_in_grad(program))
        self.has_advance: bool = any(node == advance for node in walk(program))
        self.matcher: Matcher = Matcher(algorithms, self.events)
        self._accumulates = any(Trait.COLLECTS_GRADIENTS in one.traits and one.predicate != NEVER for one in algorithms)
        self._matches_values = any(not question.predicate.is_timed for question in self.matcher.questions)
        self._order = compose_passes(*passes)
        self._outside = Outside(algorithms, self._order)
        self._masks = [self.matcher.mask(events_in([node])) for node in program]
        self._guards = [
            node.guard for node in walk(program) if isinstance(node, Scope) and type(node).guard is not Scope.guard
        ]
        self._purpose = Purpose(whole_batch=self.ranks)
        self._cache = _Cache()

    @property
    def ranks(self) -> Ranks | None:
        """The processes that share each batch, if there are several."""
        scopes = (node for node in walk(self.program) if isinstance(node, Scope))
        return next((scope.ranks for scope in scopes if scope.ranks is not None), None)

    @property
    def microbatches(self) -> int | None:
        """The number of slices into which a batch is cut; `None` if their size is given."""
        return self.cut.microbatches

    @property
    def microbatch_size(self) -> int | None:
        """The largest number of examples in a slice; `None` if the number of slices is given."""
        return self.cut.microbatch_size

    @called_by_dynamo(WHY_UNTRACED)
    def __call__(self, state: State, batch: Any) -> State:
        """Return the state after one batch; `state` and `batch` are not modified.

        Raises:
            RuntimeError: `init` has not been called for algorithms that need it.
            MatchError: An algorithm's `match` read something that is not known before the step.
            ContractError: An algorithm changed a structure, shape or dtype that must stay the same.
        """
        if get_eval_frame_callback() is not None:
            return without_dynamo(lambda backend: INSTALLED["torch.compile"](self, state, batch, backend))
        end = self.finish(self.fold(state, batch, keeps_fields=False))
        # `state` may read fields from a compiled step's buffers, which the next call of that step overwrites.
        return end if end.lease is None else end.unleased()

    def fold(
        self,
        state: State,
        batch: Any,
        observe: Observe | None = None,
        *,
        domain: str = "",
        draw: int | None = None,
        keeps_fields: bool = True,
    ) -> State:
        """Return the state at the end of the fold, before the clean-up: outputs and batch are still there.

        Args:
            state: The state.
            batch: The batch.
            observe: Called with each application of an algorithm.
            domain: Purpose of the draws; draws of two domains are unrelated.
            draw: Number that identifies the draws of this call; by default the batch's number in the run.
            keeps_fields: False to free gradients and outputs early, where no algorithm reads them after the update.
        """
        if not isinstance(state, State):
            raise TypeError(f"step(state, batch): expected a State first, got {type(state).__name__}")
        prepared, context = self.prepare(state, batch, domain=domain, draw=draw), state.context
        case = prepared.bits, prepared.num_examples
        checked = self._cache.checked.get(case) if observe is None else None
        is_first = checked is not context and checked != context
        grad_mode = NOTHING if wants_outer_gradient(state, batch) else GradMode(False)
        guarded = self.guarded(state, batch, is_first=is_first)
        purpose = self.purpose(None if keeps_fields else prepared.bits)
        with together(guarded, arithmetic(context.precision, state.device), grad_mode):
            if is_first:
                end = self.run_checked(prepared.bits, prepared.start(), purpose, observe)
            else:
                end = self.operation(prepared.bits)(Carry(prepared.start()), purpose).state
        if is_first or (self.has_advance and is_due(state.timestamp.batch)):
            self.check_separable(prepared)
        if checked is not context:  # from now on this object is recognized without a comparison
            self._cache.checked[case] = context
        return self.members.settle(end)

    def prepare(self, state: State, batch: Any, *, domain: str = "", draw: int | None = None) -> Prepared:
        """Decide on the host which algorithms act; see `fold` for the arguments.

        Raises:
            RuntimeError: `init` has not been called.
            ValueError: The state is a population's and the step is not, or the other way round; or the loss reads a
                number or tensor that has changed.
        """
        self.members.check(state)
        context, now = state.context, state.timestamp
        example = self.members.example(batch)
        if context is not self._cache.ready:
            self._check_ready(context, example)
        if self._cache.constants:
            check_constants(context.loss, self._cache.constants)
        one = self.members.one(state) if self._matches_values else state
        num_examples, later = context.layout.num_examples(example), now
        if self.has_advance:
            later = now.advance(num_examples, context.layout.num_tokens(example))
        bits = self.matcher.schedule(one, example, now, later)

        def start() -> State:
            return state.replace(
                static=Static(context, SealedTime(now, later)),
                clock=Clock.of(now, later, context.schedules, state.device, domain=domain, draw=draw),
                batch=self.members.spread(aliases(batch)),
                metrics={},
            )

        return Prepared(bits, num_examples, later, start)

    def guarded(self, state: State, batch: Any, *, is_first: bool) -> AbstractContextManager[Any]:
        """Return the context manager in which the program's scopes require a step to run."""
        if not self._guards:
            return NOTHING
        guards = [guard for make in self._guards if (guard := make(self, state, batch, is_first=is_first)) is not None]
        return together(*guards)

    def num_examples(self, state: State, batch: Any) -> int:
        """Return the number of examples in a batch, or in each member's batch."""
        return state.context.layout.num_examples(self.members.example(batch))

    def lowered(self, bits: int) -> tuple[Lowered, ...]:
        """Return the operations of a schedule, with the acting algorithms in their order.

        The operations of a node depend only on its part of the schedule. Schedules that agree in this part share the
        same objects, so that `state.gradient` has the same signature in both.
        """

        def at(event: Event, pass_name: str, turn: int) -> list[Lowered]:
            acting = self.order(self.matcher.matched(bits, event, self.algorithms), event)
            if event in self.differentiated:
                check_no_host(event, acting)
            return [Lowered(application(one, event, pass_name, turn), one, is_host=one.host) for one in acting]

        known, found = self._cache.lowered, []
        for index, (node, mask) in enumerate(zip(self.program, self._masks, strict=True)):
            if (index, bits & mask) not in known:
                place = Place(at, self.cut, accumulates=self._accumulates, earlier=self.program[:index])
                ops = [self.members.adapt(lowered._replace(node=index)) for lowered in node.lower(place)]
                known[index, bits & mask] = ops
            found += known[index, bits & mask]
        return tuple(found)

    def operation(self, bits: int) -> Operation:
        """Return the program of a schedule as one operation."""
        if bits not in self._cache.operations:
            self._cache.operations[bits] = self.members.in_order(self.lowered(bits))
        return self._cache.operations[bits]

    def purpose(self, bits: int | None = None) -> Purpose:
        """Return the purpose of a step; with a schedule, of one whose temporary fields only its algorithms read."""
        if bits is None:
            return self._purpose
        if bits not in self._cache.purposes:
            self._cache.purposes[bits] = _purpose_of(self._purpose, self.program, self.lowered(bits))
        return self._cache.purposes[bits]

    def run_checked(self, bits: int, start: State, purpose: Purpose, observe: Observe | None = None) -> State:
        """Run a schedule and check the contract of a step, as in the first run of each schedule."""
        contract = Contract(start, observe)
        end = run_checked(
            self.operation(bits),
            start,
            purpose._replace(is_first=True, watch=contract, replaces_gradients=False),
            program=self.program,
            has_algorithms=bool(self.algorithms),
            times=self.matcher.times,
        )
        check_constants(start.context.loss, self._cache.constants)
        return end

    def check_separable(self, prepared: Prepared) -> None:
        """Check that the batch of a prepared step may be cut as the step does; see `purecompose.core.separable`."""
        if any(one.separable is not None for one in self.lowered(prepared.bits)):
            plain = Place(lambda event, name, turn: [], self.cut, accumulates=self._accumulates)
            ways = (lambda: plain.lower(self.program)), (lambda: self.lowered(prepared.bits))
            check_operations(ways, self.members.one(prepared.start()))

    def finish(self, state: State) -> State:
        """Return the state as it is between steps: with the new time, and temporary fields set to `None`."""
        return state.replace(
            static=Static(state.static.context.rested(), state.static.opened(later=True)), **NO_TEMPORARY
        )

    @torch.inference_mode(False)  # as in State.create
    def init(self, state: State) -> State:
        """Fire `Event.INIT`, for surgery and slots, at the algorithms that are not initialised yet.

        Raises:
            ValueError: Two algorithms have different defaults for one hparam.
        """
        self.members.check(state)
        return self.members.each(self._outside.initialised, state, "init")

    def fire(self, event: Event | str, state: State) -> State:
        """Let the algorithms act at an event outside the program, such as EPOCH_END or EVAL_START.

        Raises:
            ValueError: The event is part of the program (or INIT, for which there is `init`).
        """
        event = Event(event)
        if event in self.events or event is Event.INIT:
            raise ValueError(f"{event} fires inside the step{' (init)' if event is Event.INIT else ''}")
        self.members.check(state)
        if self._outside.is_idle(event, state):
            return state
        return self.members.each(lambda one: self._outside.fired(event, one), state, str(event))

    def plan(self, state: State, batch: Any = None) -> Plan:
        """Return which algorithms act at which events for this state, in what order and why; it prints as a table.

        Args:
            state: The state, whose time decides.
            batch: A batch; needed if a `match` reads shapes.
        """
        self.members.check(state)
        one, example = self.members.one(state), None if batch is None else self.members.example(batch)
        now = one.timestamp
        later = now.advance() if self.has_advance else now
        bits = self.matcher.schedule(one, example, now, later)

        def matched(event: Event) -> Sequence[Algorithm]:
            if event in self.events:
                return self.matcher.matched(bits, event, self.algorithms)
            return self._outside.matched(event, one)

        frozen_parts = one.model.frozen_parts(one.context.frozen)
        return make_plan(self, matched, describe_moment(now), frozen_parts, one.context.replaced)

    def order(self, matched: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        """Return these algorithms in the order in which the passes let them act at an event."""
        return self._order(matched, event)

    def replace(self, **changes: Any) -> "Step":
        """Return the step with another program, other algorithms, passes, microbatches or members."""
        members = changes.pop("members", self.members)
        given = {"program": self.program, "algorithms": self.algorithms, "passes": self.passes}
        if changes.keys().isdisjoint(("microbatches", "microbatch_size")):  # either one replaces the other
            given |= {"microbatches": self.microbatches, "microbatch_size": self.microbatch_size}
        step = compose(**{**given, **changes})
        return Step(step.program, step.algorithms, step.passes, step.cut, members)

    def _check_ready(self, context: Context, batch: Any) -> None:
        self._outside.check_initialised(context.initialised)
        check_layout(context.layout, batch, self.algorithms, self.cut, self.ranks)
        if context.loss is not self._cache.loss:
            self._cache.loss, self._cache.constants = context.loss, constants_of(context.loss)
        self._cache.ready = context

    def __deepcopy__(self, memo: Any) -> "Step":
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the step's data; see `purecompose.factory` for the algorithms."""
        return Step, (self.program, self.algorithms, self.passes, self.cut, self.members)

    def __repr__(self) -> str:
        text = f"Step({', '.join(map(repr, self.algorithms)) or 'no algorithms'})"
        for scope in walk(self.program):
            text = scope.describe(text) if isinstance(scope, Scope) else text
        return self.members.describe(text)


@suggests_keywords
def compose(
    program: Iterable[Node | StateFn | str] | Iterable[Algorithm],
    algorithms: Iterable[Algorithm] = (),
    *,
    passes: Iterable[Pass] = DEFAULT_PASSES,
    microbatches: int | None = None,
    microbatch_size: int | None = None,
) -> Step:
    """Return a training step from a loop program and algorithms.

    Args:
        program: The loop, such as `loop_events`, or a plain list of events. A list of algorithms stands for
            `loop_events` and these algorithms.
        algorithms: The methods, in their order of application unless the passes change it.
        passes: Functions that order the algorithms at each event, applied from left to right.
        microbatches: Number of slices into which `Microbatches` cuts a batch; by default 1.
        microbatch_size: Largest number of examples in a slice, instead of the number of slices: each batch is cut into
            as few slices of (nearly) equal size as possible, a short batch into fewer.

    Returns:
        A function `(state, batch) -> state` with `init`, `fire` and `plan`.

    Raises:
        TypeError: An element of the program, the algorithms or the passes has the wrong type; or `program` has both
            algorithms and nodes, or is a list of algorithms where `algorithms` is one, too.
        ValueError: A name is used twice, an event is on the wrong side of `advance`, there are fewer than one
            microbatch, both a number of microbatches and their size are given, or the program has several
            AFTER_TRAIN_BATCH and a method that collects gradients.

    Warns:
        UserWarning: An algorithm acts at an event of a training step which the program lacks, or batches are to be cut
            and the program has no `Microbatches`. In the first step: the program trains nothing, or repeats its draws;
            or an algorithm computes gradients again that another one has edited at the same event.

    Example:
        >>> from purecompose import loop_events
        >>> compose(loop_events)
        Step(no algorithms)
    """
    given, methods = with_usual_loop(program, algorithms)
    nodes, chosen, ordering = as_program(given), as_algorithms(methods), as_passes(passes)
    check_collects_once(nodes, chosen)
    cut = Cut.checked(microbatches, microbatch_size, "compose")
    cut = _WHOLE if cut == (None, None) else cut
    check_constraints(chosen, ordering)
    check_no_hosts_in_grad(nodes, chosen)
    step = Step(nodes, chosen, ordering, cut)
    warn_of_idle_algorithms(chosen, step.events)
    warn_of_whole_batches(nodes, cut)
    return step


def _purpose_of(plain: Purpose, program: Program, lowered: Sequence[Lowered]) -> Purpose:
    """Return the purpose of a step of these operations, of which only the result of the clean-up is read."""
    nodes = [program[one.node] for one in lowered]
    last_scope = max((place for place, node in enumerate(nodes) if isinstance(node, Scope)), default=len(nodes))
    following = [one.algorithm for one in lowered[last_scope + 1 : last_scope + 2] if one.algorithm is not None]
    while nodes and nodes[-1] == advance:
        nodes.pop()
    num_updates = sum(isinstance(node, Update) for node in walk(program))
    return plain._replace(
        replaces_gradients=any(Trait.REPLACES_GRADIENTS in algorithm.traits for algorithm in following),
        frees_fields=num_updates == 1 and bool(nodes) and isinstance(nodes[-1], Update),
    )
