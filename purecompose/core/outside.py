"""Events outside a step's program: INIT, and those that a run fires around its steps."""

from collections.abc import Container, Iterable

from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.application import application, applied
from purecompose.core.clock import Clock
from purecompose.core.context import SealedTime, Static
from purecompose.core.contract import Contract, check_slots
from purecompose.core.matching import Matcher
from purecompose.core.operation import Carry, Purpose, in_order
from purecompose.core.passes import Pass
from purecompose.core.state import State
from purecompose.schedule import Hparam, Schedule, collect
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, Custom


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


def _wants_init(algorithm: Algorithm) -> bool:
    return algorithm.predicate.at(Event.INIT) != NEVER or bool(algorithm.hparams or algorithm.schedules)
