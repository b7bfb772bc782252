"""The files of a checkpoint: an index of readable JSON, and tensors in the format of safetensors.

There is one file of tensors, or one of each process that held rows of them; the index says at which row each begins. It
also has a checksum of itself and of each file, so that any changed bit is detected.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.files import PLAIN, is_count, is_nested_deeper, is_numbers, misfit, opened
from purecompose._support.messages import present, required
from purecompose.errors import CheckpointError, DamagedError
from purecompose.run.saving.leaves import Spec
from purecompose.time import RunLength, Time, Timestamp


FORMAT, VERSION = "purecompose checkpoint", 1
_MOST_NESTED = 64
_COUNTERS = tuple(field.name for field in dataclasses.fields(Timestamp) if field.name != "run")


@dataclass(frozen=True)
class Index:
    """The description of a checkpoint, in plain values."""

    time: dict[str, Any]
    """Counters, and the run's length; see `time_to_plain`."""
    description: dict[str, Any]
    """Description of the static part, for comparison; see `purecompose.run.saving.comparison`."""
    environment: dict[str, Any]
    """Versions, and everything else outside the state that the bits of a run depend on."""
    tensors: dict[str, Any]
    """Form of each tensor in the file: dtype, shape and, if it is not contiguous, strides."""
    values: dict[str, Any]
    """Leaves that are not tensors: numbers, strings, `None`."""
    files: dict[str, Any]
    """Length in bytes and sha256 of each file."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the last evaluation."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Notes of the loop around the step, such as the number of microbatches that fit into memory."""

    @property
    def batch(self) -> int:
        """Number of batches that the state has been trained on."""
        return self.time["batch"]


def to_json(index: Index) -> str:
    """Return the index as JSON, with its checksum."""
    content = {"format": FORMAT, "version": VERSION, **{name: _plain(value) for name, value in vars(index).items()}}
    return json.dumps({**content, "sha256": _checksum(content)}, indent=1, allow_nan=False) + "\n"


def from_json(text: bytes) -> Index:
    """Return an index from its file's content."""
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"its index is not valid JSON: {error}") from error
    if is_nested_deeper(content, _MOST_NESTED):
        raise DamagedError(f"its index is nested more than {_MOST_NESTED} levels deep, which no index is")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedError("its index is of another program: it does not say that it is a checkpoint of purecompose")
    if isinstance(content.get("version"), int) and content["version"] > VERSION:
        raise CheckpointError(f"its format is version {content['version']}, and this purecompose reads {VERSION}")
    reported = content.pop("sha256", None)
    if reported != _checksum(content):
        raise DamagedError("its index has been changed since it was written (the checksum does not fit)")
    try:
        fields = {field.name: _restored(content.get(field.name)) for field in dataclasses.fields(Index)}
    except ValueError as error:
        raise DamagedError(f"its index has a number that is none: {error}") from error
    description = fields["description"]
    if isinstance(description, dict) and isinstance(description.get("base"), str):  # whole, and not to be put aside
        raise CheckpointError("an earlier purecompose wrote it with parts='trainable': load it with that version")
    for name, form in _FORMS.items():
        if (place := misfit(fields[name], form, name)) is not None:
            raise DamagedError(f"its index has no valid {place}")
    time_from_plain(fields["time"])
    return Index(**fields)


def time_to_plain(timestamp: Timestamp) -> dict[str, Any]:
    run = timestamp.run
    counters = {name: getattr(timestamp, name) for name in _COUNTERS}
    return {
        **counters,
        "duration": None if run.duration is None else str(run.duration),
        "batches_per_epoch": run.batches_per_epoch,
        "batches_per_update": run.batches_per_update,
    }


def time_from_plain(plain: Mapping[str, Any]) -> Timestamp:
    try:
        duration = plain["duration"]
        length = None if duration is None else Time.of(duration)
        run = RunLength(length, plain["batches_per_epoch"], plain.get("batches_per_update", 1))
        return Timestamp(**{name: plain[name] for name in _COUNTERS}, run=run)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedError(f"its index has no valid time: {error}") from error


def _is_spec(text: object) -> bool:
    return isinstance(text, str) and bool(Spec.of_text(text))


def _is_span(rows: object) -> bool:
    """Return whether a value is the first row of a tensor in a file, and the row after the last."""
    return isinstance(rows, list) and len(rows) == 2 and all(map(is_count, rows))


DECIDES = "best"
"""Name of the note in an index which metric decides what the best checkpoint is, and which values are better."""
_FORMS: dict[str, Any] = {
    "time": {
        **dict.fromkeys(_COUNTERS, is_count),
        "duration": (str, None),
        "batches_per_epoch": (is_count, None),
        "batches_per_update?": is_count,
    },
    "description": {
        **{"model": [str], "initialised": [str], "frozen": [str], "required?": [str], "eval_mode?": [str]},
        **dict.fromkeys(("algorithms?", "base?", "settings?"), {"*": str}),
        **{"hparams?": {"*": is_numbers}, "microbatches?": (int, str, None), "*": (str, None)},
    },
    "environment": {"*": object},
    "tensors": {"*": _is_spec},
    "values": {"*": PLAIN},
    "files": {"*": {"bytes": is_count, "sha256": str, "rows?": {"*": _is_span}}},
    "metrics": {"*": (is_numbers, *PLAIN)},
    "memory": {
        f"{DECIDES}?": {"metric": str, "mode": (str, None)},
        "has_begun?": bool,
        "microbatches?": is_count,
        "data?": {"*": object},
        "*": object,
    },
}
"""What each part of an index looks like. What is only shown or compared as a whole may be any plain value."""


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent; numbers that are not finite become `{"float": "nan"}` etc."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, (list, tuple)) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        is_number = value.keys() == {"float"} and isinstance(value["float"], str)
        return float(value["float"]) if is_number else {name: _restored(member) for name, member in value.items()}
    return [_restored(member) for member in value] if isinstance(value, list) else value


def file_name(number: int = 0, total: int = 1) -> str:
    """Return the name of a file of tensors, such as 'state-00002-of-00004.safetensors'."""
    return "state.safetensors" if total == 1 else f"state-{number + 1:05d}-of-{total:05d}.safetensors"


def is_file_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


_NAME = re.compile(r"state(-\d{5}-of-\d{5})?\.safetensors")


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
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
    """The row after the last; `_UNDIVIDED` for an unsharded tensor."""
    file: str


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name; a file is compared with the index and read when it is needed."""

    def __init__(self, path: Path, index: Index) -> None:
        """Find the tensors in the files; raise a `DamagedError` if rows are missing."""
        self.path: Path = path
        self._index = index
        self._files: dict[str, Any] = {}
        names = sorted(index.files)
        if not names or not all(map(is_file_name, names)):
            raise DamagedError(f"{path}: its index lists {', '.join(names) or 'no files'} as files of tensors")
        self._parts: dict[str, list[_Part]] = {}
        for file in names:
            for name, (start, stop) in index.files[file].get("rows", {}).items():
                self._parts.setdefault(name, []).append(_Part(start, stop, file))
        for name, text in index.tensors.items():
            parts = self._parts[name] = sorted(self._parts.get(name, [_Part(0, _UNDIVIDED, names[0])]))
            starts, stops = [part.start for part in parts], [part.stop for part in parts]
            # Each part begins where the one before it ends, and the last one ends with the tensor.
            if stops[0] != _UNDIVIDED and [*starts, *Spec.of_text(text).shape[:1]] != [0, *stops]:
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


def check_files(path: Path, index: Index) -> None:
    """Raise a `DamagedError` if a file of a checkpoint's tensors is missing, or differs from the index."""
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
    required("a checkpoint", "'purecompose[run]'", "safetensors.torch")
    return sys.modules["safetensors"]


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
