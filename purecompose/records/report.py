"""The report of a run: one self-contained HTML page.

This module collects the content; `report.html.jinja`, `page.html.jinja` and `page.css` define the appearance.
"""

import base64
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from purecompose._support.checks import check_flag
from purecompose.records.curves import curves_as_png
from purecompose.records.pages import write_page
from purecompose.records.panels import SMOOTHED_FROM, panels_of
from purecompose.records.reading import RunRecords, read_run
from purecompose.records.starts import FINISHED, RUNNING, Start, in_words
from purecompose.records.summary import facts_of
from purecompose.records.words import duration, number


Rows = list[tuple[str, ...]]

_MOST_TILES = 8


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
    drawn = _curves(run) if check_flag(curves, "write_report: curves") else _Curves(None, "They were not drawn.")
    return write_page(path, "report.html.jinja", _content(run, drawn))


def _content(run: RunRecords, curves: "_Curves") -> dict[str, Any]:
    """Return what the page of a run shows."""
    words, tone = _state(run)
    tiles, results = _result(run)
    return dict(
        name=run.name,
        state={"words": words, "tone": tone},
        summary=_summary(run),
        tiles=tiles,
        results=results,
        curves=curves,
        settings=[*_settings(run)],
        trained=[(words, _counted(run.trained[name])) for name, words in _TRAINED.items() if run.trained.get(name)],
        layers="\n".join(map(str, run.trained["model"])) if isinstance(run.trained.get("model"), list) else "",
        plan=run.plan,
        times=_times(run),
        starts=[_start_row(start) for start in run.starts] if len(run.starts) > 1 else [],
        checkpoints=_checkpoints(run),
        is_population=any(isinstance(value, list) for one in run.checkpoints for value in one.metrics.values()),
        versions=[(name, _shown(value)) for name, value in run.versions.items()],
        command=run.command,
    )


def _state(run: RunRecords) -> tuple[str, str]:
    """Return the status of the run, and its class in the style sheet."""
    if not run.starts:
        return "not started", "faint"
    outcome = run.starts[-1].outcome
    if outcome == RUNNING:
        return "running or killed", "faint"
    return (outcome, "good") if outcome == FINISHED else (outcome if outcome.startswith(FINISHED) else "stopped", "bad")


def _summary(run: RunRecords) -> str:
    text = in_words(run.starts)
    if run.seconds:
        text += f" {duration(run.seconds)} in all"
        text += f" on {run.versions['device']}." if "device" in run.versions else "."
    outcome = run.starts[-1].outcome if run.starts else FINISHED
    if outcome in (FINISHED, RUNNING):
        return text
    return f"{text} It {outcome}." if outcome.startswith(FINISHED) else f"{text} It was stopped by {outcome}"


def _result(run: RunRecords) -> tuple[list[Any], Rows]:
    """Return the facts that are shown as tiles, and the rows below them."""
    facts = facts_of(run)
    # The last two facts are the batches and the wall-clock time.
    tiles, rest = [*facts[:-2][:_MOST_TILES], *facts[-2:]], facts[:-2][_MOST_TILES:]
    rows: Rows = [(one.name, "; ".join(filter(None, (one.value, one.note)))) for one in rest]
    own = {name: value for name, value in (run.result or {}).items() if name not in _KNOWN}
    return tiles, [*rows, *((name, _shown(value, name)) for name, value in own.items())]


_KNOWN = ("metrics", "batches", "epochs", "samples", "tokens", "seconds", "evaluation_seconds")


class _Pictures(NamedTuple):
    """One picture as data URLs, for wide and narrow, light and dark screens."""

    light: str
    dark: str
    narrow_light: str
    narrow_dark: str


class _Curves(NamedTuple):
    """The curves with their caption; without pictures, the words give the reason."""

    pictures: _Pictures | None
    words: str


def _curves(run: RunRecords) -> _Curves:
    if not run.records:
        return _Curves(None, "There are no records yet.")
    try:
        kinds = [(is_narrow, is_dark) for is_narrow in (False, True) for is_dark in (False, True)]
        panels = panels_of([run], "batch")
        drawn = (curves_as_png(run, narrow=narrow, dark=dark, panels=panels) for narrow, dark in kinds)
        pictures = _Pictures(*map(_data_url, drawn))
    except Exception as error:  # a page without pictures is better than none
        warnings.warn(f"the report of {run.path} has no curves: {error}", RuntimeWarning, stacklevel=3)
        return _Curves(None, f"They could not be drawn: {error}")
    return _Curves(pictures, _caption(run))


def _caption(run: RunRecords) -> str:
    """Return the caption of the curves."""
    words = []
    is_smoothed = sum("loss" in record for record in run.records) >= SMOOTHED_FROM
    if any(isinstance(value, list) for record in run.records for value in record.values()):
        band = "Median of the population's members, in a band from the lowest to the highest"
        words.append(f"{band}, smoothed over about a thirtieth of the run." if is_smoothed else f"{band}.")
        if any("speed/samples" in record for record in run.records):
            words.append("The throughput counts a sample once for each member that trains on it.")
    elif is_smoothed:
        words.append("Faint: single batches; bold: means over about a thirtieth of the run.")
    if len(run.starts) > 1:
        words.append("Dotted: where the run continued.")
    return " ".join(words)


def _data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _settings(run: RunRecords) -> Iterator[tuple[str, str]]:
    for name, value in run.config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", _shown(one)) for inner, one in value.items())
        else:
            yield name, _shown(value)


_TRAINED = {
    "algorithms": "algorithms",
    "optimizer": "optimizer",
    "loss": "loss",
    "duration": "duration",
    "weights": "weights",
    "members": "members of the population",
}


def _times(run: RunRecords) -> Rows:
    if not run.starts:
        return []
    evaluating = sum(start.evaluation_seconds for start in run.starts)
    training, batches = run.seconds - evaluating, sum(start.batches for start in run.starts)
    rows: Rows = [
        ("in all", duration(run.seconds)),
        ("training", duration(training)),
        ("evaluation", f"{duration(evaluating)}{f' ({evaluating / run.seconds:.0%})' if run.seconds else ''}"),
        ("batches trained on", f"{batches:,}"),
    ]
    if training > 0 and batches:
        rows.append(("rate of training", f"{batches / training:,.4g} batches / s"))
    return rows


def _start_row(start: Start) -> tuple[str, ...]:
    changes = (f"{name}: {_shown(old)} → {_shown(new)}" for name, (old, new) in start.changed.items())
    when, seconds = start.started[:16].replace("T", " "), duration(start.seconds)
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


def _shown(value: Any, name: str = "") -> str:
    """Return a value as text; lists without brackets, the numbers of a population as median and range."""
    if isinstance(value, list):
        is_population = bool(name) and all(isinstance(one, int | float) for one in value)
        return number(value, name) if is_population else ", ".join(map(str, value))
    return str(value)
