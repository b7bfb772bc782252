"""Resuming a run from a checkpoint: a given one, or the newest that is complete."""

import contextlib
import functools
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from purecompose._support.messages import warn
from purecompose.core.state import State
from purecompose.errors import CheckpointError, CheckpointWarning, DamagedError
from purecompose.run.saving import folder as disk
from purecompose.run.saving.checkpoint import outside_of, read, restored
from purecompose.run.saving.index import Index
from purecompose.run.saving.together import Writers, in_all, writers_of
from purecompose.time.event import Event


@dataclass(frozen=True)
class Resumed:
    """A checkpoint from which a run continues."""

    state: State
    index: Index
    path: Path
    outside: Mapping[str, Any]
    """What the run keeps outside the state; see `outside_of`."""


def resumed_from(path: Path, like: State, step: Any, ignore: Collection[str] = ()) -> Resumed:
    """Return the checkpoint in a folder, to resume a run; BEFORE_LOAD fires on the template, as in `load`.

    Args:
        path: The checkpoint.
        like: The template.
        step: The step that will train it.
        ignore: See `load`.
    """
    like = step.fire(Event.BEFORE_LOAD, like)

    def resumed() -> Resumed:
        state, index = read(path, like, step=step, ignore=ignore), disk.read_index(path)
        return Resumed(state, index, path, outside_of(path, index))

    return in_all(writers_of(like, step), resumed, f"{path} cannot be used")


def resumed_from_newest(folder: Path | str, like: State, step: Any, ignore: Collection[str] = ()) -> Resumed | None:
    """Return the newest complete checkpoint in a folder, to resume a run; `None` if there is none.

    Damaged ones are renamed to `*.damaged-*`, because the run will write these batches again. If several processes
    share the state, all must call, and continue from the same checkpoint: the newest that is complete for all. For the
    arguments see `resumed_from`.
    """
    writers = writers_of(like, step)
    found, damaged = _looked_for(Path(folder), writers)
    like = step.fire(Event.BEFORE_LOAD, like) if found else like

    def resumed_at(path: Path) -> Resumed | None:
        try:
            index = disk.read_index(path)
            return Resumed(restored(path, index, like, step, ignore=ignore), index, path, outside_of(path, index))
        except DamagedError as error:
            damaged[path] = str(error)
            return None

    for path in found:
        resumed = in_all(writers, functools.partial(resumed_at, path), f"{path} cannot be used")
        if writers is not None and not writers.is_good_for_all(resumed is not None):
            damaged.setdefault(path, f"{path} is damaged for another process")
            continue
        if resumed is None:
            continue
        if damaged and (writers is None or writers.is_first):
            warn(f"{_joined(damaged.values())}; put aside, and continuing from {path}", CheckpointWarning)
            for other in damaged:
                disk.put_aside(other)
        return resumed
    if damaged:
        raise DamagedError(f"no whole checkpoint is left in {folder}: {_joined(damaged.values())}")
    return None


def _looked_for(folder: Path, writers: Writers | None) -> tuple[list[Path], dict[Path, str]]:
    """Return the checkpoints in a folder, the newest first, and what is wrong with the others.

    Of several processes the first one looks, and tells the others.
    """

    def looked() -> tuple[list[str], dict[str, str], str | None]:
        if writers is not None and not writers.is_first:
            return [], {}, None
        with contextlib.suppress(OSError):  # a read-only folder is sufficient
            disk.clear(folder)
        found, damaged = disk.all_in(folder)
        newer = next((error for error in damaged.values() if not isinstance(error, DamagedError)), None)
        reasons = {str(path): str(error) for path, error in damaged.items()}
        return [str(one.path) for one in found], reasons, None if newer is None else str(newer)

    found = in_all(writers, looked, f"{folder} cannot be read")
    paths, reasons, newer = found if writers is None else json.loads(writers.word_of_first(json.dumps(found)))
    if newer is not None:
        raise CheckpointError(newer)  # not damaged, but this version cannot read it
    return [Path(path) for path in paths], {Path(path): reason for path, reason in reasons.items()}


def _joined(problems: Iterable[object]) -> str:
    return "; ".join(map(str, problems))
