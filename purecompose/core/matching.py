"""Matching: which algorithms act at which events of a step, decided on the host before it runs.

The answers for all events form the step's schedule, one integer with a bit for each question that time or the
batch's shapes decide. Predicates report which answers are fixed for consecutive batches, so that a step evaluates
only those that change from batch to batch.
"""

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.internals import DataDependentOutputException, FakeTensorMode
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.errors import MatchError
from purecompose.schedule import collect
from purecompose.time import RunLength, Time, Timestamp
from purecompose.time.event import Event
from purecompose.time.predicates import ALWAYS, NEVER, Predicate


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
        """Return the answers as bits, in the order of `questions`.

        Args:
            state: The state at the start of the step.
            batch: The incoming batch.
            now: The time at the start of the step.
            later: The time after it.

        Raises:
            MatchError: A `match` read a tensor's value or failed; the message names the algorithm.
        """
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
        f"{question.algorithm.name}: match failed at {question.event}: {what}. Matching is decided before the step, by "
        "time and shapes: state.timestamp and shapes are known; outputs, grads and clock are None; loss and metrics "
        "are those of the last step. Code that needs values belongs in apply, where torch.where chooses, or in a host "
        "algorithm (host=True)",
        question.event,
    )
