"""The files in a run's folder, in TOML, JSON and text, and their content: its settings, starts, records and result."""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from purecompose._support.files import from_json, read_whole, to_json
from purecompose._support.specs import shown
from purecompose.observers import read_records
from purecompose.run.saving.folder import CHECKPOINTS as CHECKPOINTS, all_in, written


CONFIG, VERSIONS, PLAN, COMMAND = "config.toml", "versions.json", "plan.txt", "command.txt"
RECORDS, HISTORY = "records.jsonl", "history.json"
RESULT, REPORT = "result.json", "report.html"
LOCK = ".lock"

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_MOST_BYTES = 2**26
"""Maximal size of the settings, plan, history, ... that are read."""


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8, in one move."""
    with written(path) as new:
        new.write_bytes(text.encode("utf-8", "replace"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in one move, of the values of `to_json`."""
    write_text(path, json.dumps(to_json(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object, with "nan", "inf" and "-inf" as numbers."""
    try:
        content = from_json(json.loads(read_whole(file, _MOST_BYTES).decode("utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: expected a JSON object, got {type(content).__name__}")
    return content


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_whole(file, _MOST_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}; restore it from a copy") from error


def read_text(file: Path) -> str:
    """Return the text in a file; empty if it is missing."""
    return read_whole(file, _MOST_BYTES).decode("utf-8", "replace") if file.exists() else ""


def checked_settings(config: Any, where: str, *, is_nested: bool = False) -> dict[str, Any]:
    """Return a copy of settings, flat or one level nested, with paths as text, tuples as lists, and `None` left out."""
    if not isinstance(config, Mapping):
        raise TypeError(
            f"{where}: expected settings by name, a mapping, got {shown(config)}; for a namespace pass vars(namespace)"
        )
    settings: dict[str, Any] = {}
    for name, value in config.items():
        if not isinstance(name, str):
            raise TypeError(f"{where}: expected names of settings as strings, got {shown(name)}")
        place = f"{where}.{name}" if is_nested else f"{where}: {name}"
        if isinstance(value, Mapping) and not is_nested:
            settings[name] = checked_settings(value, place, is_nested=True)
        elif value is not None:
            settings[name] = _plain(value, place)
    return settings


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return checked settings as TOML: the flat ones first, then a table for each nested one."""
    lines = [_line(name, value) for name, value in settings.items() if not isinstance(value, Mapping)]
    for name, value in settings.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(name)}]", *(_line(inner, one) for inner, one in value.items())]
    return "\n".join([*lines, ""]).lstrip("\n")


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings as flat ones, with dots in the names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            found[name] = value
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ, the old one and the new one of each name."""
    pairs = {name: [before.get(name), now.get(name)] for name in (*before, *now)}
    return {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}


def _plain(value: Any, where: str) -> Any:
    """Return the value as a type that TOML can represent; values of a subclass, such as of an enum, become plain."""
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, list | tuple):
        return [_plain(one, f"{where}[{i}]") for i, one in enumerate(value)]
    if isinstance(value, str):
        return str.__str__(value)
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(
        f"{where}: expected a string, a number, a bool or a list of them, got {shown(value)}; pass a string, such as "
        "str(value)"
    )


def _line(name: str, value: Any) -> str:
    return f"{_key(name)} = {_value(value)}"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    # A float in the shortest form that reads back to the same bits, also nan and inf; else as in JSON.
    return repr(value) if isinstance(value, float) else _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    # TOML has the escapes of JSON, but requires one for DEL as well. Unpaired surrogates do not exist in UTF-8.
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")


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
    """The content of a run's folder."""

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

    def __repr__(self) -> str:
        outcome = self.starts[-1].outcome if self.starts else "not started"
        return f"RunRecords({str(self.path)!r}, {outcome}, {len(self.records):,} records)"

    @property
    def started(self) -> str:
        """Date and time of the first start, such as "2026-05-01 10:00"; empty if there is none."""
        return self.starts[0].started[:16].replace("T", " ") if self.starts else ""

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
    return RunRecords(
        name=path.resolve().name,
        path=path,
        config=read_toml(path / CONFIG),
        records=read_records(path / RECORDS) if (path / RECORDS).exists() else [],
        result=read_json(path / RESULT) if (path / RESULT).exists() else None,
        plan=read_text(path / PLAN).rstrip("\n"),
        command=read_text(path / COMMAND).rstrip("\n") or None,
        versions=read_json(path / VERSIONS) if (path / VERSIONS).exists() else {},
        trained=trained,
        starts=tuple(starts),
        checkpoints=_checkpoints(path / CHECKPOINTS),
    )


def runs_of(given: object, where: str) -> list[RunRecords]:
    """Return one or several runs, given by their folders or by results of `read_run`."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not several:
        raise ValueError(f"{where}: expected at least one run, got none")
    runs = []
    for one in several:
        if not isinstance(one, (RunRecords, str, os.PathLike)):
            raise TypeError(f"{where}: expected the folder of a run, or the result of read_run, got {shown(one)}")
        runs.append(one if isinstance(one, RunRecords) else read_run(one))
    return runs


def read_history(path: Path) -> tuple[dict[str, Any], list[Start]]:
    """Return the description of the training in a folder, and its starts; both are empty if it has no history."""
    file = path / HISTORY
    if not file.exists():
        return {}, []
    history = read_json(file)
    try:
        return history.get("trained") or {}, [Start(**plain) for plain in history["starts"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: its starts cannot be read: {error}") from error


def _checkpoints(folder: Path) -> tuple[Kept, ...]:
    kept = []
    for path, index in ((one.path, one.index) for one in all_in(folder)[0]):
        size = sum(file.stat().st_size for file in path.iterdir())
        kept.append(Kept(path, index.batch, index.time["epoch"], size, dict(index.metrics)))
    return tuple(kept)
