"""The report of one or several runs: one self-contained HTML page.

This module collects the content; `report.html.jinja` and `page.css` define the appearance, and `page.js` draws the
curves from numbers in the page.
"""

import base64
import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup

from purecompose._support.messages import Toned, breakable, columns, printable
from purecompose.observers.progress import describe_seconds
from purecompose.records.contents import (
    AXES,
    SMOOTHED_FROM,
    Panel,
    Predictions,
    Series,
    evaluation_columns,
    names_of,
    panels_of,
    places,
)
from purecompose.records.layout import FINISHED, RUNNING, RunRecords, Start, flat, runs_of, write_text
from purecompose.records.listing import differing, status_of


_KNOWN = ("metrics", "batches", "epochs", "samples", "tokens", "seconds", "evaluation_seconds")
"""Entries of a result that are shown elsewhere, or not."""
_TRAINED = {
    "algorithms": "algorithms",
    "optimizer": "optimizer",
    "loss": "loss",
    "duration": "duration",
    "weights": "weights",
    "members": "members of the population",
}
_MOST_POINTS = 1000
"""Maximal number of points of a line in a page; of longer ones, means of consecutive points are drawn."""
_MOST_CLASSES = 40
"""Maximal number of classes of a confusion matrix that is shown."""


def write_report(
    runs: RunRecords | str | os.PathLike[str] | Sequence[RunRecords | str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    predictions: Predictions | Sequence[Predictions | None] = (),
) -> Path:
    """Write a page about one run or several: results, curves, settings, plan, times, checkpoints and versions.

    The page is a single file without external resources. Of a line with more than 1,000 points, it shows the means of
    consecutive points, in a band of their range.

    Args:
        runs: One or several runs: their folders, or results of `read_run`. A run may be unfinished.
        path: The file, usually `report.html`. It is written in one move.
        predictions: For a confusion matrix and the worst examples: `Predictions` of the run, or a list with those of
            each, or `None`.

    Returns:
        The path.

    Raises:
        OSError: The file cannot be written.
        FileNotFoundError, NotADirectoryError: There is no such run folder; see `read_run`.
        ValueError: The folder is not a run's, there are no runs, or not as many predictions.

    Example::

        write_report(["runs/first", "runs/second"], "report.html")
    """
    found = runs_of(runs, "write_report")
    given = [predictions] if isinstance(predictions, Predictions) else list(predictions) or [None] * len(found)
    if len(given) != len(found):
        raise ValueError(f"write_report: {len(found)} runs and {len(given)} predictions: expected one or None for each")
    names = names_of(found)
    both = list(zip(found, names, strict=True))
    owners = [((name,) if len(found) > 1 else (), run) for run, name in both]
    rows = [{"settings": flat(run.config), "algorithms": run.trained.get("algorithms", [])} for run in found]
    content = dict(
        name=names[0] if len(found) == 1 else f"{len(found)} runs",
        runs=[dict(zip(("name", "words", "tone"), (name, *status_of(run)), strict=True)) for run, name in both],
        summary=_summary(found[0]),
        facts=facts_of(found[0]),
        overview=_overview(found, names) if len(found) > 1 else (),
        differing=_compared(differing(rows)).differing,
        results=_compared([_results(run) for run in found]),
        numbers=_numbers(found, names),
        settings=_compared([{name: _shown(value) for name, value in flat(run.config).items()} for run in found]),
        trained=_compared([_trained(run) for run in found]),
        versions=_compared([{name: _shown(value) for name, value in run.versions.items()} for run in found]),
        times=_compared([_times(run) for run in found]),
        layers=_grouped(names, [_layers(run) for run in found]),
        plans=_grouped(names, [run.plan for run in found]),
        commands=_grouped(names, [run.command or "" for run in found]),
        starts=[(*owner, *_start_row(one)) for owner, run in owners if len(run.starts) > 1 for one in run.starts],
        checkpoints=[(*owner, *row) for owner, run in owners for row in _checkpoints(run)],
        classes=[_classes(one, owner) for one, (owner, _) in zip(given, owners, strict=True) if one],
    )
    return _write_page(path, content)


def _overview(runs: Sequence[RunRecords], names: Sequence[str]) -> tuple[list[str], list[tuple[str | Toned, ...]]]:
    """Return a table of the runs: their status, metrics and times."""
    facts = [{fact.name: fact.value for fact in facts_of(run)} for run in runs]
    head = list(dict.fromkeys(name for one in facts for name in one))
    rows = [
        (name, Toned(*status_of(run)), *(one.get(fact, "-") for fact in head), run.started)
        for run, name, one in zip(runs, names, facts, strict=True)
    ]
    return ["run", "status", *head, "started"], rows


def _results(run: RunRecords) -> dict[str, str]:
    """Return the entries of a run's result that its program has added."""
    return {name: number(value, name) for name, value in (run.result or {}).items() if name not in _KNOWN}


class _Compared(NamedTuple):
    """Values of several runs by name: those that differ, with one for each run, and those that do not."""

    differing: list[tuple[str, ...]]
    common: list[tuple[str, str]]


def _compared(values: Sequence[Mapping[str, str]]) -> _Compared:
    names = list(dict.fromkeys(name for one in values for name in one))
    rows = [(name, *(one.get(name, "-") for one in values)) for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return _Compared(differing, [(row[0], row[1]) for row in rows if row not in differing])


def _grouped(names: Sequence[str], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the texts that are not empty, each with the names of the runs that have it; of all runs, without names."""
    found: dict[str, list[str]] = {}
    for name, text in zip(names, texts, strict=True):
        found.setdefault(text, []).append(name)
    return [("" if len(owners) == len(names) else ", ".join(owners), text) for text, owners in found.items() if text]


def _summary(run: RunRecords) -> str:
    """Return sentences about when the run started and how it ended."""
    if not run.starts:
        return "Not started."
    first, *later = run.starts
    text = f"Started {run.started} (UTC{first.started[19:].replace('+00:00', '')})"
    text += f", continued {len(later)} time{'s' * (len(later) > 1)}." if later else "."
    if run.seconds:
        text += f" {describe_seconds(run.seconds)} in all"
        text += f" on {run.versions['device']}." if "device" in run.versions else "."
    outcome = run.starts[-1].outcome
    if outcome in (FINISHED, RUNNING):
        return text
    return f"{text} It {outcome}." if outcome.startswith(FINISHED) else f"{text} It was stopped by {outcome}"


class Fact(NamedTuple):
    """A number with its name."""

    name: str
    value: str
    note: str = ""
    """What it is a mean or a median of."""


def facts_of(run: RunRecords) -> list[Fact]:
    """Return the metrics of a run, those of evaluations first, the number of its batches and its wall-clock time."""
    metrics = (run.result or {}).get("metrics") or run.last_metrics
    evaluated = set(evaluation_columns(run.records))
    names = [name for name, value in metrics.items() if isinstance(value, int | float | list)]
    names.sort(key=lambda name: 0 if name in evaluated or name.startswith("eval/") else 1 if name == "loss" else 2)
    facts = []
    for name in names:
        value = metrics[name]
        note = f"median and range of {len(value)}" if isinstance(value, list) else ""
        facts.append(Fact("loss of the last batch" if name == "loss" else name, number(value, name), note))
    done = (run.result or {}).get("batches", max((start.until for start in run.starts), default=0))
    return [*facts, Fact("batches", number(done)), Fact("wall-clock time", describe_seconds(run.seconds))]


def _numbers(runs: Sequence[RunRecords], names: Sequence[str]) -> Markup | str:
    """Return the numbers of all curves as JSON that may stand in a page; "" without records."""
    if not any(run.records for run in runs):
        return ""
    panels = panels_of(runs)
    is_long = any(len(one.x) >= SMOOTHED_FROM for panel in panels for one in panel.series if one.is_noisy)
    content = {
        "runs": [
            {
                "name": printable(name),
                "axes": _axes(run),
                "resumed": [start.batch for start in run.starts[1:] if start.batch],
            }
            for run, name in zip(runs, names, strict=True)
        ],
        "panels": [_panel(panel) for panel in panels],
        "axes": {x: words for x, words in AXES.items() if any(x in record for run in runs for record in run.records)},
        "smoothing": 3.5 if is_long else 0,  # percent of the axis
    }
    return Markup(json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _axes(run: RunRecords) -> dict[str, list[float | None]]:
    """Return the places of the same batches along each axis that the run has."""
    found = {x: places(run, x) for x in AXES if any(x in record for record in run.records)}
    known = [i for i in range(len(run.records)) if all(math.isfinite(at[i]) for at in found.values())]
    step = max(1, -(-len(known) // _MOST_POINTS))
    kept = known[::step] + known[-1:]
    return {x: [_rounded(at[i]) for i in kept] for x, at in found.items()} if kept else {}


def _panel(panel: Panel) -> dict[str, Any]:
    columns = panel.columns
    return {
        "title": printable(panel.title),
        "kind": panel.kind,
        "share": panel.is_share,
        "log": panel.is_logarithmic,
        "columns": [printable(name) for name in columns],
        "bad": panel.bad,
        "series": [{"run": one.run, "column": columns.index(one.column), **_thinned(one)} for one in panel.series],
    }


def _thinned(series: Series) -> dict[str, Any]:
    """Return the points of a line: medians of members, means of consecutive points of a long one, and their range."""
    count = len(series.x)
    step = -(-count // _MOST_POINTS)
    padded = torch.nn.functional.pad(series.spread, (0, -count % step), value=math.nan).reshape(3, -1, step)
    levels = {"y": padded[1].nanmean(1)}
    if step > 1 or series.num_members > 1:
        levels["low"] = padded[0].nan_to_num(math.inf, math.inf).amin(1)
        levels["high"] = padded[2].nan_to_num(-math.inf, math.inf).amax(1)
    return {
        "x": [_rounded(series.x[min(i + step // 2, count - 1)]) for i in range(0, count, step)],
        "noisy": series.is_noisy,
        **{name: [_rounded(value) for value in level.tolist()] for name, level in levels.items()},
    }


def _rounded(value: float) -> float | None:
    """Return a number with as many digits as a screen can show, and no others, which would fill the page."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def _trained(run: RunRecords) -> dict[str, str]:
    return {words: number(run.trained[name]) for name, words in _TRAINED.items() if run.trained.get(name)}


def _layers(run: RunRecords) -> str:
    model = run.trained.get("model")
    return "\n".join(map(str, model)) if isinstance(model, list) else ""


def _classes(given: Predictions, owner: Sequence[str]) -> dict[str, Any]:
    """Return the confusion matrix as a table, with the share of each cell in its row, and the worst examples."""
    confusion = given.confusion()
    totals = confusion.sum(1).clamp(min=1)
    rows = [
        (given.name(i), [(count, round(100 * count / int(totals[i])), i == j) for j, count in enumerate(row)])
        for i, row in enumerate(confusion.tolist())
    ]
    right = int(confusion.diagonal().sum())
    return dict(
        title=": ".join(["Classes", *owner]),
        summary=f"{right:,} of {int(confusion.sum()):,} examples are classified correctly.",
        head=[name for name, _ in rows],
        rows=rows if len(rows) <= _MOST_CLASSES else [],
        worst=[(one, f"{one.probability:.0%}") for one in given.worst()],
    )


def _times(run: RunRecords) -> dict[str, str]:
    if not run.starts:
        return {}
    evaluating = sum(start.evaluation_seconds for start in run.starts)
    training, batches = run.seconds - evaluating, sum(start.batches for start in run.starts)
    found = {"training": describe_seconds(training), "evaluation": describe_seconds(evaluating)}
    found["batches trained on"] = f"{batches:,}"
    if training > 0 and batches:
        found["rate of training"] = f"{batches / training:,.4g} batches / s"
    if peaks := [record["memory/peak"] for record in run.records if "memory/peak" in record]:
        found["peak memory"] = f"{max(peaks) / 1e6:,.0f} MB"
    return found


def _start_row(start: Start) -> tuple[str, ...]:
    changes = (f"{name}: {_shown(old)} → {_shown(new)}" for name, (old, new) in start.changed.items())
    when, seconds = start.started[:16].replace("T", " "), describe_seconds(start.seconds)
    return when, f"{start.batch:,}", f"{start.until:,}", seconds, start.outcome, "; ".join(changes) or "nothing"


def _checkpoints(run: RunRecords) -> list[tuple[str, ...]]:
    return [
        (
            one.path.name,
            f"{one.epoch:,}",
            f"{one.batch:,}",
            f"{one.num_bytes / 1e6:,.2f} MB",
            ", ".join(f"{name} {number(value, name)}" for name, value in one.metrics.items()),
        )
        for one in run.checkpoints
    ]


def _shown(value: Any) -> str:
    """Return a value as text; lists without brackets."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def number(value: Any, name: str = "") -> str:
    """Return a number as text; for a list with one number per member of a population, the median and the range.

    Example:
        >>> number(0.98765, "eval/accuracy"), number(12345), number(1.5e-05), number([0.5, 0.25, 1.0])
        ('98.77%', '12,345', '1.5e-05', '0.5 (0.25 to 1)')
    """
    if isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
        finite = [one for one in value if math.isfinite(one)]
        if not finite:
            return "not finite"
        low, median, high = (number(fn(finite), name) for fn in (min, statistics.median, max))
        return f"{median} ({low} to {high})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _shown(value)
    if isinstance(value, int):
        return f"{value:,}"
    if "accuracy" in name and 0 <= value <= 1:
        return f"{value:.2%}"
    return f"{value:.4g}"


def _write_page(path: str | os.PathLike[str], content: dict[str, Any]) -> Path:
    """Write the page to a file, in one move, and return the path; all texts are escaped."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("purecompose.records", "."), PackageLoader("purecompose._support", ".")]),
        autoescape=lambda name: name is not None and not name.endswith(".css"),
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _marked(breakable)
    environment.globals["columns"] = _marked(columns)
    script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    checksum = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    content |= {"script": Markup(script), "checksum": checksum}  # the only script that a browser may run
    target = Path(path)
    write_text(target, environment.get_template("report.html.jinja").render(content))
    return target


def _marked(fn: Callable[..., str]) -> Callable[..., Markup]:
    """Return a function whose result is HTML and is not escaped again."""
    return lambda *args, **options: Markup(fn(*args, **options))


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
