"""Checkpoints that several processes write together, each the rows that it holds.

The processes meet in a hidden folder, whose name they agree on before, and report to the first of them in the process
group's store: so they can write in threads, while training goes on, and a process whose disk is full can say so. The
first one waits for the reports of all, and completes the checkpoint.
"""

import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from purecompose import tree
from purecompose._support.shards import place_of
from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.core.state import State
from purecompose.run.saving import folder
from purecompose.run.saving.files import Index, file_name


T = TypeVar("T")

PATIENCE, _AFTER_ERROR = 600.0, 10.0
"""Seconds for which the first process waits for the reports of the others: in a run, and in one that has failed."""
_TO_APPEAR = 60.0
"""Seconds for which it waits for a file that another one reports, as file systems of several hosts may be slow."""


@dataclass(frozen=True)
class Writers:
    """The processes that write a state together.

    Attributes:
        ranks: All processes.
        number: The number of this process among those that write, from 0; `None` if others hold the same rows.
        total: The number of processes that write.
        run: A word that the first process has drawn, in the names of hidden files and of reports.
        device: The device of messages.
        store: The store of the process group, for reports.
        has_failed: Set when an error ends the run, perhaps because another process has ended.
    """

    ranks: Ranks
    number: int | None
    total: int
    run: str
    device: torch.device
    store: Any
    has_failed: threading.Event = field(default_factory=threading.Event)

    @property
    def is_joint(self) -> bool:
        """True if each writes a part of a checkpoint, and False if one writes all of it."""
        return self.total > 1

    @property
    def is_first(self) -> bool:
        """True for the process that completes a checkpoint."""
        return self.ranks.rank == 0

    def is_good_for_all(self, is_good: bool) -> bool:
        """Return whether something is true in all processes; all must ask."""
        own = torch.tensor(int(is_good), device=self.device)
        return bool(self.ranks.exchange([own], "min")[0])

    def word_of_first(self, word: str) -> str:
        """Return the text that the first process gives; all must ask."""
        return self.ranks.word_of_first(word, self.device)


def writers_of(state: State, step: Step | None = None) -> Writers | None:
    """Return the processes that share a state, all of which must call this; `None` if there is only this one.

    Args:
        state: The state. If each process holds some rows of it, each writes these.
        step: A step whose processes share the state. If each holds all of it, the first one writes.
    """
    places = [place for leaf in tree.leaves(state) if (place := place_of(leaf)) is not None]
    if not places:
        ranks: Ranks | None = getattr(step, "ranks", None)
        if ranks is None:
            return None
        number, total, device = 0 if ranks.rank == 0 else None, 1, state.device
    else:
        mesh = places[0].mesh
        ranks = Ranks.of(mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD)
        *copies, own = mesh.get_coordinate()
        number, total = None if any(copies) else own, mesh.size(mesh.ndim - 1)
        device = torch.device(mesh.device_type)
    run = ranks.word_of_first(secrets.token_hex(8), device)
    return Writers(ranks, number, total, run, device, dist.distributed_c10d._get_default_store())


def in_all(writers: Writers | None, act: Callable[[], T], problem: str) -> T:
    """Call a function in all processes and return its result; raise in all of them if it fails in any.

    Args:
        writers: The processes; `None` if there is only this one.
        act: The function, without messages between the processes.
        problem: What to say if it raises in another process.

    Raises:
        OSError: It raised in another process.
    """
    if writers is None:
        return act()
    try:
        found = act()
    except BaseException:
        writers.is_good_for_all(False)
        raise
    if not writers.is_good_for_all(True):
        raise OSError(f"{problem}: another process has failed")
    return found


def write(
    target: Path,
    make_index: Callable[[dict[str, Any]], Index],
    tensors: Callable[[], Mapping[str, Tensor]],
    rows: Mapping[str, tuple[int, int]],
    writers: Writers,
    number: int,
) -> None:
    """Write a checkpoint together with the other processes, which call this with the same arguments.

    The first process returns when the checkpoint is complete, the others when their own rows are written.

    Args:
        target: The checkpoint's folder.
        make_index: Function that returns the index, given the files' lengths and checksums, and the rows in them.
        tensors: Function that returns the tensors by name that this process writes, on the CPU and contiguous.
        rows: Of divided tensors, the first row that this process has, and the row after the last.
        writers: The processes.
        number: The number of checkpoints that they have written before.

    Raises:
        OSError: This process, or another one, could not write.
    """
    assert writers.number is not None, "others write the same rows"
    new, name = _hidden(target, writers, number), file_name(writers.number, writers.total)

    def report() -> dict[str, Any]:
        return {**folder.write_tensors(new / name, tensors()), "rows": dict(rows)}

    if writers.number == 0:
        with folder.replaced(target, new):
            files = {name: report()}
            for other in range(1, writers.total):
                file = new / file_name(other, writers.total)
                files[file.name] = _handed_in(writers, number, other, file)
            folder.write_index(new, make_index(files))
        return
    try:
        new.mkdir(parents=True, exist_ok=True)
        found = report()
    except Exception as error:
        _hand_in(writers, number, {"error": cause_of(error)})
        raise
    _hand_in(writers, number, found)


def discard(target: Path, writers: Writers, number: int) -> None:
    """Remove what the processes have written of a checkpoint that failed, when none of them writes any more."""
    shutil.rmtree(_hidden(target, writers, number), ignore_errors=True)
    for other in range(1, writers.total):
        writers.store.delete_key(_place(writers, number, other))


def _hidden(target: Path, writers: Writers, number: int) -> Path:
    return folder.hidden(target, f"{writers.run}-{number:08x}")


def _hand_in(writers: Writers, number: int, report: dict[str, Any]) -> None:
    """Tell the first process what this one has written, or what went wrong."""
    assert writers.number is not None
    writers.store.set(_place(writers, number, writers.number), json.dumps(report))


def _handed_in(writers: Writers, number: int, other: int, file: Path) -> dict[str, Any]:
    """Wait until another process has written its rows to a file, and return its report.

    Raises:
        OSError: It could not write, or has not reported for a long time.
    """
    place, began = _place(writers, number, other), time.monotonic()
    while not writers.store.check([place]):
        patience = _AFTER_ERROR if writers.has_failed.is_set() else PATIENCE
        if time.monotonic() - began > patience:
            raise TimeoutError(f"process {other} has not written its rows in {patience:g} s: has it ended?")
        time.sleep(0.02)
    report = json.loads(writers.store.get(place))
    writers.store.delete_key(place)
    if "error" in report:
        raise OSError(f"process {other}: {report['error']}")
    began = time.monotonic()
    while not file.exists():
        if time.monotonic() - began > _TO_APPEAR:
            raise OSError(f"process {other} has written its rows elsewhere: all need a file system that they share")
        time.sleep(0.02)
    return report


def _place(writers: Writers, number: int, other: int) -> str:
    return f"purecompose/written/{writers.run}/{number}/{other}"


def cause_of(error: Exception) -> str:
    """Return an error as text, without the name of the file, so that it is the same for each checkpoint."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
