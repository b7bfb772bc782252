"""The runs of a folder as rows: their status, settings and metrics, sorted."""

import contextlib
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from purecompose import metrics, optim, schedule
from purecompose._support import specs
from purecompose.records.contents import evaluation_columns, places
from purecompose.records.layout import CONFIG, FINISHED, HISTORY, RUNNING, RunRecords, flat, read_run
from purecompose.time import Time, TimeUnit


_COUNTED = {TimeUnit.EPOCH: "epoch", TimeUnit.BATCH: "batch"}
_COUNTED |= {TimeUnit.SAMPLE: "time/sample", TimeUnit.TOKEN: "time/token"}
_NOT_COMPARED = ("checkpoint_every", "keep", "keep_best")
"""Settings that change no result."""


def list_runs(folder: str | os.PathLike[str], *, sort: str | None = None) -> list[dict[str, Any]]:
    """Return the runs in a folder and its subfolders, the newest first, as rows of a table.

    `sort` knows a row's entries, metrics by their names, `best.NAME`, settings, and the arguments of calls as in
    `--set`: `optimizer.lr` of "adam(lr=0.01)", and `mixup.alpha` of an algorithm.

    Args:
        folder: The folder.
        sort: Name to sort by: metrics from the best to the worst, others in ascending order; "-NAME" reverses it. Runs
            without it come last.

    Returns:
        A dict for each run: `name` (its path in the folder), `status`, `progress` (the part of its duration that is
        done, from 0 to 1; `None` if unknown), `batches`, `started` (in ISO 8601), `seconds`, `algorithms`, `settings`,
        `metrics` (the last ones) and `best` (of metrics of which it is known whether lower is better).

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: No run has the name, or a file of a run is damaged.

    Example::

        [row["name"] for row in list_runs("runs", sort="eval/accuracy") if row["seconds"] < 600]
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"list_runs: there is no folder {root}")
    folders = sorted(path.parent for path in root.rglob(CONFIG) if (path.parent / HISTORY).exists())
    rows = [_row(read_run(path), path.relative_to(root).as_posix()) for path in folders]
    rows.sort(key=lambda row: row["started"], reverse=True)
    if sort is None or not rows:
        return rows
    name = sort.removeprefix("-")
    found = [(_number(value), row) for value, row in zip(_values(rows, name), rows, strict=True)]
    known = [pair for pair in found if pair[0] is not None]
    is_falling = (metrics.is_lower_better(name) is False) != sort.startswith("-")
    known.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=is_falling)
    return [row for _, row in [*known, *(pair for pair in found if pair[0] is None)]]


def status_of(run: RunRecords) -> tuple[str, str]:
    """Return the status of the run, and its class in the style sheet."""
    if not run.starts:
        return "not started", "faint"
    outcome = run.starts[-1].outcome
    if outcome == RUNNING:
        return "running or killed", "faint"
    return (outcome, "good") if outcome == FINISHED else (outcome if outcome.startswith(FINISHED) else "stopped", "bad")


def differing(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return what differs in the settings of runs, rows of `list_runs`; of calls, arguments such as "optimizer.lr"."""
    known = [dict(_parts(row)) for row in rows]
    names = []
    for name in dict.fromkeys(name for one in known for name in one):
        owner = name.rpartition(".")[0]  # an argument is compared among the runs that have its method
        if len({one.get(name) for one in [one for one in known if owner in one] or known}) > 1:
            names.append(name)
    return [{name: text for name in names if (text := one.get(name)) is not None} for one in known]


def _parts(row: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield what is compared of a run: settings, calls without arguments, their arguments; `None` for a method."""
    settings = row["settings"]
    given = settings.get("algorithms", "none")
    texts = [str(one) for one in row["algorithms"] or _calls(given)]
    calls = [call for text in texts for call in _calls(text)]
    if len({call.name for call in calls}) < len(texts):  # others, or two of a kind
        yield "algorithms", ", ".join(texts)
    else:
        yield "algorithms", ", ".join(map(_head, calls)) or str(given)
        for call in calls:
            yield call.name, None
            yield from ((f"{call.name}.{name}", str(value)) for name, value in call.kwargs.items())
    for name in (name for name in settings if name not in ("algorithms", *_NOT_COMPARED)):
        calls = _calls(settings[name])
        yield name, _head(calls[0]) if len(calls) == 1 else str(settings[name])
        if len(calls) == 1:
            yield from ((f"{name}.{argument}", str(value)) for argument, value in calls[0].kwargs.items())


def _head(call: specs.Call) -> str:
    return str(specs.Call(call.name, call.args)) if call.args else call.name


def _row(run: RunRecords, name: str) -> dict[str, Any]:
    best: dict[str, float] = {}
    for column in dict.fromkeys(evaluation_columns(run.records)):
        lower = metrics.is_lower_better(column)
        values = [value for record in run.records if isinstance(value := _number(record.get(column)), float)]
        if lower is not None and values:
            best[column] = min(values) if lower else max(values)
    return {
        "name": name,
        "status": status_of(run)[0],
        "progress": _progress(run),
        "batches": max((start.until for start in run.starts), default=0),
        "started": run.starts[0].started if run.starts else "",
        "seconds": run.seconds,
        "algorithms": run.trained.get("algorithms", []),
        "settings": flat(run.config),
        "metrics": run.last_metrics,
        "best": best,
    }


def _progress(run: RunRecords) -> float | None:
    duration = run.trained.get("duration")
    whole = None if duration is None else Time.of(duration)
    if whole is None or whole.unit not in _COUNTED or not run.records:
        return None
    return min(places(run, _COUNTED[whole.unit])[-1] / whole.value, 1.0)


def _number(value: Any) -> Any:
    """Return a value to compare: of a population the median; `None` for what is not known."""
    if isinstance(value, list):
        finite = [one for one in value if isinstance(one, int | float) and math.isfinite(one)]
        return float(statistics.median(finite)) if finite else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None if value is None else str(value)
    return float(value) if math.isfinite(value) else None


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return the value that each row has by a name; an error if none has it."""
    known = [dict(_entries(row)) for row in rows]
    if any(name in row["metrics"] for row in rows):
        return [row["metrics"].get(name) for row in rows]
    specs.check_name(name, dict.fromkeys(key for one in known for key in one), "setting or metric")
    return [one.get(name) for one in known]


def _entries(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all values of a row by the names that `sort` knows; of equal names, the last counts."""
    yield from row["metrics"].items()
    for name, value in row["settings"].items():
        yield from _arguments(value, f"{name}.")
        yield name, value
    for text in row["algorithms"]:
        yield from _arguments(text)
    yield from ((f"best.{name}", value) for name, value in row["best"].items())
    yield from ((name, value) for name, value in row.items() if not isinstance(value, dict | list))


def _arguments(text: Any, prefix: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call under the name of its setting, or without one under its own."""
    for call in _calls(text):
        yield from ((f"{prefix or f'{call.name}.'}{name}", value) for name, value in call.kwargs.items())


def _calls(text: Any) -> list[specs.Call]:
    """Return the calls in a text, with arguments by their names; none for a text without calls."""
    factories = {name: getattr(owner, name) for owner in (optim, schedule) for name in dir(owner)}
    with contextlib.suppress(specs.SpecError, TypeError, ValueError):  # a text with parentheses
        if isinstance(text, str) and "(" in text:
            return [specs.by_name(call, factories) for call in specs.parse(text)]
    return []
