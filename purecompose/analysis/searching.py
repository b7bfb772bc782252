"""`bisect`: the first batch of a run at which a predicate holds, and the unusual examples in it.

`compare`: where two runs begin to differ, how the difference grows, and in what their settings differ.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.device import whole
from purecompose._support.messages import table
from purecompose._support.specs import check_flag, check_number, is_callable_with, shown
from purecompose.analysis.replaying import RecordedRun, checkpoints_in, point, states_from
from purecompose.core.state import State
from purecompose.data import Arrays
from purecompose.data.loaders import differences as data_differences
from purecompose.records import read_run
from purecompose.records.layout import CONFIG, flat
from purecompose.run.saving.comparison import differences
from purecompose.run.saving.files import SavedTensors
from purecompose.run.saving.folder import Found
from purecompose.run.saving.leaves import is_extra, leaves_of


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
            checkpoints are then searched by halving: of c checkpoints at most ceil(log2(c)) + 1 are read, and the run
            is replayed from one of them up to the next. False to replay the run from its first checkpoint on.

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
    if isinstance(predicate, type) or not is_callable_with(predicate, 1):
        raise TypeError(f"bisect: predicate: expected a function State -> bool, got {shown(predicate)}")
    check_flag(stays, "bisect: stays")
    found = run.checkpoints
    low, high = 0, len(found) - 1
    while stays and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds(predicate, run.load(found[middle]).state) else (middle, high)
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
    reason = ": it never does, or does not stay true; then use stays=False" if stays else ", nor before"
    where = f"batch {found[high].index.batch} of {run.path}"
    raise ValueError(f"bisect: {_words(predicate)} does not hold at {where}{reason}")


def _holds(predicate: Callable[[State], Any], state: State) -> bool:
    try:
        return bool(predicate(state))
    except Exception as error:
        raised = f"raised at batch {state.timestamp.batch}: {type(error).__name__}: {error}"
        raise RuntimeError(f"bisect: the predicate {_words(predicate)} {raised}") from error


def _passing(predicate: Callable[[State], Any], batch: int, later: int) -> ValueError:
    return ValueError(
        f"bisect: {_words(predicate)} holds at batch {batch} and not at batch {later}: it does not stay true; use "
        "stays=False"
    )


class _LastBatch:
    """An observer that keeps the newest batch, and the state before it."""

    state: State | None = None
    batch: Any = None

    def __call__(self, event: Any, state: State) -> None:
        del event, state

    def see_batch(self, state: State, batch: Any) -> None:
        """Keep a state and a batch. A state that the step will overwrite is copied."""
        self.state, self.batch = (state if state.lease is None else state.copy()), batch


def _scanned(
    run: RecordedRun, predicate: Callable[[State], Any], first: Found, last: Found, *, stays: bool
) -> tuple[_LastBatch, int | None]:
    """Replay from one checkpoint to the next until the predicate holds; if it `stays`, to the end, to check that.

    Return the batch after which it holds first, with the state before, and its number; `None` if there is none.
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


class CheckpointDifference(NamedTuple):
    """The difference of two runs at a batch at which both have a checkpoint."""

    batch: int
    """Number of the batch."""
    num_leaves: int
    """Number of leaves that differ by more than the tolerance."""
    distance: float
    """The norm of the difference of all parameters, divided by the norm of run a's; infinite if only one is finite."""


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    names: tuple[str, str]
    """The folders of runs a and b."""
    batch: int | None
    """The first batch after which the runs differ; for two folders, the first common checkpoint at which they differ.
    `None` if they agree up to the last common checkpoint."""
    leaves: tuple[str, ...]
    """The leaves that differ there, in the order of the state, each with a description."""
    since: int
    """The last batch at which they are known to agree; -1 if none."""
    by_checkpoint: tuple[CheckpointDifference, ...]
    """The difference at each common checkpoint."""
    settings: tuple[str, ...]
    """Lines about settings, versions, methods, data and code that differ."""

    def __str__(self) -> str:
        lines = ["settings that differ", *(f"  {line}" for line in self.settings)]
        settings = "\n".join(lines) if self.settings else "no settings differ"
        parts = [f"a: {self.names[0]}\nb: {self.names[1]}", settings, self._first()]
        if self.by_checkpoint:
            rows = [[str(one.batch), str(one.num_leaves), f"{one.distance:.3g}"] for one in self.by_checkpoint]
            parts.append(table(["batch", "leaves that differ", "distance of the parameters"], rows))
        return "\n\n".join(parts)

    def _first(self) -> str:
        if self.batch is None:
            return f"no difference up to batch {self.since}, the last checkpoint of both"
        after = "" if self.since < 0 else f"after batch {self.since}, "
        exact = self.batch == self.since + 1
        where = f"at batch {self.batch}" if exact else f"{after}at the latest at batch {self.batch}"
        first = f": {self.leaves[0]}" if self.leaves else ""
        lines = [f"the first difference is {where}{first}", *(f"  {line}" for line in self.leaves[1:8])]
        if len(self.leaves) > 8:
            lines.append(f"  and in {len(self.leaves) - 8} other leaves")
        return "\n".join(lines)


def compare(run_a: RecordedRun | Path | str, run_b: RecordedRun | Path | str, *, tolerance: float = 0.0) -> Comparison:
    """Return where two runs differ: the first batch and leaf, how the difference grows, and the settings.

    Their checkpoints of the same batches are compared; NaNs in the same place count as equal. If both runs are given as
    `RecordedRun`, they are then replayed side by side from the last checkpoint at which they agree, to find the exact
    batch. For folders, only the two checkpoints between which it lies are known.

    Args:
        run_a: A run, or the folder of one.
        run_b: The other.
        tolerance: Floating-point leaves may differ by this fraction of their largest magnitude; 0 compares bits.

    Raises:
        TypeError: A run is neither a `RecordedRun` nor a path.
        FileNotFoundError: A folder has no checkpoint.
        ValueError: The runs have no checkpoints of the same batch.
        MismatchError: See `replay`.

    Example::

        print(compare("runs/first", "runs/second"))
    """
    check_number(tolerance, "compare: tolerance", 0)
    paths = _path(run_a), _path(run_b)
    by_batch = {one.index.batch: one for one in checkpoints_in(paths[1])}
    pairs = [(one, by_batch[one.index.batch]) for one in checkpoints_in(paths[0]) if one.index.batch in by_batch]
    if not pairs:
        raise ValueError(f"compare: {paths[0]} and {paths[1]} have no checkpoints of the same batch")
    by_checkpoint = []
    for one, other in pairs:
        ours, theirs = _tensors(one), _tensors(other)
        num = sum(1 for _ in _differing(ours, theirs, tolerance))
        by_checkpoint.append(CheckpointDifference(one.index.batch, num, _distance(ours, theirs)))
    first = next((i for i, one in enumerate(by_checkpoint) if one.num_leaves), None)
    batch, leaves, since = None, (), by_checkpoint[-1].batch
    if first is not None:
        since = by_checkpoint[first - 1].batch if first else -1
        ours, theirs = map(_tensors, pairs[first])
        batch, leaves = by_checkpoint[first].batch, tuple(_differing(ours, theirs, tolerance))
        if first and isinstance(run_a, RecordedRun) and isinstance(run_b, RecordedRun):
            exact = _side_by_side(run_a, run_b, pairs[first - 1], batch, tolerance)
            if exact is not None:
                (batch, leaves), since = exact, exact[0] - 1
    settings = tuple(dict.fromkeys(_settings(*paths, *(checkpoints_in(path)[-1] for path in paths))))
    return Comparison((str(paths[0]), str(paths[1])), batch, leaves, since, tuple(by_checkpoint), settings)


def _path(run: Any) -> Path:
    if not isinstance(run, RecordedRun | str | Path):
        raise TypeError(f"compare: expected a RecordedRun or the folder of a run, got {shown(run)}")
    return Path(run.path if isinstance(run, RecordedRun) else run)


def _tensors(found: Found) -> Mapping[str, Tensor]:
    tensors = SavedTensors(found.path, found.index)
    return {name: tensors[name] for name in found.index.tensors if not is_extra(name)}


def _distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of the parameters, relative to ours; NaNs in the same place count as equal."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name in (name for name in ours if name.startswith("params")):
        first, second = (whole(side[name]).cpu().double() if name in side else None for side in (ours, theirs))
        if first is None or second is None or first.shape != second.shape:
            return math.inf
        is_same = (first == second) | (first.isnan() & second.isnan())
        difference, finite = torch.where(is_same, 0, first - second), first.nan_to_num(0.0, 0.0, 0.0)
        squares += torch.stack([difference.square().sum(), finite.square().sum()])
    share = float((squares[0] / squares[1]).sqrt()) if squares[0] else 0.0
    return math.inf if math.isnan(share) else share


def _differing(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> Iterator[str]:
    """Yield a description of each tensor that differs by more than the tolerance, in the order of the first mapping."""
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours or name not in theirs:
            yield f"{name}: only in {'a' if name in ours else 'b'}"
            continue
        for found in tree.differences(ours[name], theirs[name], tolerance=tolerance):
            yield f"{name}{found}"


def _side_by_side(
    a: RecordedRun, b: RecordedRun, start: tuple[Found, Found], until: int, tolerance: float
) -> tuple[int, tuple[str, ...]] | None:
    """Replay two runs from checkpoints at which they agree; return the first batch after which they differ."""
    at = point(until, "compare")
    ours, theirs = (states_from(run, run.load(one), run.before(at)[1]) for run, one in zip((a, b), start, strict=True))
    with contextlib.closing(ours), contextlib.closing(theirs):
        for first, second in zip(ours, theirs, strict=False):
            if leaves := tuple(_differing(leaves_of(first).tensors, leaves_of(second).tensors, tolerance)):
                return first.timestamp.batch, leaves
            if first.timestamp.batch >= until:
                break
    return None


def _settings(path_a: Path, path_b: Path, a: Found, b: Found) -> Iterator[str]:
    """Yield lines about what differs besides the states."""
    if (path_a / CONFIG).is_file() and (path_b / CONFIG).is_file():
        yield from _of_mappings(flat(read_run(path_a).config), flat(read_run(path_b).config))
    lines = differences(a.index.description, b.index.description)
    lines += data_differences(*(one.index.memory.get("data", {}) for one in (a, b)))
    for line in lines:  # they are written for a checkpoint and a state that it is loaded into
        yield re.sub(r"\bhere\b", "in b", re.sub(r"\bin the checkpoint\b", "in a", line))
    yield from _of_mappings(a.index.environment, b.index.environment)
    lengths = ("duration", "batches_per_epoch")
    yield from _of_mappings(*({name: one.index.time[name] for name in lengths} for one in (a, b)))


def _of_mappings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*a, *b)):
        if repr(a.get(name)) != repr(b.get(name)):
            yield f"{name}: {a.get(name, 'nothing')} in a, {b.get(name, 'nothing')} in b"
