"""Matching: which algorithms act at which events of a step, decided on the host before it runs.

The answers for all events form the step's schedule, one integer with a bit for each question that time or the
batch's shapes decide. Predicates report which answers are fixed for consecutive batches, so that a step evaluates
only those that change from batch to batch.
"""

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from purecompose import tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.schedule import collect
from purecompose.time import RunLength, Time, Timestamp
from purecompose.time.event import Event
from purecompose.time.predicates import ALWAYS, NEVER, Predicate


__all__ = ["Matcher", "MatchError", "Question", "SealedTensor"]


class MatchError(RuntimeError):
    """A `match` failed, or read something that is not known before the step.

    Attributes:
        event: The event for which it was evaluated.
    """

    def __init__(self, message: str, event: Event) -> None:
        super().__init__(message)
        self.event = event


class SealedTensor:
    """A placeholder for a tensor during matching: shape, dtype and device can be read, values cannot."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self._path, self._tensor = path, tensor

    shape = property(lambda self: self._tensor.shape)
    dtype = property(lambda self: self._tensor.dtype)
    device = property(lambda self: self._tensor.device)
    ndim = property(lambda self: self._tensor.ndim)
    requires_grad = property(lambda self: self._tensor.requires_grad)

    def size(self, dim: int | None = None) -> Any:
        """See `Tensor.size`."""
        return self._tensor.size() if dim is None else self._tensor.size(dim)

    def dim(self) -> int:
        """See `Tensor.dim`."""
        return self._tensor.dim()

    def numel(self) -> int:
        """See `Tensor.numel`."""
        return self._tensor.numel()

    def stride(self) -> tuple[int, ...]:
        """See `Tensor.stride`."""
        return self._tensor.stride()

    def is_floating_point(self) -> bool:
        """See `Tensor.is_floating_point`."""
        return self._tensor.is_floating_point()

    def __len__(self) -> int:
        return len(self._tensor)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that numpy, copy and others look up before they read
            raise AttributeError(name)
        raise _ValueRead(self._path, name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise for torch functions of a sealed tensor, such as `torch.any(sealed)`."""
        del types
        found = (leaf for leaf in tree.leaves((args, kwargs or {})) if isinstance(leaf, cls))
        raise _ValueRead(f"torch.{func.__name__}({next(found)._path})", "the result")

    def _refuse(self, *_: Any) -> Any:
        raise _ValueRead(self._path, "the value")

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __getitem__ = __iter__ = __array__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # pyright: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = _refuse
    __rmatmul__ = __neg__ = __abs__ = __invert__ = __round__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __hash__ = None  # pyright: ignore


class _ValueRead(Exception):
    """Raised by `SealedTensor`, with the tensor's path and a description of what was read."""


class _View:
    """The part of a state that a `match` may see: time at the event, static facts, and shapes instead of tensors."""

    def __init__(self, state: State, batch: Any, timestamp: Timestamp) -> None:
        self._state, self._batch, self.timestamp = state, batch, timestamp

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state.replace(batch=self._batch), name)
        if inspect.ismethod(value):
            raise _ValueRead(f"state.{name}(...)", "the result")
        return value if name in _STATIC else _sealed(f"state.{name}", value)


_STATIC = frozenset({"static", "context", "model", "optimizer", "device"})


def _sealed(path: str, value: Any) -> Any:
    """Return the value with its tensors sealed, also those in dataclasses."""

    def seal(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return SealedTensor(path, leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        twin = copy.copy(leaf)  # a batch's dataclass may be frozen, and may check its fields when made
        for field in dataclasses.fields(leaf):
            object.__setattr__(twin, field.name, _sealed(f"{path}.{field.name}", getattr(leaf, field.name)))
        return twin

    leaves, treespec = tree.leaves_with_paths(value), tree.structure(value)
    return tree.unflatten(treespec, [seal(f"{path}{key}", leaf) for key, leaf in leaves.items()])


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
        self.times = collect([question.predicate for question in self.questions], Time)
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
        "run", "epoch", "epoch_start", "iteration", "start", "end", "later_epoch", "later_iteration", "later_start",
        "later_end", "bits", "timed", "custom",
    )  # fmt: skip

    def __init__(self, now: Timestamp, later: Timestamp) -> None:
        self.run: RunLength = now.run
        self.epoch, self.iteration, self.start = now.epoch, now.iteration, now.batch
        self.epoch_start = now.batch - now.batch_in_epoch  # differs where epochs of unknown length do
        self.later_epoch, self.later_iteration, self.later_start = later.epoch, later.iteration, later.batch
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
            and self.iteration == now.iteration
            and self.later_iteration == later.iteration
            and self.run is now.run
        )


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
        view = _View(state, batch, moment)
    try:
        return bool(question.predicate(question.event, view))
    except _ValueRead as read:
        path, what = read.args
        raise MatchError(
            f"{question.algorithm.name}: match at {question.event} read {what} of {path}. Matching is "
            "decided before the step, from time and shapes only. Either make the algorithm a host one "
            "(host=True), or match always and choose inside apply with torch.where",
            question.event,
        ) from None
    except Exception as error:
        raise _failure(error, question) from error


def _failure(error: Exception, question: Question) -> MatchError:
    return MatchError(
        f"{question.algorithm.name}: match failed at {question.event}: {type(error).__name__}: {error}. (Matching is "
        "decided before the step: state.timestamp and shapes are known; outputs, grads and clock are None, loss and "
        "metrics those of the last step. Code that needs values belongs in apply, or in a host algorithm, host=True.)",
        question.event,
    )
