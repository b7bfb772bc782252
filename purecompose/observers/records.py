"""Files of records, which a resumed run continues."""

import errno
import functools
import itertools
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from purecompose._support.files import opened, sync
from purecompose._support.messages import escaped, warn
from purecompose.core.state import State
from purecompose.observers.formats import FORMATS, Format
from purecompose.observers.recorder import Image, Monitor, Recorder
from purecompose.time import TimeLike, TimeUnit
from purecompose.time.event import Event
from purecompose.time.timestamp import checked_interval


class Records(Recorder):
    """A recorder that writes the records of a run to a file, JSON Lines or CSV depending on its suffix.

    There is one record for each batch that is due and one for each evaluation, written in groups; see `Recorder` for
    their content and the times of writing. The columns of a CSV file are not known in advance: for a new column, the
    file is replaced by one with that column, in one move.

    A run that **continues** from batch b keeps the records up to b, and removes the records of later batches, which
    will be written again, and a half-written last line. If the file does not reach up to b, there is a warning. A run
    that starts from the beginning renames an old file: `run.jsonl` becomes `run.1.jsonl`, or the next free number.

    Records up to a checkpoint are on disk before it is written.

    **Samples** (see `image_samples` and `text_samples`) are separate files: `run.samples/ba00000100/NAME.png`, and
    `.txt`. They are renamed with the records; samples of later batches are replaced when they are written again.

    A full or read-only disk, or a folder that cannot be created, causes one warning; training continues.

    Args:
        path: The file, `*.jsonl` or `*.csv`; its folder is created if necessary. A relative path is resolved against
            the current working directory immediately.
        every: Interval between the batches with a record: "10ba", "1ep", "4096sp", ...
        monitors: One or several functions `(state) -> dict`; see `learning_rate`, `memory` and `speed`.
        group: Number of waiting records at which they are written.
        seconds: Seconds after which a waiting record is written, together with the next one.

    Raises:
        ValueError: The suffix is unknown; or, when a run continues, the file does not contain records.
        ImportError: When an image is written: Pillow is not installed.
        TypeError, ValueError: Another argument has the wrong kind.

    Example:
        >>> import tempfile, torch
        >>> from purecompose import State, compose, fit, loop_events, losses, optim
        >>> state = State.create(
        ...     torch.nn.Linear(3, 2), loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="2ep"
        ... )
        >>> data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))]
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
        self._file = _File(self.path, _format_of(self.path, "Records"))
        super().__init__(self._file, every=every, monitors=monitors, group=group, seconds=seconds)
        self._interval = checked_interval(every, "Records: every", TimeUnit.BATCH)

    def _begin(self, event: Event, state: State) -> None:
        super()._begin(event, state)
        last, self._file.last = self._file.last, None
        unit, now = self._interval.unit, state.timestamp
        if last is None or unit not in _COUNTERS or (unit is TimeUnit.EPOCH and now.run.batches_per_epoch is None):
            return
        # An earlier part of the run may have been asked for fewer records.
        is_due = now.batch - last["batch"] >= self._file.widest
        if is_due and last.get(_COUNTERS[unit], 0) // self._interval.value < now.get(unit) // self._interval.value:
            warn(
                f"{self.path}: the records after batch {last['batch']} are missing, and the run continues at batch "
                f"{now.batch}: they could not be written, or the file was changed. Curves and report have a gap there",
                RuntimeWarning,
            )


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records in a file of `Records`: dicts of numbers, or of lists of numbers for a population.

    A half-written last line and the empty cells of CSV files are left out.

    Args:
        path: A file of `Records`: .jsonl or .csv.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The suffix is unknown, or a line is not a record.

    Example::

        [record["loss"] for record in read_records("run.jsonl") if "loss" in record]
    """
    path = Path(path)
    form = _format_of(path, "read_records")
    with opened(path) as file:
        return [record for _, record in form.scan(file, str(path)) if record]


_COUNTERS = {
    TimeUnit.BATCH: "batch",
    TimeUnit.EPOCH: "epoch",
    TimeUnit.SAMPLE: "time/sample",
    TimeUnit.TOKEN: "time/token",
}
"""The units whose count is in every record, with its name there."""


def _format_of(path: Path, where: str) -> type[Format]:
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise ValueError(f"{where}: expected a file name that ends in {' or '.join(FORMATS)}, got {str(path)!r}")
    return form


class _File:
    """The file as a sink. If the process is killed, at any point, only the last line may be damaged."""

    def __init__(self, path: Path, form: type[Format]) -> None:
        self._path, self._form = path, form
        self._samples = _samples_of(path)
        self._start = 0
        self._is_ready = False
        self._kept: set[frozenset[str]] = set()
        self._unsynced: set[Path] = set()
        # Of the file of a run that continues, the last record, and the greatest distance between two, in batches.
        self.last: dict[str, Any] | None = None
        self.widest = 0

    def begin(self, batch: int) -> None:
        """Prepare the file for records after this batch."""
        self._start, self._is_ready, self.last = batch, False, None
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
            self._form.add(self._path, new)
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
        return {_in_one_line(name): value for name, value in record.items() if name not in samples}

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
        """Cut the file before the first line that is incomplete or of a later batch, and note the record before it.

        Batches never decrease within a file, and cutting off its end needs no space on the disk.
        """
        self.last, self.widest = {"batch": 0}, 0
        with self._path.open("r+b") as file:
            end = 0
            for end_of_line, record in self._form.scan(file, str(self._path)):
                if record.get("batch", 0) > self._start:
                    break
                if record.get("batch") == self._start:
                    self._kept.add(frozenset(record))
                self.widest = max(self.widest, record.get("batch", 0) - self.last["batch"])
                self.last, end = record or self.last, end_of_line
            file.truncate(end)


@functools.lru_cache(4096)
def _in_one_line(name: str) -> str:
    """Return the name of a metric without ends of lines, so that it can be the name of a column."""
    return escaped(" ".join(name.split()))


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
    try:
        import PIL.Image
    except ImportError as error:
        raise ImportError("Records needs Pillow to write images; install it with `pip install pillow`") from error
    height, width, _ = image.pixels.shape
    PIL.Image.frombytes("RGB", (width, height), bytes(image.pixels.flatten().tolist())).save(path)
