"""The report of a run: one self-contained HTML page.

This module collects the content; `report.html.jinja`, `page.html.jinja` and `page.css` define the appearance.
"""

import base64
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup, escape

from purecompose._support.checks import check_flag
from purecompose._support.tables import breakable, columns, printable
from purecompose.records.drawing import picture
from purecompose.records.layout import flat, write_text
from purecompose.records.panels import SMOOTHED_FROM, Series, evaluation_columns, listed, panels_of, series_of, spread
from purecompose.records.reading import FINISHED, RUNNING, RunRecords, Start, read_run


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
    drawn = _curves(run) if check_flag(curves, "write_report: curves") else _Curves("They were not drawn.")
    words, tone = _state(run)
    tiles, results = _result(run)
    content = dict(
        name=run.name,
        state={"words": words, "tone": tone},
        summary=_summary(run),
        tiles=tiles,
        results=results,
        curves=drawn,
        settings=[(name, _shown(value)) for name, value in flat(run.config).items()],
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
    return write_page(path, "report.html.jinja", content)


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


class _Curves(NamedTuple):
    """The curves as data URLs, for light and dark screens, with their caption; without them, the reason."""

    words: str
    light: str = ""
    dark: str = ""


def _curves(run: RunRecords) -> _Curves:
    if not run.records:
        return _Curves("There are no records yet.")
    try:
        panels = panels_of([run], "batch")
        drawn = [base64.b64encode(picture([run], panels, dark=dark)).decode() for dark in (False, True)]
        return _Curves(_caption(run), *(f"data:image/png;base64,{one}" for one in drawn))
    except Exception as error:  # a page without pictures is better than none
        warnings.warn(f"the report of {run.path} has no curves: {error}", RuntimeWarning, stacklevel=3)
        return _Curves(f"They could not be drawn: {error}")


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


def in_words(starts: Sequence[Start]) -> str:
    """Return a sentence about when a run started and where it continued.

    Example:
        >>> in_words([Start(0, "2026-05-01T10:00:00+00:00"), Start(40, "2026-05-01T11:00:00+00:00")])
        'Started 2026-05-01 10:00 (UTC), continued at batch 40.'
    """
    if not starts:
        return "Not started."
    # A start at batch 0 is a new beginning: nothing of the earlier starts remains.
    first = max(i for i, start in enumerate(starts) if start.batch == 0 or i == 0)
    later = starts[first + 1 :]
    text = f"Started {_moment(starts[first].started)}"
    if starts[first].batch:
        text += f" at batch {starts[first].batch:,}"
    if not later:
        return f"{text}."
    places = [f"{start.batch:,}" for start in later]
    reported = places[0] if len(places) == 1 else f"{', '.join(places[:-1])} and {places[-1]}"
    times = f" ({len(places)} times)" if len(places) > 1 else ""
    return f"{text}, continued at batch {reported}{times}."


def _moment(iso: str) -> str:
    return f"{iso[:10]} {iso[11:16]} (UTC{iso[19:].replace('+00:00', '')})"


class Fact(NamedTuple):
    """A number with its name."""

    name: str
    value: str
    note: str = ""
    """The batch or batches it was measured on; for a population, also a note that it is the median, and the range."""


def facts_of(run: RunRecords) -> list[Fact]:
    """Return the metrics of a run, the number of its batches and its wall-clock time.

    Evaluations come first, then the training loss, the metrics of training and other numbers.
    """
    metrics = (run.result or {}).get("metrics") or run.last_metrics
    evaluated = dict.fromkeys(evaluation_columns(run.records))
    names = [name for name, value in metrics.items() if isinstance(value, int | float | list)]
    names.sort(key=lambda name: _rank(name, name in evaluated))
    facts = [_fact(run, name, metrics[name]) for name in names]
    done = (run.result or {}).get("batches", max((start.until for start in run.starts), default=0))
    return [*facts, Fact("batches", number(done)), Fact("wall-clock time", duration(run.seconds))]


def _rank(name: str, is_evaluated: bool) -> int:
    if is_evaluated or name.startswith("eval/"):
        return 0
    return 1 if name == "loss" else 2 if name.startswith("train/") else 3


def _fact(run: RunRecords, name: str, value: Any) -> Fact:
    newest, when = next((record for record in reversed(run.records) if name in record), {}), ""
    if name == "loss" and newest:
        series = series_of(run, 0, name, "batch")
        value, when = series.last, _over(series)
    elif name == "loss":
        when = "of the last batch"
    elif newest.get(name) == value:  # false if the result was given another value
        when = f"at batch {newest['batch']:,}"
    shown = "training loss" if name == "loss" else name
    if not isinstance(value, list):
        return Fact(shown, number(value, name), when)
    finite = [one for one in value if isinstance(one, int | float) and math.isfinite(one)]
    if not finite:
        return Fact(shown, number(value, name), when)
    low, median, high = (number(side[0], name) for side in spread([finite]))
    of = f"{len(value)}" if len(finite) == len(value) else f"{len(finite)} finite of {len(value)}"
    return Fact(shown, median, "; ".join(filter(None, (f"median of {of}", f"{low} to {high}", when))))


def _over(series: Series) -> str:
    """Return a text about the batches that a loss is averaged over."""
    if series.tail == 1:
        return "of the last batch"
    newest = series.x[-series.tail :]
    kind = "batches" if newest[-1] - newest[0] == series.tail - 1 else "recorded batches"
    bad = sum(not math.isfinite(one) for y in series.y[-series.tail :] for one in listed(y))
    return f"mean of the last {series.tail} {kind}" + (f", {bad:,} not finite" if bad else "")


def number(value: Any, name: str = "") -> str:
    """Return a number as text; for a list with one number per member of a population, the median and the range.

    Example:
        >>> number(0.98765, "eval/accuracy"), number(12345), number(1.5e-05), number([0.5, 0.25, 1.0])
        ('98.77%', '12,345', '1.5e-05', '0.5 (0.25 to 1)')
    """
    if isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
        low, median, high = (side[0] for side in spread([value]))
        if math.isnan(median):
            return "not finite"
        return f"{number(median, name)} ({number(low, name)} to {number(high, name)})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if "accuracy" in name and 0 <= value <= 1:
        return f"{value:.2%}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time in seconds as text.

    Example:
        >>> duration(0.25), duration(75), duration(7500)
        ('0.25 s', '1 min 15 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


_HERE, _SHARED = "purecompose.records", "purecompose._support"


def write_page(path: str | os.PathLike[str], template: str, values: Mapping[str, Any], *, package: str = _HERE) -> Path:
    """Write a page to a file, in one move, and return the path; all texts are escaped.

    Args:
        path: The file.
        template: Name of the template.
        values: What it shows.
        package: The package with the template; the frame and the parts are those of this one.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader(_HERE, "."), PackageLoader(_SHARED, ".")]),
        autoescape=lambda name: name is not None and not name.endswith(".css"),
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _marked(breakable), "unbroken_options": _unbroken_options}
    environment.globals["columns"] = _marked(columns)
    target = Path(path)
    write_text(target, environment.get_template(template).render(values))
    return target


def _marked(fn: Callable[..., str]) -> Callable[..., Markup]:
    """Return a function whose result is HTML and is not escaped again."""
    return lambda *args, **options: Markup(fn(*args, **options))


def _unbroken_options(command: str) -> Markup:
    """Return a command without line breaks inside its options."""
    option = r"(?<!\S)--?[\w-]{1,30}(?!\S)"
    return Markup(re.sub(option, r'<span class="whole">\g<0></span>', str(escape(_printable(command)))))


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
