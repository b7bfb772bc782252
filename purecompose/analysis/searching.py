"""`bisect`: the first batch of a run at which a predicate holds."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from purecompose._support.checks import check_flag, is_callable_with, shown
from purecompose.analysis.explaining import Explanation, LastBatch, explain_last
from purecompose.analysis.replaying import RecordedRun, point, states_from
from purecompose.core.state import State
from purecompose.run.saving.folder import Found


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`."""

    batch: int
    """The first batch after which the predicate holds."""
    predicate: str
    """The predicate, as text."""
    replays: int
    """Number of different checkpoints that were read, to evaluate the predicate or to replay the run from there."""
    num_batches: int
    """Number of batches that were trained on again."""
    explanation: Explanation | None
    """The report of that batch; `None` for a population, or if the predicate holds at the start of the run."""

    def __str__(self) -> str:
        head = (
            f"{self.predicate} holds from batch {self.batch} on, found with {self.replays} replays "
            f"({self.num_batches} batches)"
        )
        if self.explanation is None:
            return head
        worst = self.explanation.examples[:1]
        named = [f"{one.name}: {'; '.join(one.notes)}" for one in worst if one.notes]
        return "\n\n".join(["\n".join([head, *named]), str(self.explanation)])


def bisect(run: RecordedRun, predicate: Callable[[State], Any], *, stays: bool) -> Bisection:
    """Return the first batch of a run after which a predicate holds, with the report of that batch.

    Args:
        run: The run.
        predicate: Function of a state between steps, such as `predicates.loss_above(5.0)`.
        stays: True if the predicate, once true, remains true until the end of the run, as for NaNs in the weights. The
            checkpoints are then searched by halving: of c checkpoints at most ceil(log2(c)) + 1 are read, the last one
            among them, and the run is replayed from one of them up to the next. False to replay the run from its first
            checkpoint until the predicate is true.

    Returns:
        The batch with its report.

    Raises:
        ValueError: The predicate is never true; it is true at the first checkpoint already; or with `stays` it becomes
            false again.
        RuntimeError: The predicate raised an error, which is the cause.
        TypeError: An argument has the wrong type.
        MismatchError: See `replay`.

    Example::

        run = RecordedRun("runs/first", step, state, data)
        print(bisect(run, predicates.not_finite(), stays=True))
    """
    if not isinstance(run, RecordedRun):
        raise TypeError(f"bisect: expected a RecordedRun(path, step, state, data), got {shown(run)}")
    if not callable(predicate) or isinstance(predicate, type) or not is_callable_with(predicate, 1):
        raise TypeError(f"bisect: predicate: expected a function State -> bool, got {shown(predicate)}")
    check_flag(stays, "bisect: stays")
    found = run.checkpoints
    low, high, read = 0, len(found) - 1, set[int]()
    while stays and high - low > 1:
        middle = (low + high) // 2
        read.add(middle)
        if _holds(predicate, run.load(found[middle]).state):
            high = middle
        else:
            low = middle
    num_batches = 0
    for i in range(low, max(high, low + 1)):
        first, last = found[i], found[min(i + 1, high)]
        read.add(i)
        caught, batch, reached = _scanned(run, predicate, first, last, stays=stays)
        num_batches += reached - first.index.batch
        if batch is not None:
            if stays and high < len(found) - 1:  # the search has not looked at the end of the run
                read.add(len(found) - 1)
                end = run.load(found[-1]).state
                if not _holds(predicate, end):
                    raise _passing(predicate, batch, end.timestamp.batch)
            explanation = explain_last(run, caught) if run.start.key.ndim == 1 else None
            return Bisection(batch, _words(predicate), len(read), num_batches, explanation)
    text = f"bisect: {_words(predicate)} does not hold at batch {found[high].index.batch} of {run.path}"
    raise ValueError(
        f"{text}: it never does, or does not stay true; then use stays=False" if stays else f"{text}, nor before"
    )


def _holds(predicate: Callable[[State], Any], state: State) -> bool:
    try:
        return bool(predicate(state))
    except Exception as error:
        place = f"batch {state.timestamp.batch}"
        raise RuntimeError(
            f"bisect: the predicate {_words(predicate)} raised at {place}: {type(error).__name__}: {error}"
        ) from error


def _passing(predicate: Callable[[State], Any], batch: int, later: int) -> ValueError:
    return ValueError(
        f"bisect: {_words(predicate)} holds at batch {batch} and not at batch {later}: it does not stay true; use "
        "stays=False"
    )


def _scanned(
    run: RecordedRun, predicate: Callable[[State], Any], first: Found, last: Found, *, stays: bool
) -> tuple[LastBatch, int | None, int]:
    """Replay from one checkpoint to the next until the predicate holds; if it `stays`, to the end, to check that.

    Returns:
        The batch after which it holds first, with the state before; its number, `None` if there is none; and the batch
        that the replay has reached.
    """
    newest, caught = LastBatch(), LastBatch()
    batch, now = None, first.index.batch
    _, length = run.before(point(last.index.batch, "bisect"))
    with contextlib.closing(states_from(run, run.load(first), length, (newest,))) as states:
        for state in states:
            now, holds = state.timestamp.batch, _holds(predicate, state)
            if holds and now == first.index.batch:
                raise ValueError(
                    f"bisect: {_words(predicate)} holds in {first.path} already, and {run.path} has no earlier "
                    "checkpoint to search from"
                )
            if batch is not None and not holds:
                raise _passing(predicate, batch, now)
            if batch is None and holds:
                batch, caught.state, caught.batch = now, newest.state, newest.batch
            if now >= last.index.batch or (holds and not stays):
                break
    return caught, batch, now


def _words(predicate: Any) -> str:
    return getattr(predicate, "__name__", None) or " ".join(repr(predicate).split())
