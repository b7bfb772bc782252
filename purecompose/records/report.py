"""The report of a run: one self-contained HTML page.

This module collects the content; `report.html.jinja` and `page.css` define the appearance.
"""

import base64
import math
import os
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup

from purecompose._support.checks import check_flag
from purecompose._support.tables import breakable, columns, printable
from purecompose.observers.progress import describe_seconds
from purecompose.records.curves import evaluation_columns, picture
from purecompose.records.layout import FINISHED, RUNNING, RunRecords, Start, flat, read_run, write_text


Rows = list[tuple[str, ...]]

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


def write_report(
    run: RunRecords | str | os.PathLike[str], path: str | os.PathLike[str], *, curves: bool = True
) -> Path:
    """Write a page with the model, result, curves, plan, times, checkpoints, versions and the command of a run.

    The page is a single file without scripts or external resources, for light and dark screens and for paper. If the
    curves cannot be drawn, there is a warning and the page mentions it.

    Args:
        run: The folder of a run, or a result of `read_run`. The run may be unfinished.
        path: The file, usually `report.html`. It is written in one move.
        curves: True to draw the curves.

    Returns:
        The path.

    Raises:
        OSError: The file cannot be written.
        FileNotFoundError, NotADirectoryError, ValueError: The folder is not a run's; see `read_run`.

    Example::

        write_report("runs/first", "report.html")
    """
    run = run if isinstance(run, RunRecords) else read_run(run)
    words, tone = _state(run)
    own = {name: value for name, value in (run.result or {}).items() if name not in _KNOWN}
    content = dict(
        name=run.name,
        state={"words": words, "tone": tone},
        summary=_summary(run),
        facts=facts_of(run),
        results=[(name, number(value, name)) for name, value in own.items()],
        curves=_curves(run) if check_flag(curves, "write_report: curves") else _Curves("They were not drawn."),
        settings=[(name, _shown(value)) for name, value in flat(run.config).items()],
        trained=[(words, _counted(run.trained[name])) for name, words in _TRAINED.items() if run.trained.get(name)],
        layers="\n".join(map(str, run.trained["model"])) if isinstance(run.trained.get("model"), list) else "",
        plan=run.plan,
        times=_times(run),
        starts=[_start_row(start) for start in run.starts] if len(run.starts) > 1 else [],
        checkpoints=_checkpoints(run),
        versions=[(name, _shown(value)) for name, value in run.versions.items()],
        command=run.command,
    )
    return _write_page(path, content)


def _state(run: RunRecords) -> tuple[str, str]:
    """Return the status of the run, and its class in the style sheet."""
    if not run.starts:
        return "not started", "faint"
    outcome = run.starts[-1].outcome
    if outcome == RUNNING:
        return "running or killed", "faint"
    return (outcome, "good") if outcome == FINISHED else (outcome if outcome.startswith(FINISHED) else "stopped", "bad")


def _summary(run: RunRecords) -> str:
    """Return sentences about when the run started and how it ended."""
    if not run.starts:
        return "Not started."
    first, *later = run.starts
    text = f"Started {first.started[:10]} {first.started[11:16]} (UTC{first.started[19:].replace('+00:00', '')})"
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
    """Return the metrics of a run, the number of its batches and its wall-clock time.

    Evaluations come first, then the training loss, and other numbers.
    """
    metrics = (run.result or {}).get("metrics") or run.last_metrics
    evaluated = set(evaluation_columns(run.records))
    names = [name for name, value in metrics.items() if isinstance(value, int | float | list)]
    names.sort(key=lambda name: 0 if name in evaluated or name.startswith("eval/") else 1 if name == "loss" else 2)
    facts = [_fact(name, metrics[name]) for name in names]
    done = (run.result or {}).get("batches", max((start.until for start in run.starts), default=0))
    return [*facts, Fact("batches", number(done)), Fact("wall-clock time", describe_seconds(run.seconds))]


def _fact(name: str, value: Any) -> Fact:
    note = f"median and range of {len(value)}" if isinstance(value, list) else ""
    return Fact("loss of the last batch" if name == "loss" else name, number(value, name), note)


class _Curves(NamedTuple):
    """The curves as a data URL; without them, the reason."""

    words: str
    url: str = ""


def _curves(run: RunRecords) -> _Curves:
    if not run.records:
        return _Curves("There are no records yet.")
    try:
        return _Curves("", f"data:image/png;base64,{base64.b64encode(picture([run])).decode()}")
    except Exception as error:  # a page without pictures is better than none
        warnings.warn(f"the report of {run.path} has no curves: {error}", RuntimeWarning, stacklevel=3)
        return _Curves(f"They could not be drawn: {error}")


def _times(run: RunRecords) -> Rows:
    if not run.starts:
        return []
    evaluating = sum(start.evaluation_seconds for start in run.starts)
    training, batches = run.seconds - evaluating, sum(start.batches for start in run.starts)
    rows: Rows = [
        ("training", describe_seconds(training)),
        ("evaluation", describe_seconds(evaluating)),
        ("batches trained on", f"{batches:,}"),
    ]
    if training > 0 and batches:
        rows.append(("rate of training", f"{batches / training:,.4g} batches / s"))
    return rows


def _start_row(start: Start) -> tuple[str, ...]:
    changes = (f"{name}: {_shown(old)} → {_shown(new)}" for name, (old, new) in start.changed.items())
    when, seconds = start.started[:16].replace("T", " "), describe_seconds(start.seconds)
    return when, f"{start.batch:,}", f"{start.until:,}", seconds, start.outcome, "; ".join(changes) or "nothing"


def _checkpoints(run: RunRecords) -> Rows:
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


def _counted(value: Any) -> str:
    return number(value) if isinstance(value, int) else _shown(value)


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
    target = Path(path)
    write_text(target, environment.get_template("report.html.jinja").render(content))
    return target


def _marked(fn: Callable[..., str]) -> Callable[..., Markup]:
    """Return a function whose result is HTML and is not escaped again."""
    return lambda *args, **options: Markup(fn(*args, **options))


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
