"""The report of a run: one page that holds everything, and needs nothing else."""

import base64
import os
import warnings
from pathlib import Path
from typing import Any

from purecompose._support.checks import check_flag
from purecompose.records.curves import curves_as_png
from purecompose.records.drawing import SMOOTHED_FROM
from purecompose.records.layout import write_text
from purecompose.records.page import (
    Markup,
    Pictures,
    duration,
    escaped,
    figure,
    number,
    page,
    preformatted,
    section,
    table,
    tiles,
)
from purecompose.records.reading import RunRecords, read_run
from purecompose.records.starts import RUNNING, Start, in_words
from purecompose.records.summary import facts_of


__all__ = ["write_report"]

_MOST_TILES = 8


def write_report(
    run: RunRecords | str | os.PathLike[str], path: str | os.PathLike[str], *, curves: bool = True
) -> Path:
    """Writes a page with what was trained, the result, curves, plan, times, checkpoints, versions and the command.

    The page is a single file: no scripts, nothing fetched from elsewhere, for light and dark screens and for paper.
    Curves that cannot be drawn bring a warning, and the page says so.

    Args:
        run: The folder of a run, or what `read_run` gives; a half-finished one, too.
        path: The file, usually `report.html`; it appears when it is whole.
        curves: Whether to draw them.

    Returns:
        The path.

    Raises:
        OSError: It cannot be written.
        FileNotFoundError, NotADirectoryError, ValueError: No folder of a run; see `read_run`.
    """
    run = run if isinstance(run, RunRecords) else read_run(run)
    pictures = _curves(run) if check_flag(curves, "write_report: curves") else _missing("They were not drawn.")
    parts = [_header(run), _result(run), section("Curves", pictures), _settings(run), _trained(run), _plan(run)]
    parts += [_times(run), _checkpoints(run), _versions(run), _command(run)]
    target = Path(path)
    write_text(target, page(run.name, [part for part in parts if part]))
    return target


def _header(run: RunRecords) -> Markup:
    words, tone = _state(run)
    title = escaped(run.name)
    return Markup(
        f'<header>\n<h1>{title}<span class="state {tone}">{escaped(words)}</span></h1>\n'
        f'<p class="faint">{escaped(_summary(run))}</p>\n</header>'
    )


def _state(run: RunRecords) -> tuple[str, str]:
    """How the run stands, and the class of its words."""
    if not run.starts:
        return "not started", "faint"
    outcome = run.starts[-1].outcome
    if outcome == RUNNING:
        return "running or killed", "faint"
    return (outcome, "good") if outcome == "finished" else ("stopped", "bad")


def _summary(run: RunRecords) -> str:
    text = in_words(run.starts)
    if run.seconds:
        text += f" {duration(run.seconds)} in all"
        text += f" on {run.versions['device']}." if "device" in run.versions else "."
    outcome = run.starts[-1].outcome if run.starts else "finished"
    return text if outcome in ("finished", RUNNING) else f"{text} It was stopped by {outcome}"


def _result(run: RunRecords) -> Markup:
    facts = facts_of(run)
    # The last two tell how far the run came.
    shown, rest = [*facts[:-2][:_MOST_TILES], *facts[-2:]], facts[:-2][_MOST_TILES:]
    rows = [(one.name, "; ".join(filter(None, (one.value, one.note)))) for one in rest]
    own = {name: value for name, value in (run.result or {}).items() if name not in _KNOWN}
    rows += [(name, _shown(value, name)) for name, value in own.items()]
    return section("Result", tiles(shown), *([table(rows)] if rows else []))


_KNOWN = ("metrics", "batches", "epochs", "samples", "tokens", "seconds", "evaluation_seconds")


def _curves(run: RunRecords) -> Markup:
    if not run.records:
        return _missing("There are no records yet.")
    try:
        kinds = [(is_narrow, is_dark) for is_narrow in (False, True) for is_dark in (False, True)]
        pictures = Pictures(*(_data_url(curves_as_png(run, narrow=narrow, dark=dark)) for narrow, dark in kinds))
    except Exception as error:  # a page without pictures is better than none
        warnings.warn(f"the report of {run.path} has no curves: {error}", RuntimeWarning, stacklevel=3)
        return _missing(f"They could not be drawn: {error}")
    return figure(pictures, f"Curves of {run.name}: loss, metrics, learning rate and throughput", _caption(run))


def _caption(run: RunRecords) -> str:
    """What is to be known of the curves."""
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
        words.append("Dotted: where the run went on.")
    return " ".join(words)


def _data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _settings(run: RunRecords) -> Markup:
    rows: list[tuple[str, str]] = []
    for name, value in run.config.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{inner}", _shown(one)) for inner, one in value.items()]
        else:
            rows.append((name, _shown(value)))
    return section("Settings", table(rows) if rows else _missing("None were given."))


def _trained(run: RunRecords) -> Markup:
    told = run.trained
    facts = [(words, _counted(told[name])) for name, words in _TRAINED.items() if told.get(name)]
    parts = [table(facts)] if facts else []
    if isinstance(told.get("model"), list):
        parts.append(preformatted("\n".join(map(str, told["model"]))))
    return section("What was trained", *parts) if parts else Markup("")


_TRAINED = {
    "algorithms": "algorithms",
    "optimizer": "optimizer",
    "loss": "loss",
    "duration": "duration",
    "weights": "weights",
    "members": "members of the population",
}


def _plan(run: RunRecords) -> Markup:
    return section("Plan", preformatted(run.plan) if run.plan else _missing("It was not written down."))


def _times(run: RunRecords) -> Markup:
    if not run.starts:
        return section("Times", _missing("The run has not started."))
    evaluating = sum(start.evaluation_seconds for start in run.starts)
    training, batches = run.seconds - evaluating, sum(start.batches for start in run.starts)
    rows = [
        ("in all", duration(run.seconds)),
        ("training", duration(training)),
        ("evaluation", f"{duration(evaluating)}{f' ({evaluating / run.seconds:.0%})' if run.seconds else ''}"),
        ("batches trained on", f"{batches:,}"),
    ]
    if training > 0 and batches:
        rows.append(("rate of training", f"{batches / training:,.4g} batches / s"))
    parts = [table(rows)]
    if len(run.starts) > 1:
        lines = [_start_row(start) for start in run.starts]
        parts.append(table(lines, ["started", "from batch", "to", "time", "end", "what had changed"]))
    return section("Times", *parts)


def _start_row(start: Start) -> tuple[str, ...]:
    changes = (f"{name}: {_shown(old)} → {_shown(new)}" for name, (old, new) in start.changed.items())
    told = duration(start.seconds)
    when = start.started[:16].replace("T", " ")
    return when, f"{start.batch:,}", f"{start.until:,}", told, start.outcome, "; ".join(changes) or "nothing"


def _checkpoints(run: RunRecords) -> Markup:
    if not run.checkpoints:
        return section("Checkpoints", _missing("There are none."))
    rows = [
        (
            one.path.name,
            f"{one.epoch:,}",
            f"{one.batch:,}",
            f"{one.num_bytes / 1e6:,.2f} MB",
            ", ".join(f"{name} {number(value, name)}" for name, value in one.metrics.items()),
        )
        for one in run.checkpoints
    ]
    is_population = any(isinstance(value, list) for one in run.checkpoints for value in one.metrics.values())
    last = "last evaluation: median (range)" if is_population else "last evaluation"
    return section("Checkpoints", table(rows, ["folder", "epoch", "batch", "size", last]))


def _versions(run: RunRecords) -> Markup:
    rows = [(name, _shown(value)) for name, value in run.versions.items()]
    return section("Versions", table(rows) if rows else _missing("They were not written down."))


def _command(run: RunRecords) -> Markup:
    if run.command is None:
        return Markup("")
    return section("Command", preformatted(run.command, is_wrapped=True))


def _missing(words: str) -> Markup:
    return Markup(f'<p class="faint">{escaped(words)}</p>')


def _counted(value: Any) -> str:
    return number(value) if isinstance(value, int) else _shown(value)


def _shown(value: Any, name: str = "") -> str:
    """A value as it was given; lists without brackets, numbers of a population's members in short."""
    if isinstance(value, list):
        is_population = bool(name) and all(isinstance(one, int | float) for one in value)
        return number(value, name) if is_population else ", ".join(map(str, value))
    return str(value)
