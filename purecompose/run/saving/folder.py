"""Checkpoints on disk: one folder each, written completely or not at all, and verified when read.

Everything is written into a hidden folder next to the target, synced to disk, and renamed. If the process dies midway,
readers ignore the hidden folder and the next writer removes it. Processes that hold parts of a state each write a file
with their rows, and a report of it, into one hidden folder, which the first one completes when all are there.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from purecompose import tree
from purecompose._support.device import place_of
from purecompose._support.files import read_whole, sync
from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.core.state import State
from purecompose.errors import CheckpointError, DamagedError
from purecompose.run.saving.files import Index, digest, file_name, from_json, is_file_name, save_tensors, to_json
from purecompose.time import Timestamp


T = TypeVar("T")

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run's folder."""

INDEX = "index.json"
"""Name of the file that describes a checkpoint."""
_MOST_INDEX = 2**26
"""Maximal size of an index that is read, in bytes; a tensor takes about 100."""
_WRITING, _OLD = ".writing", ".old"


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder of checkpoints."""

    path: Path
    index: Index


def write(target: Path, make_index: Callable[[dict[str, Any]], Index], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint; an existing one is replaced once the new one is complete.

    `make_index` returns the index, given the files' lengths and checksums; the tensors are on the CPU and contiguous.
    """
    with replaced(target) as folder:
        write_index(folder, make_index({file_name(): write_tensors(folder / file_name(), tensors)}))


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a file of tensors, which are on the CPU and contiguous, and return its length and checksum."""
    # Tied tensors are written twice, because the file format has no ties, and a state needs none.
    owned, seen = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_part = storage.nbytes() != tensor.numel() * tensor.element_size()
        owned[name] = tensor.clone() if is_part or storage.data_ptr() in seen else tensor
        seen.add(storage.data_ptr())
    save_tensors(owned, file, {"format": "pt"})
    return digest(file)


def write_index(folder: Path, index: Index) -> None:
    (folder / INDEX).write_text(to_json(index), encoding="utf-8")


@contextlib.contextmanager
def replaced(target: Path, new: Path | None = None) -> Iterator[Path]:
    """Yield a folder to write to, which replaces the target at the end of the scope; after an error it is removed.

    It is `new`, as `hidden` names it, which may exist, or one with a unique name.
    """
    check_replaceable(target)
    new, old = new or hidden(target), hidden(target, kind=_OLD)
    with _naming(target):
        try:
            new.mkdir(parents=True, exist_ok=True)
            yield new
            for file in new.iterdir():
                sync(file)
            sync(new)
            while not _has_moved(new, target):  # another writer may put its own there in between
                check_replaceable(target)
                _discard(old, target)
                with contextlib.suppress(FileNotFoundError):
                    target.rename(old)
            sync(target.parent)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            shutil.rmtree(new, ignore_errors=True)
            raise
    _discard(old, target)


def _has_moved(new: Path, target: Path) -> bool:
    """Rename a folder unless there is something in its place; return whether that was done."""
    if os.path.lexists(target):
        return False
    try:
        new.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Name what could not be written in an error that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


@contextlib.contextmanager
def written(target: Path) -> Iterator[Path]:
    """Yield a file to write to, which replaces the target at the end of the scope; after an error it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = hidden(target)
    with _naming(target):
        try:
            yield new
            sync(new)
            new.replace(target)
            sync(target.parent)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def read_index(path: Path) -> Index:
    """Return the index of the checkpoint in a folder.

    Args:
        path: The folder of a checkpoint.

    Raises:
        FileNotFoundError: There is no such folder.
        DamagedError: The folder has no index, or a damaged one.
        CheckpointError: A later version of the library wrote it, or it is a folder of checkpoints, or a run's.

    Example::

        index = read_index(newest("runs/first/checkpoints"))
        index.time, index.metrics
    """
    try:
        text = _text_of_index(path)
    except OSError as error:
        if not path.exists():
            raise FileNotFoundError(f"there is no checkpoint {path}") from error
        if path.is_file():
            raise CheckpointError(
                f"{path} is a file; a checkpoint is a folder. load_weights reads weights from a file of safetensors"
            ) from error
        if found := all_in(path)[0] or all_in(path / CHECKPOINTS)[0]:
            num = f"{len(found)} checkpoint{'s' * (len(found) > 1)}"
            raise CheckpointError(
                f"{path} is a folder of {num}, not one itself: name one of them; the newest is {found[0].path}"
            ) from error
        reason = error.strerror or type(error).__name__
        raise DamagedError(f"{path} is not a whole checkpoint: {INDEX} cannot be read ({reason})") from error
    try:
        return from_json(text)
    except CheckpointError as error:
        raise type(error)(f"{path} cannot be used: {error}") from error.__cause__


def _text_of_index(path: Path) -> bytes:
    """Return the content of an index, after looking for it several times: another process may be replacing it."""
    looks, deadline = 0, time.monotonic() + _REPLACED
    while True:
        try:
            return read_whole(path / INDEX, _MOST_INDEX)
        except FileNotFoundError:
            if not path.exists():
                with contextlib.suppress(OSError):  # its writer may have died between the two renames
                    clear(path.parent)
            looks += not _is_being_written(path)  # while it is, a look says nothing
            if looks == _LOOKS or time.monotonic() > deadline:
                raise
            time.sleep(0.001)


_LOOKS, _REPLACED = 3, 1.0
"""Number of looks after which a file is missing, and the seconds after which it is even if another writes there."""


def _is_being_written(path: Path) -> bool:
    """Return whether a hidden folder says that a checkpoint is being written or replaced."""
    found = (_HIDDEN.fullmatch(one.name) for one in path.parent.glob(".*"))
    return any(one is not None and one["name"] == path.name for one in found)


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def name_at(now: Timestamp) -> str:
    """Return the name of a run's checkpoint at a time, such as `ep0003-ba00000120`."""
    return f"ep{now.epoch:04d}-ba{now.batch:08d}"


def all_in(folder: Path) -> tuple[list[Found], dict[Path, CheckpointError]]:
    """Return a run's checkpoints in a folder, the newest first, and the errors of the others; files are not checked.

    Only names in the form of `name_at` count, so that other files in the folder are never deleted.
    """
    found: list[Found] = []
    damaged: dict[Path, CheckpointError] = {}
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if is_name(path.name) and path.is_dir():
            try:
                found.append(Found(path, read_index(path)))
            except CheckpointError as error:
                damaged[path] = error
            except FileNotFoundError:  # another process has just removed it
                continue
    return sorted(found, key=lambda one: (one.index.batch, one.path.name), reverse=True), damaged


def clear(folder: Path) -> None:
    """Restore checkpoints whose replacement never came, and remove hidden files that have not changed for long.

    A process that is replacing a checkpoint in this moment makes it hidden again.
    """
    for path in sorted(folder.glob(".*")):
        left = _HIDDEN.fullmatch(path.name)
        if left is None:
            continue
        target = path.with_name(left["name"])
        if left["kind"] == _OLD and not os.path.lexists(target):
            with contextlib.suppress(OSError):  # another process has put something there meanwhile
                path.rename(target)
        elif left["kind"] == _OLD:  # what replaces an old one is complete
            _discard(path, target)
        elif _is_left(path):
            _delete(path)


def put_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it no longer belongs to the run; its content is kept."""
    with contextlib.suppress(OSError):
        path.rename(path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}"))


def remove(path: Path) -> None:
    """Delete a checkpoint, renamed first, so that no reader finds an incomplete one; not a folder with other files."""
    if _is_ours_alone(path):
        _discard(path, path)


_NAME = re.compile(r"ep\d{4,}-ba\d{8,}")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f-]{8,}(?P<kind>\.writing|\.old)", re.DOTALL)
_LONG = 600.0
"""Seconds without a change after which a hidden file counts as left by a process that has ended."""


def _is_left(path: Path) -> bool:
    try:
        changes = [max(found.st_mtime, found.st_ctime) for found in map(os.lstat, (path, *path.glob("*")))]
    except FileNotFoundError:  # it is being written
        return False
    return time.time() - max(changes) > _LONG


def hidden(target: Path, word: str | None = None, kind: str = _WRITING) -> Path:
    """Return the hidden path at which `target` is written, or what it replaces is kept, with a word that is unique."""
    return target.with_name(f".{target.name}.{word or secrets.token_hex(8)}{kind}")


def _discard(path: Path, target: Path) -> None:
    """Delete a checkpoint that was at `target`, if it is still there; `clear` restores nothing from its new name."""
    gone = hidden(target)
    with contextlib.suppress(FileNotFoundError):
        path.rename(gone)
        _delete(gone)


def _delete(path: Path) -> None:
    """Delete a folder, a file, or a link to one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def check_replaceable(target: Path) -> None:
    """Raise if the target exists and is not a checkpoint, because it would be lost."""
    if not _is_ours_alone(target):
        raise FileExistsError(f"{target} is not a checkpoint, and would be lost: choose another name")


def _is_ours_alone(path: Path) -> bool:
    """Return whether there is a checkpoint's folder with nothing else in it, or nothing at all.

    It is looked at once, because another writer may move it away and back between two looks.
    """
    try:
        return all(name == INDEX or is_file_name(name) for name in os.listdir(path))
    except FileNotFoundError:
        return not path.is_symlink()  # a link to nothing
    except NotADirectoryError:
        return False


@dataclass(frozen=True)
class Writers:
    """The processes that write a state together."""

    ranks: Ranks
    """All processes."""
    number: int | None
    """The number of this process among those that write, from 0; `None` if others hold the same rows."""
    total: int
    """The number of processes that write."""
    run: str
    """A word that the first process has drawn, in the names of hidden folders."""
    device: torch.device
    """The device of messages."""

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

    Each writes the rows that it holds; if `step` shares a state of which each holds all, the first one writes.
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
    return Writers(ranks, number, total, ranks.word_of_first(secrets.token_hex(8), device), device)


def in_all(writers: Writers | None, act: Callable[[], T], problem: str) -> T:
    """Call a function in all processes and return its result; raise in all of them if it fails in any.

    Where it fails in another process, the error is an `OSError` that begins with `problem`.
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


def write_part(
    target: Path,
    make_tensors: Callable[[], Mapping[str, Tensor]],
    rows: Mapping[str, tuple[int, int]],
    writers: Writers,
) -> None:
    """Write this process's file of a checkpoint, in any thread, and then a report of it for `complete`.

    `rows` are the first row that this process has of each divided tensor, and the row after the last.
    """
    if writers.number is None:
        return
    file = hidden(target, writers.run) / file_name(writers.number, writers.total)
    file.parent.mkdir(parents=True, exist_ok=True)
    report = {**write_tensors(file, make_tensors()), "rows": dict(rows)}
    sync(file)
    with written(_report_of(file)) as new:
        new.write_text(json.dumps(report), encoding="utf-8")


def complete(
    target: Path,
    make_index: Callable[[dict[str, Any]], Index],
    part: Callable[[], None],
    writers: Writers,
    *,
    is_alone: bool = False,
) -> None:
    """Complete a checkpoint, in a file system that all processes share, for all of them or for none; all call this.

    `part` returns when `write_part` has. With `is_alone` no messages are sent, because others may have ended: only the
    first process then knows the result.
    """
    patience = _AFTER_END if is_alone else _TO_APPEAR

    def put() -> None:
        if writers.is_first:
            _put(target, make_index, writers, patience)

    try:
        for act in (part, put):
            act() if is_alone else in_all(writers, act, f"{target} was not written")
    except Exception:
        if writers.is_first:
            shutil.rmtree(hidden(target, writers.run), ignore_errors=True)
        raise


_TO_APPEAR, _AFTER_END = 60.0, 10.0
"""Seconds for which the first process waits for the files of the others: of those that say that they have written them,
as file systems of several hosts may be slow, and at the end of a run, of those that may still be writing."""


def _put(target: Path, make_index: Callable[[dict[str, Any]], Index], writers: Writers, patience: float) -> None:
    """Make a checkpoint of the files in its hidden folder, once all are there."""
    new, deadline = hidden(target, writers.run), time.monotonic() + patience
    files: dict[str, Any] = {}
    for name in (file_name(number, writers.total) for number in range(writers.total)):
        while (report := _reported(new / name)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is not whole after {patience:g} s: its process has ended, or is elsewhere")
            time.sleep(0.02)
        files[name] = report
    with replaced(target, new):
        for file in new.iterdir():
            if not is_file_name(file.name):
                file.unlink()
        write_index(new, make_index(files))


def _report_of(file: Path) -> Path:
    return file.with_suffix(".json")


def _reported(file: Path) -> dict[str, Any] | None:
    """Return what a process has reported of its file; `None` if the file is not whole yet."""
    try:
        report = json.loads(_report_of(file).read_bytes())
        return report if file.stat().st_size == report["bytes"] else None
    except FileNotFoundError:
        return None
