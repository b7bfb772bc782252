"""The results of a run as named numbers."""

import math
from typing import Any, NamedTuple

from purecompose.records.panels import Series, evaluation_columns, series_of, spread
from purecompose.records.reading import RunRecords
from purecompose.records.words import duration, number


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
    values = [one for y in series.y[-series.tail :] for one in (y if isinstance(y, list) else [y])]
    bad = sum(not math.isfinite(one) for one in values)
    return f"mean of the last {series.tail} {kind}" + (f", {bad:,} not finite" if bad else "")
