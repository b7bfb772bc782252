"""`bisect`: the first batch of a run at which a predicate holds, and the unusual examples in it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from purecompose import batch as batches
from purecompose._support.checks import check_flag, is_callable_with, shown
from purecompose.analysis.replaying import RecordedRun, point, states_from
from purecompose.core.state import State
from purecompose.data import Arrays
from purecompose.run.saving.folder import Found


_OUTLIER = 100.0
"""An example is unusual if its largest value is more than this many times that of the median example."""


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`."""

    batch: int
    """The first batch after which the predicate holds."""
    predicate: str
    """The predicate, as text."""
    unusual: tuple[str, ...]
    """The examples of that batch with values that are not finite or unusually large, in words, such as "example 2
    (number 777 of the data): targets are not finite"; empty for a population."""
    before: State = field(repr=False)
    """The state before that batch."""
    data: Any = field(repr=False)
    """The batch: `traced(step)(found.before, found.data)` repeats its step."""

    def __str__(self) -> str:
        return "\n".join([f"{self.predicate} holds from batch {self.batch} on", *self.unusual])


def bisect(run: RecordedRun, predicate: Callable[[State], Any], *, stays: bool) -> Bisection:
    """Return the first batch of a run after which a predicate holds, with its unusual examples.

    Args:
        run: The run.
        predicate: Function of a state between steps, such as `predicates.loss_above(5.0)`.
        stays: True if the predicate, once true, remains true until the end of the run, as for NaNs in the weights. The
            checkpoints are then searched by halving: of c checkpoints at most ceil(log2(c)) + 1 are read, the last one
            among them, and the run is replayed from one of them up to the next. False to replay the run from its first
            checkpoint until the predicate is true.

    Returns:
        The batch, and the state before it.

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
    low, high = 0, len(found) - 1
    while stays and high - low > 1:
        middle = (low + high) // 2
        if _holds(predicate, run.load(found[middle]).state):
            high = middle
        else:
            low = middle
    for i in range(low, max(high, low + 1)):
        caught, batch = _scanned(run, predicate, found[i], found[min(i + 1, high)], stays=stays)
        if batch is not None:
            if stays and high < len(found) - 1:  # the search has not looked at the end of the run
                end = run.load(found[-1]).state
                if not _holds(predicate, end):
                    raise _passing(predicate, batch, end.timestamp.batch)
            assert caught.state is not None
            unusual = tuple(_unusual(run, caught.state, caught.batch))
            return Bisection(batch, _words(predicate), unusual, caught.state, caught.batch)
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


class _LastBatch:
    """An observer that keeps the newest batch, and the state before it."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.batch: Any = None

    def __call__(self, event: Any, state: State) -> None:
        del event, state

    def see_batch(self, state: State, batch: Any) -> None:
        """Keep a state and a batch. A state that the step will overwrite is copied."""
        self.state, self.batch = (state if state.lease is None else state.copy()), batch


def _scanned(
    run: RecordedRun, predicate: Callable[[State], Any], first: Found, last: Found, *, stays: bool
) -> tuple[_LastBatch, int | None]:
    """Replay from one checkpoint to the next until the predicate holds; if it `stays`, to the end, to check that.

    Returns:
        The batch after which it holds first, with the state before; and its number, `None` if there is none.
    """
    newest, caught = _LastBatch(), _LastBatch()
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
    return caught, batch


def _words(predicate: Any) -> str:
    return getattr(predicate, "__name__", None) or " ".join(repr(predicate).split())


def _unusual(run: RecordedRun, state: State, batch: Any) -> Iterator[str]:
    """Yield the examples of a batch with values that are not finite or unusually large, in words."""
    if state.key.ndim > 1:
        return
    notes: dict[int, list[str]] = {}
    num = run.plain_step.num_examples(state, batch)
    for name, member_field in (("inputs", state.context.input_field), ("targets", state.context.target_field)):
        rows = _rows(batch, member_field, state.context.batch_dim)
        if rows is not None and len(rows) == num:
            for i, note in _notes(name, rows):
                notes.setdefault(i, []).append(note)
    places = _places(run.data, state)
    for i, words in sorted(notes.items()):
        in_data = f" (number {places[i]} of the data)" if places else ""
        yield f"example {i}{in_data}: {'; '.join(words)}"


def _rows(batch: Any, member_field: Any, dim: int) -> Tensor | None:
    """Return a floating member of a batch with a row for each example, if it has one and the program reads it so."""
    try:
        found = batches.get(batch, member_field)
    except (KeyError, TypeError):
        return None
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.ndim <= dim or not found.numel():
        return None
    return found.detach().movedim(dim, 0).flatten(1) if found.ndim > 1 else found.detach()[:, None]


def _notes(name: str, rows: Tensor) -> Iterator[tuple[int, str]]:
    is_finite = rows.isfinite().all(1).tolist()
    sizes = rows.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)
    typical = float(sizes.median())
    for i, (finite, size) in enumerate(zip(is_finite, sizes.tolist(), strict=True)):
        if not finite:
            yield i, f"{name} are not finite"
        elif typical > 0 and size > _OUTLIER * typical:
            yield i, f"{name} reach {size:.3g}, {size / typical:,.0f} times the typical"


def _places(data: Any, state: State) -> list[int] | None:
    """Return the places in the data of the examples of the batch after a state, for data in memory."""
    if not isinstance(data, Arrays):
        return None
    now = state.timestamp
    start, end = (batch * data.batch_size for batch in (now.batch_in_epoch, now.batch_in_epoch + 1))
    return data.order(state.key, now.epoch)[start:end].tolist() if data.shuffle else list(range(start, end))
