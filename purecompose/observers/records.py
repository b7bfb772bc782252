"""Record files, which a resumed run continues."""

import errno
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from purecompose._support.files import opened
from purecompose.observers.formats import FORMATS, Format
from purecompose.observers.recorder import Image, Monitor, Recorder
from purecompose.time import TimeLike


__all__ = ["Records", "read_records"]


class Records(Recorder):
    """Writes the records of a run to a file, JSON Lines or CSV by its suffix.

    One record for each batch that is due and one for each evaluation, in groups; see `Recorder` for what they hold
    and when they are written. Columns of a CSV file are not known beforehand: when a new one comes, the file is
    replaced by one with that column, in one move.

    A run that **continues** from batch b keeps the records up to b and cuts away those of later batches, which come
    again, and a last line that was only half-written. A run that starts again leaves an old file as it is, under
    another name: `run.jsonl` becomes `run.1.jsonl`, or the next number that is free.

    **Samples** (see `image_samples` and `text_samples`) are files beside it: `run.samples/ba00000100/NAME.png`, and
    `.txt`. They are renamed with the records; those of later batches are replaced when they come again.

    Full or read-only disks, or a folder that cannot be made, bring one warning; training continues.

    Args:
        path: The file, `*.jsonl` or `*.csv`; its folder is made if need be. A relative one is taken from where the
            process is now.
        every: How often a batch has a record: "10ba", "1ep", "4096sp", ...
        monitors: Functions `(state) -> dict`, or one; see `learning_rate`, `memory` and `speed`.
        group: How many records are written together at most.
        seconds: How long a record waits before it is written with the next one that comes.

    Raises:
        ValueError: Another suffix; or, when a run continues, a file that holds no records.
        ImportError: When an image is written: Pillow is not installed.
        TypeError, ValueError: Another argument of the wrong kind.

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
        self.path = Path(path).absolute()  # wherever the process goes
        sink = _File(self.path, _format_of(self.path, "Records"))
        super().__init__(sink, every=every, monitors=monitors, group=group, seconds=seconds)


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records in a file that `Records` wrote: dicts of numbers, lists of them for a population.

    A half-written last line is left out. In CSV files, empty cells are left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Another suffix, or a line that holds no record.
    """
    path = Path(path)
    form = _format_of(path, "read_records")
    with opened(path) as file:
        return [record for _, record in form.scan(file, str(path)) if record]


def _format_of(path: Path, where: str) -> type[Format]:
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise ValueError(f"{where}: expected a file name that ends in {' or '.join(FORMATS)}, got {str(path)!r}")
    return form


class _File:
    """The file as a sink. A process may be killed at any point; all it leaves broken is a last line."""

    def __init__(self, path: Path, form: type[Format]) -> None:
        self._path, self._form = path, form
        self._samples = _samples_of(path)
        self._start = 0
        self._is_ready = False
        self._kept: set[frozenset[str]] = set()

    def begin(self, batch: int) -> None:
        """Make the file hold what there is to say up to this batch."""
        self._start, self._is_ready = batch, False
        self._prepare()

    def write(self, records: list[dict[str, Any]]) -> None:
        if not self._is_ready:
            self._prepare()  # which the disk did not allow before
        # Samples come first: writing them again replaces them, where writing a record again adds one.
        records = [self._without_samples(record) for record in records]
        # An evaluation at the very point from which the run continues may be there already.
        new = [record for record in records if record["batch"] > self._start or frozenset(record) not in self._kept]
        if new:
            self._form.add(self._path, new)

    def _without_samples(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write a record's texts and images to files, and return the record without them."""
        samples = {name: value for name, value in record.items() if isinstance(value, (str, Image))}
        if not samples:
            return record
        for name, value in samples.items():
            path = self._samples / f"ba{record['batch']:08d}" / re.sub(r"[^\w.\-]", "_", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(value, Image):
                _save_png(path.with_name(f"{path.name}.png"), value)
            else:
                path.with_name(f"{path.name}.txt").write_text(value, encoding="utf-8")
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
        """Keep the lines up to the first one of a later batch, or to one that is only half there.

        Batches never go down within a file, and cutting off its end needs no room on the disk.
        """
        with self._path.open("r+b") as file:
            end = 0
            for end_of_line, record in self._form.scan(file, str(self._path)):
                if record.get("batch", 0) > self._start:
                    break
                if record.get("batch") == self._start:
                    self._kept.add(frozenset(record))
                end = end_of_line
            file.truncate(end)


def _samples_of(path: Path) -> Path:
    return path.with_suffix(".samples")


def _put_aside(path: Path) -> None:
    """Give a file of an earlier run, and the folder of its samples, another name, if there is anything in it."""
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
