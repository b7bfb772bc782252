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
from purecompose.run.saving.errors import DamagedError
from purecompose.run.saving.index import Index
from purecompose.run.saving.leaves import Spec


__all__ = ["SavedTensors", "check_files", "digest", "file_name", "is_file_name", "is_whole", "library", "save_tensors"]


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


class _Part(NamedTuple):
    """Rows of a tensor in a file."""

    start: int
    stop: int
    """The row after the last; -1 for a tensor that is not divided."""
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
        self.path, self._index = path, index
        self._files: dict[str, Any] = {}
        names = sorted(index.files)
        if not names or not all(map(is_file_name, names)):
            raise DamagedError(f"{path}: its index lists {', '.join(names) or 'no files'} as files of tensors")
        self._parts: dict[str, list[_Part]] = {}
        for file in names:
            for name, (start, stop) in _rows_in(path, index.files[file]).items():
                self._parts.setdefault(name, []).append(_Part(start, stop, file))
        for name, text in index.tensors.items():
            parts = sorted(self._parts.setdefault(name, [_Part(0, -1, names[0])]))
            self._parts[name] = parts
            ends = [0, *[part.stop for part in parts]]
            if parts[0].stop >= 0 and ([part.start for part in parts], [ends[-1]]) != (
                ends[:-1],
                [*Spec.of_text(text).shape[:1]],
            ):
                raise DamagedError(f"{path}: its files do not contain all rows of {name}")

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        return self._file(parts[0].file, name) if parts[0].stop < 0 else self.rows(name, 0, parts[-1].stop)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows of a tensor from `start` to `stop`."""
        parts = self._parts[name]
        if parts[0].stop < 0:
            return self[name][start:stop]
        here = [part for part in parts if max(start, part.start) < min(stop, part.stop)] or parts[:1]
        found = [
            self._file(part.file, name, slice(max(start, part.start) - part.start, min(stop, part.stop) - part.start))
            for part in here
        ]
        return torch.cat(found) if len(found) > 1 else found[0]

    def _file(self, file: str, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor in a file, or rows of it."""
        package = library()
        try:
            if file not in self._files:
                _check_file(self.path, file, self._index.files[file])
                self._files[file] = package.safe_open(self.path / file, framework="pt")
                own = {name for name, parts in self._parts.items() if any(part.file == file for part in parts)}
                if own != {*self._files[file].keys()}:
                    raise DamagedError(f"the tensors in {self.path / file} are not those of its index")
            found = self._files[file]
            if rows is None:
                return found.get_tensor(name)
            return found.get_slice(name)[max(rows.start, 0) : max(rows.stop, 0)]
        except (package.SafetensorError, KeyError, ValueError, RuntimeError, IndexError) as error:
            raise (
                error
                if isinstance(error, DamagedError)
                else DamagedError(f"{self.path / file} cannot be read: {error}")
            ) from error


def _rows_in(path: Path, report: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the first row of each divided tensor in a file, and the row after the last."""
    rows = report.get("rows", {})
    spans = [*rows.values()] if isinstance(rows, dict) else [None]
    if not all(isinstance(span, list) and [*map(type, span)] == [int, int] and span[0] >= 0 for span in spans):
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
    try:
        with opened(path / name) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != report.get("bytes"):  # compared before the content is read
                expected = report.get("bytes")
                raise DamagedError(f"{path / name} has {size} bytes, its index says {expected}: it is not whole")
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DamagedError(f"{path} is not a whole checkpoint: {name} cannot be read ({reason})") from error
    if found != report.get("sha256"):
        raise DamagedError(f"{path / name} has been changed since it was written (the checksum does not fit)")
