"""`compare`: where two runs begin to differ, how the difference grows, and in what their settings differ."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.checks import check_number, shown
from purecompose._support.shards import whole
from purecompose._support.tables import table
from purecompose.analysis.replaying import RecordedRun, checkpoints_in, point, states_from
from purecompose.data.loaders import differences as data_differences
from purecompose.records import read_run
from purecompose.records.layout import CONFIG, flat
from purecompose.run.saving.comparison import differences
from purecompose.run.saving.files import SavedTensors
from purecompose.run.saving.folder import Found
from purecompose.run.saving.leaves import is_extra, leaves_of


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
        parts = [f"a: {self.names[0]}\nb: {self.names[1]}"]
        parts.append(
            "\n".join(["settings that differ", *(f"  {line}" for line in self.settings)])
            if self.settings
            else "no settings differ"
        )
        parts.append(self._first())
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
        lines = [
            f"the first difference is {where}: {self.leaves[0]}" if self.leaves else f"the first difference is {where}"
        ]
        lines += [f"  {line}" for line in self.leaves[1:8]]
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
    pairs = _common(*(checkpoints_in(path) for path in paths))
    if not pairs:
        raise ValueError(f"compare: {paths[0]} and {paths[1]} have no checkpoints of the same batch")
    by_checkpoint = tuple(_difference(one, other, tolerance) for one, other in pairs)
    first = next((i for i, one in enumerate(by_checkpoint) if one.num_leaves), None)
    batch, leaves, since = None, (), by_checkpoint[-1].batch
    if first is not None:
        since = by_checkpoint[first - 1].batch if first else -1
        batch, leaves = (
            by_checkpoint[first].batch,
            tuple(_differing(_tensors(pairs[first][0]), _tensors(pairs[first][1]), tolerance)),
        )
        if first and isinstance(run_a, RecordedRun) and isinstance(run_b, RecordedRun):
            exact = _side_by_side(run_a, run_b, pairs[first - 1], batch, tolerance)
            if exact is not None:
                (batch, leaves), since = exact, exact[0] - 1
    settings = tuple(dict.fromkeys(_settings(*paths, *(checkpoints_in(path)[-1] for path in paths))))
    return Comparison((str(paths[0]), str(paths[1])), batch, leaves, since, by_checkpoint, settings)


def _path(run: Any) -> Path:
    if isinstance(run, RecordedRun):
        return Path(run.path)
    if not isinstance(run, (str, Path)):
        raise TypeError(f"compare: expected a RecordedRun or the folder of a run, got {shown(run)}")
    return Path(run)


def _common(ours: tuple[Found, ...], theirs: tuple[Found, ...]) -> list[tuple[Found, Found]]:
    by_batch = {one.index.batch: one for one in theirs}
    return [(one, by_batch[one.index.batch]) for one in ours if one.index.batch in by_batch]


def _tensors(found: Found) -> Mapping[str, Tensor]:
    tensors = SavedTensors(found.path, found.index)
    return {name: tensors[name] for name in found.index.tensors if not is_extra(name)}


def _difference(one: Found, other: Found, tolerance: float) -> CheckpointDifference:
    ours, theirs = _tensors(one), _tensors(other)
    num = sum(1 for _ in _differing(ours, theirs, tolerance))
    return CheckpointDifference(one.index.batch, num, _distance(ours, theirs))


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
