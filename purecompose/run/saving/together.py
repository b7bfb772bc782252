"""Checkpoints that several processes write together, each the rows that it holds.

The processes meet in a hidden folder, whose name they agree on before, and send no messages while they write: so they
can write in threads, while training goes on. The first of them waits for the files of all, and completes the
checkpoint.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from purecompose import tree
from purecompose._support.shards import place_of
from purecompose.core.ranks import Ranks
from purecompose.core.state import State
from purecompose.run.saving import folder
from purecompose.run.saving.copies import new_name
from purecompose.run.saving.index import Index
from purecompose.run.saving.process import token
from purecompose.run.saving.remote import Mirror
from purecompose.run.saving.tensors import file_name


__all__ = ["Writers", "mirror_of", "write", "writers_of"]

PATIENCE = 600.0
"""Seconds for which the first process waits for the files of the others."""


@dataclass(frozen=True)
class Writers:
    """The processes that write a state together.

    Attributes:
        ranks: All processes.
        number: The number of this process among those that write, from 0; `None` if others hold the same rows.
        total: The number of processes that write.
        run: The words by which the first process names hidden files; equal in all processes.
        device: The device of messages.
    """

    ranks: Ranks
    number: int | None
    total: int
    run: str
    device: torch.device

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


def writers_of(state: State, step: Any = None) -> Writers | None:
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
        run = ranks.word_of_first(_own_word(), state.device)
        return Writers(ranks, 0 if ranks.rank == 0 else None, 1, run, state.device)
    mesh = places[0].mesh
    ranks = Ranks.of(mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD)
    *copies, own = mesh.get_coordinate()
    device = torch.device(mesh.device_type)
    run = ranks.word_of_first(_own_word(), device)
    return Writers(ranks, None if any(copies) else own, mesh.size(mesh.ndim - 1), run, device)


def _own_word() -> str:
    return f"{os.getpid()}-{token()}"


def mirror_of(url: str, writers: Writers | None) -> Mirror:
    """Return a local copy of a folder in remote storage, one for the processes of a host; the first process sends.

    Raises:
        ValueError: Processes on several hosts write each checkpoint together.
        ImportError, OSError: See `Mirror`.
    """
    if writers is None:
        return Mirror(url)
    name = writers.word_of_first(new_name())
    try:
        found = Mirror(url, name=name, is_writing=writers.is_first)
    except BaseException:
        writers.is_good_for_all(False)
        raise
    if not writers.is_good_for_all(True):
        found.close()
        raise OSError(f"{url}: another process cannot read it")
    if writers.is_joint and not writers.is_good_for_all(found.has_writer):
        found.close()
        raise ValueError(
            f"checkpoints: {url}: processes on several hosts write each checkpoint together, for which they need a "
            "folder that they share"
        )
    return found


def write(
    target: Path,
    make_index: Callable[[dict[str, Any]], Index],
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, tuple[int, int]],
    writers: Writers,
    number: int,
) -> None:
    """Write a checkpoint together with the other processes, which call this with the same arguments.

    The first process returns when the checkpoint is complete, the others when their own rows are written.

    Args:
        target: The checkpoint's folder.
        make_index: Function that returns the index, given the files' lengths and checksums, and the rows in them.
        tensors: Tensors by name that this process writes, on the CPU and contiguous.
        rows: Of divided tensors, the first row that this process has, and the row after the last.
        writers: The processes.
        number: The number of checkpoints that they have written before.

    Raises:
        OSError: This process, or another one, could not write.
    """
    assert writers.number is not None, "others write the same rows"
    new, name = folder.hidden(target, writers.run, number), file_name(writers.number, writers.total)

    def report() -> dict[str, Any]:
        return {**folder.write_tensors(new / name, tensors), "rows": dict(rows)}

    if writers.number == 0:
        with folder.replaced(target, new):
            files = {name: report()}
            for other in range(1, writers.total):
                files[file_name(other, writers.total)] = _handed_in(new, other)
            folder.write_index(new, make_index(files))
        return
    new.mkdir(parents=True, exist_ok=True)
    try:
        _hand_in(new, writers.number, report())
    except OSError as error:
        with contextlib.suppress(OSError):
            _hand_in(new, writers.number, {"error": str(error)})
        raise


def _hand_in(new: Path, number: int, report: dict[str, Any]) -> None:
    """Tell the first process what this one has written, or what went wrong."""
    with folder.written(_note(new, number)) as file:
        file.write_text(json.dumps(report), encoding="utf-8")


def _handed_in(new: Path, number: int) -> dict[str, Any]:
    """Wait until a process has written its rows, and return its report.

    Raises:
        OSError: It could not write, or has not reported for a long time.
    """
    note, deadline = _note(new, number), time.monotonic() + PATIENCE
    while not note.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"process {number} has not written its rows in {PATIENCE:g} s: it has ended, or all processes do not "
                "have the same file system"
            )
        time.sleep(0.02)
    report = json.loads(note.read_text(encoding="utf-8"))
    note.unlink()
    if "error" in report:
        raise OSError(f"process {number}: {report['error']}")
    return report


def _note(new: Path, number: int) -> Path:
    return new / f"{number}.json"
