"""The panels to draw for runs, with the series in each."""

import bisect
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from purecompose.records.reading import RunRecords


SMOOTHED_FROM = 80
"""Number of points from which on noisy lines are smoothed."""
MOST_POINTS = 3000
"""Maximal number of points of a line that is drawn: more than there are pixels would only cost time."""

_NO_EVALUATION = ("lr", "loss", "speed/", "memory/", "time/seconds")


@dataclass(frozen=True)
class Series:
    """A column of a run's records. The values of a population are lists, with a number for each member."""

    run: int
    """Index of the run, from 0."""
    column: str
    x: list[float]
    y: list[Any]
    tail: int = 1
    """Number of newest values that `last` averages; more than one for losses, because those of single batches vary."""

    @property
    def members(self) -> int:
        """Number of members of the population; 0 for a single run."""
        return max((len(value) for value in self.y if isinstance(value, list)), default=0)

    @cached_property
    def spread(self) -> "Spread":
        """Lowest, median and highest value of each point."""
        return spread(self.y)

    @property
    def last(self) -> Any:
        """The mean of the finite ones among the newest values, or a list with one for each member. Needs a value."""
        means = [_mean(one) for one in zip(*map(listed, self.y[-self.tail :]), strict=False)]
        return means if self.members else means[0]


@dataclass(frozen=True)
class Panel:
    """The series that share a pair of axes."""

    title: str
    kind: str
    """"loss", "metric", "lr" or "speed"."""
    unit: str
    """Unit of the values."""
    series: tuple[Series, ...]

    @cached_property
    def lines(self) -> "list[Line]":
        """What is drawn of each series; the same in pictures of all colors."""
        return [_line(one, self.kind in ("loss", "speed") or one.column.startswith("train/")) for one in self.series]

    @cached_property
    def not_finite(self) -> list[float]:
        """The places of numbers that are not finite."""
        pairs = (pair for one in self.series for pair in zip(one.x, one.y, strict=True))
        return [at for at, y in pairs if not all(map(math.isfinite, listed(y)))]

    @cached_property
    def is_share(self) -> bool:
        """True if the numbers are shown in percent."""
        values = (one for series in self.series for y in series.y for one in listed(y))
        return "accuracy" in self.title and all(0 <= one <= 1 for one in values if math.isfinite(one))


class Line(NamedTuple):
    """What is drawn of a series."""

    x: list[float]
    y: list[float]
    band: tuple[list[float], list[float]] | None = None
    """The lowest and highest numbers of a population."""
    faint: tuple[list[float], list[float]] | None = None
    """The original numbers of a line that is smoothed."""


def _line(series: Series, is_noisy: bool) -> Line:
    low, median, high = series.spread
    window = max(len(series.x) // 30, 7) if is_noisy and len(series.x) >= SMOOTHED_FROM else 1
    if window == 1 and not series.members:
        return Line(*_thinned(series.x, median))
    stride = max(len(series.x) // (MOST_POINTS // 2), 1)
    x, single, mean = series.x[::stride], median[::stride], smooth(median, window, stride)
    if series.members:
        return Line(x, mean, (smooth(low, window, stride), smooth(high, window, stride)))
    # The smoothed line has a gap, too, wherever a number is not finite, however wide the window.
    shown = [value if math.isfinite(one) else math.nan for value, one in zip(mean, single, strict=True)]
    return Line(x, shown, None, _thinned(series.x, median))


def panels_of(runs: Sequence[RunRecords], x: str) -> list[Panel]:
    """Return the panels for which some run has numbers, with the column `x` along the horizontal axis.

    Raises:
        ValueError: There are no records, or none has this column.
    """
    columns = [*dict.fromkeys(name for run in runs for record in run.records for name in record)]
    if not columns:
        raise ValueError("draw_curves: the runs have no records yet")
    known = [name for name in columns if name in ("batch", "epoch") or name.startswith("time/")]
    if x not in known:
        raise ValueError(f"draw_curves: x={x!r}: expected one of {', '.join(known)}, which the records have")
    evaluated = list(dict.fromkeys(name for run in runs for name in evaluation_columns(run.records)))
    trained = [name for name in columns if name.startswith("train/") and name not in evaluated]
    rates = [name for name in ("speed/samples", "speed/batches") if name in columns]
    # The rates of parameter groups are drawn for a single run only; with several there would be too many lines.
    lrs = [name for name in columns if name == "lr" or (len(runs) == 1 and name.startswith("lr/"))]
    wanted = [("training loss", "loss", "", ["loss"])]
    wanted += [(name, "metric", "", [name]) for name in (*evaluated, *trained)]
    wanted += [("learning rate", "lr", "", lrs)]
    wanted += [("throughput", "speed", f"{name.removeprefix('speed/')} / s", [name]) for name in rates[:1]]
    panels = []
    for title, kind, unit, names in wanted:
        series = [series_of(run, i, column, x) for column in names for i, run in enumerate(runs)]
        if drawn := tuple(one for one in series if one.y):
            panels.append(Panel(title, kind, unit, drawn))
    return panels


def series_of(run: RunRecords, index: int, column: str, x: str) -> Series:
    """Return a column of a run. A record without x, as of an evaluation, has the x of the record before it."""
    xs, ys, at = [], [], math.nan
    fraction = _fractions(run.records) if x == "epoch" else None
    for record in run.records:
        at = fraction(record["batch"]) if fraction is not None else record.get(x, at)
        if column in record and isinstance(at, int | float) and not math.isnan(at):
            xs.append(float(at))
            ys.append(record[column])
    return Series(index, column, xs, ys, _tail(run.records) if column == "loss" else 1)


def _tail(records: Sequence[dict[str, Any]]) -> int:
    """Return the number of newest losses to average: those of an epoch, but at most a quarter of the run's.

    Without the limit, the mean of a run of one epoch would include its first losses.
    """
    epochs = [record["epoch"] for record in records if "loss" in record]
    # The record of an epoch's last batch already counts that epoch.
    ends = [i for i in range(len(epochs)) if epochs[i] > (epochs[i - 1] if i else 0)]
    epoch = ends[-1] - (ends[-2] if len(ends) > 1 else -1) if ends else len(epochs)
    return max(min(epoch, len(epochs) // 4), 1)


class Spread(NamedTuple):
    """Lowest, median and highest of a population's finite numbers; NaN if there are none."""

    low: list[float]
    median: list[float]
    high: list[float]


def spread(values: Iterable[Any]) -> Spread:
    """Return the spread at each point; for a single number, all three are that number.

    Example:
        >>> spread([[3.0, 1.0, 2.0, float("nan")], 5.0])
        Spread(low=[1.0, 5.0], median=[2.0, 5.0], high=[3.0, 5.0])
    """
    points = [[float(one) for one in listed(value) if math.isfinite(one)] or [math.nan] for value in values]
    return Spread(*([fn(point) for point in points] for fn in (min, statistics.median, max)))


def smooth(values: Sequence[float], window: int, stride: int = 1) -> list[float]:
    """Return the means of the finite numbers in a window around each point, or around each `stride` of them.

    At the ends the window is shorter. The mean is NaN if the window has no finite number.

    Example:
        >>> smooth([0.0, 3.0, 6.0, float("nan")], 3)
        [1.5, 3.0, 4.5, 6.0]
    """
    if stride > 1:  # of the means of so many numbers, so that the effort does not grow with the window
        values, window = [_mean(values[i : i + stride]) for i in range(0, len(values), stride)], window // stride
    half = window // 2
    # Not computed from running sums, in which one huge number would absorb all later ones.
    return [_mean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite numbers; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most `MOST_POINTS` points of a line that look the same: of each piece the lowest and highest number.

    A piece with a number that is not finite keeps one, which leaves a gap.
    """
    size, kept = math.ceil(len(x) / (MOST_POINTS // 3)) if len(x) > MOST_POINTS else 1, set[int]()
    for start in range(0, len(x), size):
        piece = sorted(range(start, min(start + size, len(x))), key=lambda i: (math.isfinite(y[i]), y[i]))
        finite = [i for i in piece if math.isfinite(y[i])]
        kept.update([*piece[: len(piece) > len(finite)], *finite[:1], *finite[-1:]])
    return [x[i] for i in sorted(kept)], [y[i] for i in sorted(kept)]


def evaluation_columns(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the names of evaluation metrics, which are in records without values of batches; names may repeat."""
    for record in records:
        if not any(name.startswith(_NO_EVALUATION) for name in record):
            yield from (name for name in record if "/" in name and not name.startswith("time/"))


def _fractions(records: Iterable[dict[str, Any]]) -> Callable[[float], float]:
    """Return a function from a batch to the fractional epoch.

    Records count whole epochs, so all batches of an epoch would be drawn at one point. An epoch ends where the count
    increases, and its batches are evenly distributed over it.
    """
    batches, epochs = [0.0], [0.0]
    for record in records:
        if record["epoch"] > epochs[-1]:
            batches.append(record["batch"])
            epochs.append(record["epoch"])

    def at(batch: float) -> float:
        i = min(bisect.bisect_left(batches, batch), len(batches) - 1)
        if i == 0:
            return epochs[0]
        per_batch = (epochs[i] - epochs[i - 1]) / (batches[i] - batches[i - 1])
        return epochs[i] + (batch - batches[i]) * per_batch

    return at


def listed(value: Any) -> list[Any]:
    """Return the numbers of a population's members, or a list of one number."""
    return value if isinstance(value, list) else [value]
