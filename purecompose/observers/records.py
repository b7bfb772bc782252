"""Files of records, which a resumed run continues."""

import errno
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from purecompose._support.files import from_json, opened, sync, to_json
from purecompose._support.messages import required
from purecompose._support.specs import shown
from purecompose.observers.recorder import Image, Monitor, Recorder
from purecompose.time import TimeLike


class Records(Recorder):
    """A recorder that writes the records of a run to a file, as JSON Lines: one object per line.

    See `Recorder` for the records and the times of writing. Numbers that are not finite are "nan", "inf" and "-inf".

    A run that **continues** from batch b removes the records of later batches, which will be written again, and a
    half-written last line. A run that starts from the beginning renames an old file: `run.jsonl` becomes `run.1.jsonl`,
    or the next free number.

    **Samples** (see `image_samples` and `text_samples`) are separate files: `run.samples/ba00000100/NAME.png`, and
    `.txt`. They are renamed with the records; samples of later batches are replaced when they are written again.

    Args:
        path: The file, `*.jsonl`; its folder is created if necessary. A relative path is resolved against the current
            working directory immediately.
        every: Interval between the batches with a record: "10ba", "1ep", "4096sp", ...
        monitors, group, seconds: As for `Recorder`; monitors are `learning_rate`, `memory`, `speed`, ...

    Raises:
        ValueError: The suffix is another; or, when a run continues, the file does not contain records.
        ImportError: When an image is written: Pillow is not installed.
        TypeError, ValueError: Another argument has the wrong kind.

    Example:
        >>> import tempfile, torch
        >>> from purecompose import State, compose, fit, loop_events, losses, optim
        >>> state = State.create(torch.nn.Linear(3, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="2ep")
        >>> data = [(torch.zeros(4, 3), torch.zeros(4, 1))]
        >>> with tempfile.TemporaryDirectory() as folder, Records(f"{folder}/run.jsonl") as records:
        ...     state = fit(compose(loop_events), state, data, observers=records)
        ...     [(record["batch"], sorted(record)) for record in read_records(records.path)]
        [(1, ['batch', 'epoch', 'loss', 'time/sample']), (2, ['batch', 'epoch', 'loss', 'time/sample'])]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: TimeLike | int = "1ba",
        monitors: Monitor | Iterable[Monitor] = (),
        group: int = 100,
        seconds: float = 10.0,
    ) -> None:
        self.path: Path = Path(path).absolute()  # valid after a change of the working directory
        if self.path.suffix.lower() != ".jsonl":
            raise ValueError(f"Records: expected a file name that ends in .jsonl, got {str(path)!r}")
        super().__init__(_File(self.path), every=every, monitors=monitors, group=group, seconds=seconds)


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records in a file of `Records`: dicts of numbers, or of lists of numbers for a population.

    A half-written last line is left out.

    Args:
        path: A file of `Records`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not a record.

    Example::

        [record["loss"] for record in read_records("run.jsonl") if "loss" in record]
    """
    path = Path(path)
    with opened(path) as file:
        return [record for _, record in _scan(file, str(path))]


class _File:
    """The file as a sink. If the process is killed, at any point, only the last line may be damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._samples = _samples_of(path)
        self._start = 0
        self._is_ready = False
        self._kept: set[frozenset[str]] = set()
        self._unsynced: set[Path] = set()

    def begin(self, batch: int) -> None:
        """Prepare the file for records after this batch."""
        self._start, self._is_ready = batch, False
        self._prepare()

    def sync(self) -> None:
        """Put all that was written on disk, with the names of the files."""
        while self._unsynced:
            with suppress(FileNotFoundError):  # it has been renamed or removed
                sync(next(iter(self._unsynced)))
            self._unsynced.pop()

    def write(self, records: list[dict[str, Any]]) -> None:
        if not self._is_ready:
            self._prepare()  # it failed before
        # Samples come first: if a write fails and is repeated, samples are replaced but records would be added twice.
        records = [self._without_samples(record) for record in records]
        # The file may already contain an evaluation at the batch from which the run continues.
        new = [record for record in records if record["batch"] > self._start or frozenset(record) not in self._kept]
        if new:
            _append(self._path, "".join(f"{json.dumps(to_json(record), allow_nan=False)}\n" for record in new))
            self._unsynced |= {self._path, self._path.parent}

    def _without_samples(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write a record's texts and images to files, and return the record without them."""
        samples = {name: value for name, value in record.items() if isinstance(value, (str, Image))}
        for name, value in samples.items():
            name = re.sub(r"[^\w.\-]", "_", name)
            path = self._samples / f"ba{record['batch']:08d}" / f"{name}.{'png' if isinstance(value, Image) else 'txt'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(value, Image):
                _save_png(path, value)
            else:
                path.write_text(value, encoding="utf-8")
            self._unsynced |= {path, path.parent, self._samples}
        return {name: value for name, value in record.items() if name not in samples}

    def _prepare(self) -> None:
        self._kept = set()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            if not self._path.is_file():
                raise OSError(errno.EINVAL, "not a regular file", str(self._path))
            if self._start == 0:
                _put_aside(self._path)
            else:
                self._cut()
        self._is_ready = True

    def _cut(self) -> None:
        """Cut the file before the first line that is incomplete or of a later batch.

        Batches never decrease within a file, and cutting off its end needs no space on the disk.
        """
        with self._path.open("r+b") as file:
            end = 0
            for end_of_line, record in _scan(file, str(self._path)):
                if record["batch"] > self._start:
                    break
                if record["batch"] == self._start:
                    self._kept.add(frozenset(record))
                end = end_of_line
            file.truncate(end)


def _samples_of(path: Path) -> Path:
    return path.with_suffix(".samples")


def _put_aside(path: Path) -> None:
    """Rename a file of an earlier run, and the folder of its samples, unless the file is empty."""
    if path.stat().st_size:
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
        name = next(name for name in names if not name.exists() and not _samples_of(name).exists())
        if _samples_of(path).exists():
            _samples_of(path).rename(_samples_of(name))
        path.rename(name)


def _save_png(path: Path, image: Image) -> None:
    library = required("an image in Records", "pillow", "PIL.Image")
    height, width, _ = image.pixels.shape
    library.frombytes("RGB", (width, height), bytes(image.pixels.flatten().tolist())).save(path)


def _scan(file: BinaryIO, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of a file, each with the offset of its line's end, up to a line without an end."""
    end = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return  # a process was killed while it wrote this line
        try:
            record = _checked(from_json(json.loads(line)))
        except (ValueError, RecursionError) as error:
            text = line[:60].decode("utf-8", "replace").rstrip()
            raise ValueError(
                f"{name}, line {number}: expected a record of a run, got {text!r} ({error}); "
                "is this a file that Records wrote?"
            ) from error
        end += len(line)
        yield end, record


def _checked(record: Any) -> dict[str, Any]:
    """Return a record, or raise if it is not one that `Records` writes."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {shown(record)}")
    for name in ("batch", "epoch"):
        if type(record.get(name)) is not int or record[name] < 0:
            raise ValueError(f"{name}: expected a whole number, got {shown(record.get(name))}")
    for name, value in record.items():
        if not all(isinstance(one, (int, float)) for one in (value if isinstance(value, list) and value else [value])):
            raise ValueError(f"{name}: expected a number, or a list of numbers for a population, got {shown(value)}")
    return record


def _append(path: Path, text: str) -> None:
    with path.open("ab", buffering=0) as file:
        size, rest = file.seek(0, io.SEEK_END), memoryview(text.encode())
        try:
            while rest:  # an unbuffered write may write only a part, such as on a disk that becomes full
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise
