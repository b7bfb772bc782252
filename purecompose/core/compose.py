"""compose: a loop program and algorithms in, a training step out.

The step is a fold. For each schedule (which algorithms act at which events) the program becomes one function
once, with the algorithms in the order that the passes give them; a step looks its schedule up and runs it.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from purecompose._support.checks import check_whole
from purecompose._support.device import arithmetic
from purecompose._support.warnings import warn
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.application import Observe, application, applied
from purecompose.core.clock import Clock
from purecompose.core.composable import (
    as_algorithms,
    as_passes,
    as_program,
    check_collects_once,
    check_layout,
    check_no_host,
    check_updates,
    events_in_grad,
)
from purecompose.core.context import Context, SealedTime, Static
from purecompose.core.contract import Contract, check_slots
from purecompose.core.folding import Body, Notes, Unit, build, in_turn
from purecompose.core.gradient import wants_outer_gradient
from purecompose.core.loop import Cut, Grad, Node, Op, Program, Update, advance, check_one_cut, events_in, walk
from purecompose.core.matching import Matcher
from purecompose.core.passes import DEFAULT_PASSES, Pass, compose_passes, order_by_constraints
from purecompose.core.plan import Plan, describe_moment, lacking_events, make_plan
from purecompose.core.ranks import Ranks
from purecompose.core.state import State, check_single
from purecompose.nn.keyed.modules import detect
from purecompose.nn.network import looking_for_draws
from purecompose.schedule import Hparam, Schedule, collect
from purecompose.time import Time, Timestamp, TimeUnit
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER


__all__ = ["Step", "compose"]


class Prepared(NamedTuple):
    """A step about to run."""

    bits: int
    """Its schedule: which algorithms act, as `Matcher.schedule` gives it."""
    num_examples: int
    """In the batch; in a member's own, for a population."""
    later: Timestamp
    """The time after the step."""
    start: Callable[[], State]
    """Makes the state that the fold starts from: with its batch and its clock, the timestamp sealed."""


class Step:
    """A training step: `step(state, batch) -> state`. Made by `compose`; immutable.

    Attributes:
        program: The loop program.
        algorithms: The algorithms, in the order given.
        passes: The passes that order them at each event.
        microbatches: Into how many slices a batch is cut; `None` where their size is given.
        microbatch_size: The most examples in a slice; `None` where their number is given.
        ranks: The processes among which batches are divided; `None` where there is one.
    """

    ranks: Ranks | None = None

    def __init__(
        self,
        program: Program,
        algorithms: tuple[Algorithm, ...],
        passes: tuple[Pass, ...],
        microbatches: int | None = 1,
        microbatch_size: int | None = None,
    ) -> None:
        self.program, self.algorithms, self.passes = program, algorithms, passes
        self.microbatches, self.microbatch_size = microbatches, microbatch_size
        self._cut = Cut(microbatches, microbatch_size)
        self.events = events_in(program)
        self.differentiated = tuple(events_in_grad(program))
        self.has_advance = any(node is advance for node in walk(program))
        kinds = {type(node) for node in walk(program)}
        # Without `advance` too, algorithms may be there to look at the gradients.
        is_for_training = self.has_advance or not algorithms
        self._lacks_update = is_for_training and Grad in kinds and Update not in kinds
        self.matcher = Matcher(algorithms, self.events)
        self._order = compose_passes(*passes)
        self._masks = [self.matcher.mask(events_in([node])) for node in program]
        self._wants_init = [a for a in algorithms if _needs_init(a)]
        # Memory of what has been computed before; nothing here changes a result.
        self._outer_matchers: dict[Event, Matcher] = {}
        self._units: dict[tuple[int, int], list[Unit]] = {}
        self._bodies: dict[int, Body] = {}
        self._checked: dict[tuple[int, int], Context] = {}
        self._ready: Context | None = None

    def __call__(self, state: State, batch: Any) -> State:
        """The state after one batch; `state` and `batch` stay bit for bit as they were.

        Raises:
            RuntimeError: `init` has not been called for algorithms that need it.
            MatchError: An algorithm's `match` wanted what is not known before the step.
            ContractError: An algorithm changed a structure, shape or dtype that must last.
        """
        end = self.finish(self.fold(state, batch))
        return end.unleased() if "_lease" in end.__dict__ else end

    def fold(
        self,
        state: State,
        batch: Any,
        observe: Observe | None = None,
        *,
        purpose: str = "",
        draw: int | None = None,
    ) -> State:
        """The fold over the program, without the clean-up at its end: outputs and batch are still there.

        Args:
            state: The state.
            batch: The batch.
            observe: Told of each application of an algorithm.
            purpose: What draws are for; two purposes draw apart.
            draw: Numbers the draws of this call; by default the batch's number in the run does.
        """
        if not isinstance(state, State):
            raise TypeError(f"step(state, batch): expected a State first, got {type(state).__name__}")
        prepared = self.prepare(state, batch, purpose=purpose, draw=draw)
        bits, start, context = prepared.bits, prepared.start(), state.context
        checked = self._checked.get((bits, prepared.num_examples))
        grad_mode = nullcontext() if wants_outer_gradient(state, batch) else torch.no_grad()
        with arithmetic(context.precision, state.device), grad_mode:
            if observe is None and (checked is context or checked == context):
                run = self._bodies.get(bits) or self._remember(bits)
                return run(start, Notes())
            end = self.run_checked(bits, start, observe)
        self._checked[bits, prepared.num_examples] = context
        return end

    def prepare(self, state: State, batch: Any, *, purpose: str = "", draw: int | None = None) -> Prepared:
        """Decides on the host what the step will do; see `fold` for the arguments.

        Raises:
            RuntimeError: `init` has not been called.
            ValueError: The state is a population's.
        """
        remedy = "population(step, n) steps all of them, unstack_states(state) gives each alone"
        check_single(state, "step(state, batch)", remedy)
        return self._prepared(state, batch, purpose, draw)

    def _prepared(self, state: State, batch: Any, purpose: str, draw: int | None) -> Prepared:
        context, now = state.context, state.timestamp
        if context is not self._ready:
            self._check_ready(context)
        num_examples, later = context.layout.num_examples(batch), now
        if self.has_advance:
            later = now.advance(num_examples, context.layout.num_tokens(batch))
        bits = self.matcher.schedule(state, batch, now, later)

        def start() -> State:
            return state.replace(
                static=Static(context, SealedTime(now, later)),
                clock=Clock.of(now, later, context.schedules, state.device, purpose=purpose, draw=draw),
                batch=batch,
                metrics={},
            )

        return Prepared(bits, num_examples, later, start)

    def num_examples(self, state: State, batch: Any) -> int:
        """How many examples a batch holds."""
        return state.context.layout.num_examples(batch)

    def units(self, bits: int, observe: Observe | None = None) -> tuple[Unit, ...]:
        """What a schedule comes to: the program's steps, with the algorithms that act in their order.

        Those of a node depend on its own part of the schedule alone, and where that is the same they are the same: a
        `state.gradient` of one schedule has the form of another's.
        """

        def at(event: Event) -> list[tuple[Algorithm, Op]]:
            acting = self.order(self.matcher.matched(bits, event, self.algorithms), event)
            if event in self.differentiated:
                check_no_host(event, acting)
            return [(algorithm, application(algorithm, event, observe)) for algorithm in acting]

        known = self._units if observe is None else {}
        units: list[Unit] = []
        for index, (node, mask) in enumerate(zip(self.program, self._masks, strict=True)):
            if (index, bits & mask) not in known:
                known[index, bits & mask] = build(node, index, at, self._cut, self.ranks)
            units += known[index, bits & mask]
        return tuple(units)

    def body(self, units: Sequence[Unit]) -> Body:
        """Some of a schedule's units as one function of the state."""
        return in_turn(units)

    def run_checked(self, bits: int, start: State, observe: Observe | None = None) -> State:
        """A watched run: looks for unkeyed draws, and for what a step must keep. The first run of each variant."""
        contract = Contract(start)

        def watch(algorithm: Algorithm, event: Event, before: State, after: State, code: int | None) -> None:
            contract.note(algorithm, event, before, after)
            if observe is not None:
                observe(algorithm, event, before, after, code)

        self._warn_of_standing_time(start)
        with looking_for_draws(), detect():
            end = self.body(self.units(bits, watch))(start, Notes(contract=contract))
        contract.check(end)
        if self._lacks_update and end.params is start.params:
            warn(
                "the step trains nothing: its program has a Grad and no update, and no parameter has changed. Put "
                "`update` after the gradient, as loop_events does"
            )
        return end

    def finish(self, state: State) -> State:
        """The state as it is between steps: the time unsealed and advanced, nothing paused, temporary fields gone."""
        return state.replace(
            static=Static(state.static.context.rested(), _opened(state, later=True)),
            batch=None,
            outputs=None,
            grads=None,
            clock=None,
            first_example=None,
            regrad=None,
        )

    @torch.inference_mode(False)  # as in State.create
    def init(self, state: State) -> State:
        """Fires `Event.INIT`: surgery and slots. An algorithm whose INIT is over is left out: twice is once.

        Raises:
            ValueError: Two algorithms want different defaults for one hparam.
        """
        settings = (state.optimizer, *(dict(algorithm.config) for algorithm in self.algorithms))
        state = state.with_hparams(collect(settings, Hparam))
        fresh = [a for a in self.algorithms if a.name not in state.context.initialised]
        matched = self._matched_now(Event.INIT, state, fresh)
        for algorithm in self.order(matched, Event.INIT):
            state, _ = applied(algorithm, Event.INIT, state)
        check_slots(state)
        context = state.context
        schedules = collect(settings, Schedule)
        changes = {
            "initialised": tuple(dict.fromkeys([*context.initialised, *[a.name for a in fresh]])),
            "required": (*context.required, *[a.name for a in matched if Trait.REQUIRED_ON_LOAD in a.traits]),
            "schedules": tuple(dict.fromkeys([*context.schedules, *schedules])),
        }
        return state.replace(**changes)

    def fire(self, event: Event | str, state: State) -> State:
        """Lets the algorithms act at an event outside the program, such as EPOCH_END or EVAL_START.

        Raises:
            ValueError: The event is part of the program (or INIT, for which there is `init`).
        """
        event = Event(event)
        if event in self.events or event is Event.INIT:
            raise ValueError(f"{event} fires inside the step{' (init)' if event is Event.INIT else ''}")
        matched = self.order(self._matched_now(event, state, self.algorithms), event)
        if not matched:
            return state
        now, context = state.timestamp, state.context
        clock = Clock.of(now, now, context.schedules, state.device, purpose=event.value)
        inner = state.replace(static=Static(context, SealedTime(now, now)), clock=clock)
        contract = Contract(inner)

        def watch(algorithm: Algorithm, event: Event, before: State, after: State, code: int | None) -> None:
            del code
            contract.note(algorithm, event, before, after)

        for algorithm in matched:
            inner = application(algorithm, event, watch)(inner)
        contract.check(inner)
        return inner.replace(static=Static(inner.context.rested(), now), clock=None)

    def plan(self, state: State, batch: Any = None) -> Plan:
        """Which algorithms act at which events for this state, in what order and why; prints as a table.

        Args:
            state: The state; its time decides.
            batch: A batch, where a `match` asks for shapes.
        """
        now = state.timestamp
        later = now.advance() if self.has_advance else now
        bits = self.matcher.schedule(state, batch, now, later)

        def matched(event: Event) -> Sequence[Algorithm]:
            if event in self.events:
                return self.matcher.matched(bits, event, self.algorithms)
            return self._matched_now(event, state, self.algorithms)

        return make_plan(self, matched, describe_moment(now))

    def order(self, matched: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        """The order in which the passes let these algorithms act at an event."""
        return self._order(matched, event)

    def replace(self, **changes: Any) -> "Step":
        """The step with another program, other algorithms, passes or microbatches."""
        given = {
            "program": self.program,
            "algorithms": self.algorithms,
            "passes": self.passes,
        }
        if changes.keys().isdisjoint(("microbatches", "microbatch_size")):  # either takes the other's place
            given |= {"microbatches": self.microbatches, "microbatch_size": self.microbatch_size}
        return compose(**{**given, **changes})

    def _matched_now(self, event: Event, state: State, among: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
        """Those that act at an event outside the program; only this event is asked about."""
        now = state.timestamp
        matcher = self._outer_matchers.get(event)
        if matcher is None:
            matcher = self._outer_matchers[event] = Matcher(self.algorithms, [event])
        return matcher.matched(matcher.schedule(state, None, now, now), event, tuple(among))

    def _remember(self, bits: int) -> Body:
        body = self._bodies[bits] = self.body(self.units(bits))
        return body

    def _warn_of_standing_time(self, start: State) -> None:
        """Epochs of unknown length are counted by whoever ends them; a plain loop that forgets it stands still."""
        run = _opened(start, later=False).run
        if run.batches_per_epoch is not None:
            return
        units = {time.unit for time in (*collect(start.context.schedules, Time), *self.matcher.times)}
        in_epochs = run.duration is not None and run.duration.unit in (TimeUnit.EPOCH, TimeUnit.ITERATION)
        if TimeUnit.EPOCH in units or (TimeUnit.DURATION in units and in_epochs):
            warnings.warn(
                "epochs have no known length: time moves only when an epoch ends, so schedules and predicates stand "
                "still within it. Give State.create batches_per_epoch=len(batches); or end epochs yourself, as fit "
                "does, with state.replace(timestamp=state.timestamp.advance_epoch())",
                stacklevel=5,
            )

    def _check_ready(self, context: Context) -> None:
        missing = [a.name for a in self._wants_init if a.name not in context.initialised]
        if missing:
            raise RuntimeError(f"{', '.join(missing)}: not initialised; call state = step.init(state) first")
        check_updates(self.program, context.trainable)
        check_layout(context.layout, self.algorithms)
        self._ready = context

    def __deepcopy__(self, memo: Any) -> "Step":
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what the step consists of; see `purecompose.factory` for the algorithms."""
        return Step, (self.program, self.algorithms, self.passes, self.microbatches, self.microbatch_size)

    def __repr__(self) -> str:
        return f"Step({', '.join(map(repr, self.algorithms)) or 'no algorithms'})"


def compose(
    program: Iterable[Node],
    algorithms: Iterable[Algorithm] = (),
    *,
    passes: Iterable[Pass] = DEFAULT_PASSES,
    microbatches: int | None = None,
    microbatch_size: int | None = None,
) -> Step:
    """A training step from a loop program and algorithms.

    Args:
        program: The loop, such as `loop_events`; a plain list of events is one too.
        algorithms: The methods; their order is their order of application, as far as the passes leave it so.
        passes: What orders them at each event, applied from left to right.
        microbatches: Into how many slices `Microbatches` cuts a batch; by default 1.
        microbatch_size: The most examples in a slice, in place of their number: each batch is cut into as few slices
            of (nearly) equal size as that takes, a short batch into fewer.

    Returns:
        A function `(state, batch) -> state` with `init`, `fire` and `plan`. On request,
        `purecompose.testing.warn_of_conflicts(step)` warns of algorithms whose order matters and nobody decides.

    Raises:
        TypeError: Something in the program, among the algorithms or the passes is not of its kind.
        ValueError: A name used twice, an event on the wrong side of `advance`, fewer than one microbatch, or both a
            number of microbatches and their size; several AFTER_TRAIN_BATCH for a method that collects gradients.

    Warns:
        UserWarning: An algorithm acts at an event of a training step which the program lacks. In the first step: the
            program has a `Grad` and no `update`, and no parameter has changed.

    Example:
        >>> from purecompose import loop_events
        >>> compose(loop_events)
        Step(no algorithms)
    """
    nodes, chosen, ordering = as_program(program), as_algorithms(algorithms), as_passes(passes)
    check_collects_once(nodes, chosen)
    check_one_cut(microbatches, microbatch_size, "compose", ("microbatches", "microbatch_size"))
    if microbatch_size is not None:
        check_whole(microbatch_size, "compose: microbatch_size", 1, hint="it is the most examples in a slice")
    else:
        microbatches = 1 if microbatches is None else check_whole(microbatches, "compose: microbatches", 1)
    if order_by_constraints in ordering:
        for event in Event:  # an impossible set is told now, not when its members first meet
            order_by_constraints([a for a in chosen if a.predicate.at(event) != NEVER], event)
    for event in events_in_grad(nodes):
        check_no_host(event, (a for a in chosen if a.predicate.at(event) != NEVER and a.predicate.is_timed))
    step = Step(nodes, chosen, ordering, microbatches, microbatch_size)
    if not any(event.is_eval or event.is_predict for event in step.events):
        for line in lacking_events(chosen, step.events):
            warn(f"{line}: it does nothing there. Put the event into the program; loop_events has all of them")
    return step


def _opened(state: State, *, later: bool) -> Timestamp:
    """The time before or after the step that a state is in."""
    sealed = state.static.timestamp
    assert isinstance(sealed, SealedTime)
    return sealed.opened(later=later)


def _needs_init(algorithm: Algorithm) -> bool:
    return algorithm.predicate.at(Event.INIT) != NEVER or bool(algorithm.hparams or algorithm.schedules)
