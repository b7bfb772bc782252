"""Algorithms at events: which of them act, decided on the host before a step runs, and how they are applied.

The answers for all events form the step's schedule, one integer with a bit for each question that time or the
batch's shapes decide. Predicates report which answers are fixed for consecutive batches, so that a step evaluates
only those that change from batch to batch.
"""

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.internals import DataDependentOutputException, FakeTensorMode, is_fake
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.clock import Clock
from purecompose.core.context import SealedTime, Static
from purecompose.core.contract import Contract, check_slots
from purecompose.core.operation import Carry, Operation, Purpose, in_order, lift
from purecompose.core.passes import Pass
from purecompose.core.state import State
from purecompose.errors import ContractError, FormError, MatchError
from purecompose.schedule import Hparam, Schedule, collect
from purecompose.time import RunLength, Time, Timestamp
from purecompose.time.event import Event
from purecompose.time.predicates import ALWAYS, NEVER, Custom, Predicate


class Question(NamedTuple):
    """An algorithm's predicate at an event, if its answer is not known when the step is composed."""

    event: Event
    algorithm: Algorithm
    predicate: Predicate


class Matcher:
    """Decides which algorithms act at a fixed set of events; its cache does not change its answers."""

    def __init__(self, algorithms: Sequence[Algorithm], events: Iterable[Event]) -> None:
        self.always: set[tuple[Event, str]] = set()
        self.questions: list[Question] = []
        for event in dict.fromkeys(events):
            for algorithm in algorithms:
                left = algorithm.predicate.at(event)
                if left == ALWAYS:
                    self.always.add((event, algorithm.name))
                elif left != NEVER:
                    self.questions.append(Question(event, algorithm, left))
        self.times: tuple[Time, ...] = collect([question.predicate for question in self.questions], Time)
        self._known: _Known | None = None

    def schedule(self, state: State, batch: Any, now: Timestamp, later: Timestamp) -> int:
        """Return the answers as bits, in the order of `questions`."""
        known = self._known
        if known is None or not known.covers(now, later):
            known = self._known = self._find_known(now, later)
        bits = known.bits
        if known.timed:
            bits |= _answers(known.timed, _Moment(now), _Moment(later))
        for bit, question in known.custom:
            if _answer(question, state, batch, later if question.event.sees_new_time else now):
                bits |= bit
        return bits

    def mask(self, events: Collection[Event]) -> int:
        """Return the bits of the schedule that decide what happens at these events."""
        return sum(1 << i for i, question in enumerate(self.questions) if question.event in events)

    def matched(self, bits: int, event: Event, algorithms: Sequence[Algorithm]) -> tuple[Algorithm, ...]:
        """Return the algorithms that act at an event under a schedule, in their listed order."""
        chosen = {q.algorithm.name for i, q in enumerate(self.questions) if q.event is event and bits >> i & 1}
        return tuple(a for a in algorithms if a.name in chosen or (event, a.name) in self.always)

    def _find_known(self, now: Timestamp, later: Timestamp) -> "_Known":
        known = _Known(now, later)
        for i, question in enumerate(self.questions):
            is_later = question.event.sees_new_time
            try:
                left, end = question.predicate.during(later if is_later else now)
            except Exception as error:
                raise _failure(error, question) from error
            if is_later:
                known.later_end = min(known.later_end, end)
            else:
                known.end = min(known.end, end)
            if left == ALWAYS:
                known.bits |= 1 << i
            elif left != NEVER:
                question = question._replace(predicate=left)
                if left.is_timed:
                    known.timed.append((1 << i, left, question.event, is_later, question))
                else:
                    known.custom.append((1 << i, question))
        return known


class _Known:
    """The answers that are fixed for some consecutive batches, and the open questions; see `Predicate.during`."""

    __slots__ = (
        "run", "epoch", "epoch_start", "start", "end", "later_epoch", "later_start", "later_end", "bits", "timed",
        "custom",
    )  # fmt: skip

    def __init__(self, now: Timestamp, later: Timestamp) -> None:
        self.run: RunLength = now.run
        self.epoch, self.start = now.epoch, now.batch
        self.epoch_start = now.batch - now.batch_in_epoch  # differs where epochs of unknown length do
        self.later_epoch, self.later_start = later.epoch, later.batch
        self.end: float = math.inf
        self.later_end: float = math.inf
        self.bits = 0
        self.timed: list[tuple[int, Predicate, Event, bool, Question]] = []
        self.custom: list[tuple[int, Question]] = []

    def covers(self, now: Timestamp, later: Timestamp) -> bool:
        return (
            self.start <= now.batch < self.end
            and self.later_start <= later.batch < self.later_end
            and self.epoch == now.epoch
            and self.epoch_start == now.batch - now.batch_in_epoch
            and self.later_epoch == later.epoch
            and self.run is now.run
        )


class _SealedState:
    """A state at the time of an event, whose tensors are fake ones: they have a form and a device, and no values."""

    def __init__(self, state: State, batch: Any, timestamp: Timestamp) -> None:
        self._state, self._batch = state, batch
        self.timestamp: Timestamp = timestamp

    @functools.cached_property
    def _mode(self) -> FakeTensorMode:
        return FakeTensorMode(allow_non_fake_inputs=True)  # 22 us, which a match that reads only the time does not pay

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state.replace(batch=self._batch), name)
        if inspect.ismethod(value):
            raise TypeError(f"the result of state.{name}(...) is not known yet")
        return value if name in _STATIC else self._sealed(value)

    def _sealed(self, value: Any) -> Any:
        """Return the value with fake tensors, also in dataclasses."""

        def seal(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                with self._mode:
                    return torch.empty_like(leaf)
            if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
                return leaf
            twin = copy.copy(leaf)  # a batch's dataclass may be frozen, and may check its fields when made
            for field in dataclasses.fields(leaf):
                object.__setattr__(twin, field.name, self._sealed(getattr(leaf, field.name)))
            return twin

        return tree.map(seal, value)


_STATIC = frozenset({"static", "context", "model", "optimizer", "device"})
"""The attributes of a state that hold no tensors."""


class _Moment:
    """The part of a state that a predicate about time reads."""

    __slots__ = ("timestamp",)

    def __init__(self, timestamp: Timestamp) -> None:
        self.timestamp = timestamp


def _answers(timed: list[tuple[int, Predicate, Event, bool, Question]], now: _Moment, later: _Moment) -> int:
    """Return the bits of open questions about time, in one loop because it runs in every step."""
    bits, question = 0, timed[0][-1]
    try:
        for bit, predicate, event, is_later, question in timed:  # noqa: B007
            if predicate(event, later if is_later else now):
                bits |= bit
    except Exception as error:
        raise _failure(error, question) from error
    return bits


def _answer(question: Question, state: State, batch: Any, moment: Timestamp) -> bool:
    if question.algorithm.host:
        view: Any = state.replace(batch=batch, timestamp=moment)
    else:
        view = _SealedState(state, batch, moment)
    try:
        return bool(question.predicate(question.event, view))
    except Exception as error:
        raise _failure(error, question) from error


_READS = ("FakeTensor", "fake tensor", "tensor subclasses", "Boolean value of Tensor", "Python scalars")
"""Words of other errors that torch raises where a value of a fake tensor would be read."""


def _failure(error: Exception, question: Question) -> MatchError:
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, DataDependentOutputException) or any(words in str(error) for words in _READS):
        what = "the value of a tensor was read"
    return MatchError(
        f"{question.algorithm.name}: match failed at {question.event}: {what}. Matching is decided before the step, "
        "by time and shapes: outputs, grads and clock are None; loss and metrics are those of the last step. Code "
        "that needs values belongs in apply, where torch.where chooses, or in a host algorithm (host=True)",
        question.event,
    )


def application(algorithm: Algorithm, event: Event, pass_name: str, turn: int = 0) -> Operation:
    """Return one algorithm at one event as an operation; its name is added to that of the pass. See `lift`."""

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
        """Return the algorithms that act at an event now, in their listed order."""
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
