"""Algorithms that act: one at one event of a step, and all at events outside of a program, such as INIT."""

import dataclasses
from collections.abc import Container, Iterable, Iterator
from typing import Any

from purecompose._support.internals import is_fake
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.clock import Clock
from purecompose.core.context import SealedTime, Static
from purecompose.core.contract import Contract, check_slots
from purecompose.core.matching import Matcher
from purecompose.core.operation import Carry, Operation, Purpose, in_order, lift
from purecompose.core.passes import Pass
from purecompose.core.state import State
from purecompose.errors import ContractError, FormError
from purecompose.schedule import Hparam, Schedule, collect
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, Custom


def application(algorithm: Algorithm, event: Event, pass_name: str, turn: int = 0) -> Operation:
    """Return one algorithm at one event as an operation.

    Args:
        algorithm: The algorithm.
        event: The event.
        pass_name: Name of the draws of forward passes at this event; the algorithm's own name is added.
        turn: How often the event occurs before in the program; the draws by name differ from those there.
    """

    def run(state: State, watch: Contract | None) -> State:
        before = state
        if algorithm.host:
            before = state.replace(static=Static(state.context, state.static.opened(later=event.sees_new_time)))
        if watch is None:
            after, exit_code = applied(algorithm, event, before)
        else:
            after, exit_code = watch.apply(algorithm, event, before, lambda: applied(algorithm, event, before))
        if algorithm.host:
            after = after.replace(static=Static(after.context, state.static.timestamp))
        elif after.static is not before.static:
            raise FormError(
                f"{algorithm.name} at {event} changed the static part (model, optimizer, time): "
                "only INIT and host algorithms may",
                event,
            )
        if watch is not None:
            watch.note(algorithm, event, state, after, exit_code)
        return after

    return lift(run, f"{pass_name} {algorithm.name}", turn=turn)


def applied(algorithm: Algorithm, event: Event, state: State) -> tuple[State, int | None]:
    """Call `apply` and return (state, exit code), checked; errors get a note with algorithm and event."""
    try:
        if algorithm.host and is_fake(state.key):
            raise RuntimeError(
                f"{algorithm.name}, a host algorithm, was traced with fake tensors: it acts in slices that another "
                "algorithm runs again by state.gradient, in a part of the step that is compiled. Let it act outside of "
                "Microbatches"
            )
        return _checked_result(algorithm.apply(event, state), algorithm, event)
    except Exception as error:
        error.__dict__["algorithm"] = algorithm
        for note in (f"in {algorithm.name} at {event}", *_hints(error, algorithm, state)):
            error.add_note(note)
        raise


def _hints(error: Exception, algorithm: Algorithm, state: State) -> Iterator[str]:
    """Yield what is to be done about an error that `apply` raised, where this is known."""
    absent = [f"state.{name}" for name in ("batch", "outputs", "grads") if getattr(state, name) is None]
    if absent and isinstance(error, AttributeError | TypeError) and "NoneType" in str(error):
        yield (
            f"there {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} None: a step has its batch from the "
            "start, outputs from AFTER_FORWARD on, and grads from AFTER_BACKWARD on"
        )
    if isinstance(error, KeyError) and error.args == (algorithm.name,) and algorithm.name not in state.slots:
        yield "it has no slot: match Event.INIT too, on(Event.INIT, ...), and make the slot there"
    if isinstance(error, dataclasses.FrozenInstanceError):
        yield "a state is immutable: return state.replace(...) with the new value"


def _checked_result(result: Any, algorithm: Algorithm, event: Event) -> tuple[State, int | None]:
    exit_code = None
    if isinstance(result, tuple) and len(result) == 2:
        result, exit_code = result
    if not isinstance(result, State):
        raise ContractError(
            f"{algorithm.name}: apply at {event} must return a State or (State, exit code), got "
            f"{type(result).__name__}{' (is a return statement missing?)' if result is None else ''}"
        )
    return result, exit_code


class Outside:
    """The algorithms of a step at events outside its program; its cache of matchers does not change a result."""

    def __init__(self, algorithms: tuple[Algorithm, ...], order: Pass) -> None:
        self._algorithms, self._order = algorithms, order
        self._wants_init = [algorithm for algorithm in algorithms if _wants_init(algorithm)]
        self._matchers: dict[Event, Matcher] = {}

    def matched(self, event: Event, state: State, among: Iterable[Algorithm] | None = None) -> tuple[Algorithm, ...]:
        """Return the algorithms that act at an event now, in their listed order.

        Args:
            event: The event.
            state: The state, whose time decides.
            among: The algorithms to choose from; by default all.
        """
        now = state.timestamp
        if event not in self._matchers:
            self._matchers[event] = Matcher(self._algorithms, [event])
        matcher = self._matchers[event]
        chosen = self._algorithms if among is None else tuple(among)
        return matcher.matched(matcher.schedule(state, None, now, now), event, chosen)

    def initialised(self, state: State) -> State:
        """Return the state after INIT at the algorithms that are not initialised yet; see `Step.init`."""
        state = with_updates(state, self._algorithms)  # first, since methods may read the run's length
        settings = (state.optimizer, *(dict(algorithm.config) for algorithm in self._algorithms))
        state = state.with_hparams(collect(settings, Hparam))
        fresh = [a for a in self._algorithms if a.name not in state.context.initialised]
        matched = self.matched(Event.INIT, state, fresh)
        before = state.buffers
        for algorithm in self._order(matched, Event.INIT):
            state, _ = applied(algorithm, Event.INIT, state)
        check_slots(state)
        context = state.context
        schedules = collect(settings, Schedule)
        changes = {
            "initialised": tuple(dict.fromkeys([*context.initialised, *[a.name for a in fresh]])),
            "required": (*context.required, *[a.name for a in matched if Trait.REQUIRED_ON_LOAD in a.traits]),
            "schedules": tuple(dict.fromkeys([*context.schedules, *schedules])),
            # Settings that methods have written, such as drop rates, are described as they are now.
            "settings": context.with_settings(state.buffers, before).settings,
        }
        return state.replace(**changes)

    def check_initialised(self, initialised: Container[str]) -> None:
        """Raise a `RuntimeError` if an algorithm needs INIT and is not among these."""
        missing = [algorithm for algorithm in self._wants_init if algorithm.name not in initialised]
        if missing:
            plain = [algorithm.name for algorithm in missing if isinstance(algorithm.predicate, Custom)]
            why = f" (match of {', '.join(plain)} is a plain function, so it may be true at INIT)" if plain else ""
            names = ", ".join(algorithm.name for algorithm in missing)
            raise RuntimeError(f"{names}: not initialised; call state = step.init(state) first{why}")

    def is_idle(self, event: Event, state: State) -> bool:
        """Return whether it is known from the time only that no algorithm acts at an event."""
        is_timed = all(algorithm.predicate.at(event).is_timed for algorithm in self._algorithms)
        return is_timed and not self.matched(event, state)

    def fired(self, event: Event, state: State) -> State:
        """Return the state after an event; see `Step.fire`."""
        matched = self._order(self.matched(event, state), event)
        if not matched:
            return state
        now, context = state.timestamp, state.context
        clock = Clock.of(now, now, context.schedules, state.device, domain=event.value)
        start = state.replace(static=Static(context, SealedTime(now, now)), clock=clock)
        contract = Contract(start)
        acting = in_order(application(algorithm, event, f".forward {event.name}") for algorithm in matched)
        end = acting(Carry(start), Purpose(watch=contract)).state
        contract.check(end)
        return end.replace(static=Static(end.context.rested(), now), clock=None)


def with_updates(state: State, algorithms: Iterable[Algorithm]) -> State:
    """Return the state with the number of batches per update that a step has with these algorithms."""
    run, num = state.timestamp.run, max((algorithm.batches_per_update for algorithm in algorithms), default=1)
    if run.batches_per_update == num:
        return state
    return state.replace(timestamp=state.timestamp.replace(run=dataclasses.replace(run, batches_per_update=num)))


def _wants_init(algorithm: Algorithm) -> bool:
    return algorithm.predicate.at(Event.INIT) != NEVER or bool(algorithm.hparams or algorithm.schedules)
