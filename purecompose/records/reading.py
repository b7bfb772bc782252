"""The content of a run's folder: its starts, records, checkpoints and result."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from purecompose._support.files import is_count
from purecompose.observers import read_records
from purecompose.records.layout import (
    CHECKPOINTS,
    COMMAND,
    CONFIG,
    HISTORY,
    PLAN,
    RECORDS,
    RESULT,
    VERSIONS,
    read_json,
    read_text,
    read_toml,
)
from purecompose.run.saving.folder import all_in


RUNNING, KILLED, FINISHED = "running", "killed", "finished"


@dataclass
class Start:
    """One part of a run, from a call of `fit` to its end."""

    batch: int
    """Number of batches trained on before it."""
    started: str
    """Date and time in ISO 8601, with the offset from UTC."""
    until: int = 0
    """Number of batches at its end, or at its last known time."""
    seconds: float = 0.0
    """Seconds of wall-clock time; accurate to within some seconds if the process was killed."""
    evaluation_seconds: float = 0.0
    """Seconds of wall-clock time spent in evaluations."""
    outcome: str = RUNNING
    """"finished" (also with what is missing), "running" (the last start may also have been killed), "killed", or the
    reason why it was stopped."""
    command: str | None = None
    """The command that started it, if known."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Differences to the previous start: the old and the new value of each changed setting or version."""

    @property
    def batches(self) -> int:
        """Number of batches trained on."""
        return self.until - self.batch

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> "Start":
        """Return a start from the values of `to_plain`; unknown names are ignored.

        Raises:
            TypeError, KeyError: The values are not a start.
        """
        names = {one.name for one in dataclasses.fields(Start)}
        return Start(**{name: value for name, value in plain.items() if name in names})


@dataclass(frozen=True)
class Kept:
    """A checkpoint of a run."""

    path: Path
    """Its folder."""
    batch: int
    """Number of batches that had been trained."""
    epoch: int
    """Number of epochs."""
    num_bytes: int
    """Size of its files, in bytes."""
    metrics: dict[str, Any]
    """Metrics of the last evaluation."""


@dataclass(frozen=True)
class RunRecords:
    """The content of a run's folder. `result` is `None` for a run that is not over or was killed."""

    name: str
    """The folder's name."""
    path: Path
    """The folder."""
    config: dict[str, Any] = field(default_factory=dict)
    """The settings."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """The records, as `read_records` returns them: dicts of numbers, or of lists of numbers for a population."""
    result: dict[str, Any] | None = None
    """The content of `result.json`; `None` for a run that is not over or was killed."""
    plan: str = ""
    """The step's plan, as text."""
    command: str | None = None
    """The command that reproduces the run."""
    versions: dict[str, Any] = field(default_factory=dict)
    """Versions, device, threads and processor."""
    trained: dict[str, Any] = field(default_factory=dict)
    """Description of the training: `model`, `weights` (their number), `members` (of a population), `optimizer`, `loss`,
    `algorithms`, `duration`."""
    starts: tuple[Start, ...] = ()
    """The starts of the run: when it started and continued."""
    checkpoints: tuple[Kept, ...] = ()
    """The checkpoints in the folder, newest first."""

    @property
    def seconds(self) -> float:
        """Wall-clock time of all starts together, in seconds."""
        return sum(start.seconds for start in self.starts)

    @property
    def last_metrics(self) -> dict[str, Any]:
        """The last value of the loss and of each metric of evaluations and of training."""
        return last_metrics(self.records)


def last_metrics(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last value of the loss and of each metric in records."""
    found: dict[str, Any] = {}
    for record in records:
        found |= {name: value for name, value in record.items() if not name.startswith(_NO_METRICS)}
    return {name: value for name, value in found.items() if name not in ("batch", "epoch", "lr")}


_NO_METRICS = ("time/", "speed/", "memory/", "lr/")


def read_run(path: str | os.PathLike[str]) -> RunRecords:
    """Read the folder of a run, unfinished runs included.

    Args:
        path: The folder.

    Raises:
        FileNotFoundError: There is no such folder.
        NotADirectoryError: The path is a file.
        ValueError: The folder is not a run's, or a file in it is damaged; the message names the file.

    Example::

        run = read_run("runs/first")
        run.result, run.records[-1]
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"read_run: there is no folder {path}")
    if not path.is_dir():
        raise NotADirectoryError(f"read_run: expected the folder of a run, got the file {path}")
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"read_run: {path} is not the folder of a run: it has no {CONFIG}, which RunFolder writes first"
        )
    trained, starts = read_history(path)
    result = read_json(path / RESULT, _RESULT) if (path / RESULT).exists() else None
    command = read_text(path / COMMAND).rstrip("\n")
    return RunRecords(
        name=path.resolve().name,
        path=path,
        config=read_toml(path / CONFIG),
        records=read_records(path / RECORDS) if (path / RECORDS).exists() else [],
        result=result,
        plan=read_text(path / PLAN).rstrip("\n"),
        command=command or None,
        versions=read_json(path / VERSIONS) if (path / VERSIONS).exists() else {},
        trained=trained,
        starts=tuple(starts),
        checkpoints=_checkpoints(path / CHECKPOINTS),
    )


def read_history(path: Path) -> tuple[dict[str, Any], list[Start]]:
    """Return the description of the training in a folder, and its starts; both are empty if it has no history."""
    file = path / HISTORY
    if not file.exists():
        return {}, []
    history = read_json(file, _HISTORY)
    return history.get("trained") or {}, [Start.of_plain(plain) for plain in history["starts"]]


_TEXT, _SIZE = (str, None), (is_count, None)
_HISTORY = {
    "trained?": (
        {"model?": ([str], None), "weights?": _SIZE, "members?": _SIZE, "algorithms?": ([str], None), "*": _TEXT},
        None,
    ),
    "starts": [
        {
            **{"batch": is_count, "started": str, "until?": is_count, "seconds?": float, "evaluation_seconds?": float},
            **{"outcome?": str, "command?": _TEXT},
            "changed?": {"*": lambda pair: isinstance(pair, list) and len(pair) == 2},
        }
    ],
}
_COUNTS = dict.fromkeys(("batches?", "epochs?", "samples?"), is_count)
_RESULT = {"metrics?": {"*": object}, **_COUNTS, "seconds?": float}


def _checkpoints(folder: Path) -> tuple[Kept, ...]:
    found, _ = all_in(folder)
    return tuple(
        Kept(
            one.path,
            one.index.batch,
            one.index.time["epoch"],
            sum(file.stat().st_size for file in one.path.iterdir()),
            dict(one.index.metrics),
        )
        for one in found
    )
