"""The files of a checkpoint's tensors: one, or one of each process that held rows of them.

A file of one process contains its rows of divided tensors; the index says at which row each begins.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.files import opened
from purecompose._support.urls import present
from purecompose.errors import CheckpointError, DamagedError
from purecompose.run.saving.index import Index
from purecompose.run.saving.leaves import Spec


def file_name(number: int = 0, total: int = 1) -> str:
    """Return the name of a file of tensors.

    Example:
        >>> file_name(), file_name(1, 4)
        ('state.safetensors', 'state-00002-of-00004.safetensors')
    """
    return "state.safetensors" if total == 1 else f"state-{number + 1:05d}-of-{total:05d}.safetensors"


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a file of tensors."""
    return _NAME.fullmatch(name) is not None


_NAME = re.compile(r"state(-\d{5}-of-\d{5})?\.safetensors")


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    package = library()
    try:
        package.torch.save_file(dict(tensors), file, dict(metadata))
    except package.SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


_UNDIVIDED = -1


class _Part(NamedTuple):
    """Rows of a tensor in a file."""

    start: int
    stop: int
    """The row after the last; `_UNDIVIDED` for a tensor of which the file contains all."""
    file: str


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, read when they are asked for.

    Files that contain nothing of what is asked for are not read. The others are compared with the index first.
    """

    def __init__(self, path: Path, index: Index) -> None:
        """Find the tensors in the files.

        Raises:
            DamagedError: The index does not say where the rows of a tensor are.
        """
        self.path: Path = path
        self._index = index
        self._files: dict[str, Any] = {}
        names = sorted(index.files)
        if not names or not all(map(is_file_name, names)):
            raise DamagedError(f"{path}: its index lists {', '.join(names) or 'no files'} as files of tensors")
        self._parts: dict[str, list[_Part]] = {}
        for file in names:
            for name, (start, stop) in _rows_in(path, index.files[file]).items():
                self._parts.setdefault(name, []).append(_Part(start, stop, file))
        for name, text in index.tensors.items():
            parts = self._parts[name] = sorted(self._parts.get(name, [_Part(0, _UNDIVIDED, names[0])]))
            if parts[0].stop != _UNDIVIDED and not _are_all_rows(parts, Spec.of_text(text).shape):
                raise DamagedError(f"{path}: its files do not contain all rows of {name}")

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        return self._read(parts[0], name) if parts[0].stop == _UNDIVIDED else self.rows(name, 0, parts[-1].stop)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows of a tensor from `start` to `stop`."""
        parts = self._parts[name]
        if parts[0].stop == _UNDIVIDED:
            return self[name][start:stop]
        spans = [(part, max(start, part.start), min(stop, part.stop)) for part in parts]
        found = [
            self._read(part, name, slice(low - part.start, high - part.start))
            for part, low, high in spans
            if low < high
        ]
        return torch.cat(found) if found else self._read(parts[0], name, slice(0, 0))

    def _read(self, part: _Part, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor as it is in a file, or rows of it."""
        package = library()
        try:
            file = self._opened(part.file)
            return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        except CheckpointError:
            raise
        except (package.SafetensorError, KeyError, ValueError, RuntimeError, IndexError) as error:
            raise DamagedError(f"{self.path / part.file} cannot be read: {error}") from error

    def _opened(self, name: str) -> Any:
        """Return a file, which is compared with the index when it is opened."""
        if name not in self._files:
            _check_file(self.path, name, self._index.files[name])
            file = library().safe_open(self.path / name, framework="pt")
            own = {tensor for tensor, parts in self._parts.items() if any(part.file == name for part in parts)}
            if own != {*file.keys()}:
                raise DamagedError(f"the tensors in {self.path / name} are not those of its index")
            self._files[name] = file
        return self._files[name]


def _are_all_rows(parts: list[_Part], shape: tuple[int, ...]) -> bool:
    """Return whether each part of a tensor begins where the one before it ends, and the last one ends with it."""
    starts, stops = [part.start for part in parts], [part.stop for part in parts]
    return [*starts, *shape[:1]] == [0, *stops]


def _rows_in(path: Path, report: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the first row of each divided tensor in a file, and the row after the last."""
    rows = report.get("rows", {})
    if any(len(span) != 2 for span in rows.values()):
        raise DamagedError(f"{path}: its index does not describe which rows are in which file")
    return rows


def check_files(path: Path, index: Index) -> None:
    """Compare the files of a checkpoint's tensors with its index.

    Raises:
        DamagedError: One is missing or differs.
    """
    for name, report in index.files.items():
        _check_file(path, name, report)


def is_whole(path: Path, index: Index) -> bool:
    """Return whether the files of a checkpoint's tensors agree with its index."""
    try:
        check_files(path, index)
    except DamagedError:
        return False
    return True


def digest(file: Path) -> dict[str, Any]:
    """Return a file's length in bytes, and its sha256."""
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def library() -> Any:
    """Return the safetensors package."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need safetensors; install it with `pip install 'purecompose[run]'`") from error
    return safetensors


def _check_file(path: Path, name: str, report: Mapping[str, Any]) -> None:
    file = present(path / name)
    try:
        with opened(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != report.get("bytes"):  # compared before the content is read
                expected = report.get("bytes")
                raise DamagedError(f"{file} has {size} bytes, its index says {expected}: it is not whole")
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DamagedError(f"{path} is not a whole checkpoint: {name} cannot be read ({reason})") from error
    if found != report.get("sha256"):
        raise DamagedError(f"{file} has been changed since it was written (the checksum does not fit)")
