"""Staged matching: which algorithms act at which events of a step, decided before the step runs.

The answers for all events form the step's schedule, one integer with a bit for each question that time or the
batch's shapes decide. Predicates say for how long an answer holds, so most steps ask nothing at all.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from purecompose import tree
from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.predicate import ALWAYS, NEVER, Custom, Predicate
from purecompose.state import State
from purecompose.time import Timestamp


__all__ = ["Matcher", "MatchError", "Question", "SealedTensor"]


class MatchError(RuntimeError):
    """A `match` failed, or wanted what is not known before the step."""


class SealedTensor:
    """Stands for a tensor while matching: shape, dtype and device can be read, values cannot."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self._path, self._tensor = path, tensor

    shape = property(lambda self: self._tensor.shape)
    dtype = property(lambda self: self._tensor.dtype)
    device = property(lambda self: self._tensor.device)
    ndim = property(lambda self: self._tensor.ndim)
    requires_grad = property(lambda self: self._tensor.requires_grad)

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`."""
        return self._tensor.size() if dim is None else self._tensor.size(dim)

    def dim(self) -> int:
        """As `Tensor.dim`."""
        return self._tensor.dim()

    def numel(self) -> int:
        """As `Tensor.numel`."""
        return self._tensor.numel()

    def stride(self) -> tuple[int, ...]:
        """As `Tensor.stride`."""
        return self._tensor.stride()

    def is_floating_point(self) -> bool:
        """As `Tensor.is_floating_point`."""
        return self._tensor.is_floating_point()

    def __len__(self) -> int:
        return len(self._tensor)

    def __getattr__(self, name: str) -> Any:
        raise _ValueRead(self._path, name)

    def _refuse(self, *_: Any) -> Any:
        raise _ValueRead(self._path, "its value")

    __bool__ = __int__ = __float__ = __index__ = __getitem__ = __iter__ = __array__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # pyright: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __abs__ = __and__ = __or__ = __invert__ = _refuse
    __hash__ = None  # pyright: ignore


class _ValueRead(Exception):
    """Raised by `SealedTensor`: (path, what was asked)."""


class _View:
    """What a `match` may see: the time at the event, static facts, and shapes in place of tensors."""

    def __init__(self, state: State, batch: Any, timestamp: Timestamp) -> None:
        self._state, self._batch, self.timestamp = state, batch, timestamp

    def __getattr__(self, name: str) -> Any:
        value = self._batch if name == "batch" else getattr(self._state, name)
        paths = tree.leaves_with_paths(value)
        if not any(isinstance(leaf, Tensor) for leaf in paths.values()):
            return value
        _, treespec = tree.flatten(value)
        sealed = [
            SealedTensor(f"state.{name}{path}", leaf) if isinstance(leaf, Tensor) else leaf
            for path, leaf in paths.items()
        ]
        return tree.unflatten(treespec, sealed)


class Question(NamedTuple):
    """One answer that is not known when the step is composed."""

    event: Event
    algorithm: Algorithm
    predicate: Predicate
    is_custom: bool
    """Whether the answer may depend on more than time."""


class Matcher:
    """Answers for a fixed set of events and algorithms; remembers its last answers, which follow from its input."""

    def __init__(self, algorithms: Sequence[Algorithm], events: Iterable[Event]) -> None:
        self.always: set[tuple[Event, str]] = set()
        self.questions: list[Question] = []
        for event in dict.fromkeys(events):
            for algorithm in algorithms:
                left = algorithm.predicate.at(event)
                if left == ALWAYS:
                    self.always.add((event, algorithm.name))
                elif left != NEVER:
                    self.questions.append(Question(event, algorithm, left, _asks_more_than_time(left)))
        self._timed = [(i, q) for i, q in enumerate(self.questions) if not q.is_custom]
        self._custom = [(i, q) for i, q in enumerate(self.questions) if q.is_custom]
        self._memo = _Memo()

    def schedule(self, state: State, batch: Any, now: Timestamp, later: Timestamp) -> int:
        """The answers as bits, in the order of `questions`.

        Args:
            state: The state at the start of the step.
            batch: The incoming batch.
            now: The time at the start of the step.
            later: The time after it.

        Raises:
            MatchError: A `match` read a tensor's value or failed; the message names the algorithm.
        """
        memo = self._memo
        bits = memo.bits if memo.holds(now) else self._ask_about_time(now, later)
        if self._custom:
            for i, question in self._custom:
                bits |= self._answer(question, state, batch, now, later) << i
        return bits

    def matched(self, bits: int, event: Event, algorithms: Sequence[Algorithm]) -> tuple[Algorithm, ...]:
        """The algorithms that act at an event under a schedule, in their listed order."""
        chosen = {q.algorithm.name for i, q in enumerate(self.questions) if q.event is event and bits >> i & 1}
        return tuple(a for a in algorithms if a.name in chosen or (event, a.name) in self.always)

    def _ask_about_time(self, now: Timestamp, later: Timestamp) -> int:
        """Asks again those whose answer may have changed, and notes until when all hold."""
        memo = self._memo
        is_next = memo.run is now.run and memo.epoch == now.epoch and memo.batch <= now.batch
        answers = memo.answers if is_next else {}
        for i, question in self._timed:
            if i in answers and now.batch < answers[i][1]:
                continue
            moment = later if question.event.sees_new_time else now
            horizon = question.predicate.until(moment) - (moment.batch - now.batch)
            answers[i] = (self._answer_about_time(question, moment), horizon)
        memo.run, memo.epoch, memo.batch, memo.answers = now.run, now.epoch, now.batch, answers
        memo.until = min((horizon for _, horizon in answers.values()), default=math.inf)
        memo.bits = sum(answer << i for i, (answer, _) in answers.items())
        return memo.bits

    def _answer_about_time(self, question: Question, moment: Timestamp) -> bool:
        try:
            return bool(question.predicate(question.event, _Moment(moment)))
        except Exception as error:
            raise _named(error, question) from error

    def _answer(self, question: Question, state: State, batch: Any, now: Timestamp, later: Timestamp) -> bool:
        moment = later if question.event.sees_new_time else now
        if question.algorithm.host:
            view: Any = state.replace(batch=batch, timestamp=moment)
        else:
            view = _View(state, batch, moment)
        try:
            return bool(question.predicate(question.event, view))
        except _ValueRead as read:
            path, what = read.args
            raise MatchError(
                f"{question.algorithm.name}: match at {question.event} read {what} of {path}. Matching is decided "
                "before the step from time and shapes alone. Either make the algorithm a host one (host=True), or "
                "match always and choose inside apply with torch.where"
            ) from None
        except Exception as error:
            raise _named(error, question) from error


class _Moment(NamedTuple):
    """All that a predicate about time reads."""

    timestamp: Timestamp


class _Memo:
    """The last answers about time, and for which times they hold."""

    def __init__(self) -> None:
        self.run: Any = None
        self.epoch = -1
        self.batch = 0
        self.until = -math.inf
        self.bits = 0
        self.answers: dict[int, tuple[bool, float]] = {}

    def holds(self, now: Timestamp) -> bool:
        return self.batch <= now.batch < self.until and self.run is now.run and self.epoch == now.epoch


def _named(error: Exception, question: Question) -> MatchError:
    return MatchError(f"{question.algorithm.name}: match failed at {question.event}: {error}")


def _asks_more_than_time(predicate: Predicate) -> bool:
    if isinstance(predicate, Custom):
        return True
    return any(_asks_more_than_time(v) for v in vars(predicate).values() if isinstance(v, Predicate))
