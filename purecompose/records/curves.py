"""The curves of runs: which numbers have panels, and the picture, by matplotlib without its global state."""

import io
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose._support.checks import shown
from purecompose.records.layout import RunRecords, read_run
from purecompose.run.saving.folder import written


_FORMATS = (".png", ".svg", ".pdf")
_TEXT, _FAINT, _GRID, _ALARM = "#1f2328", "#656d76", "#e6e8eb", "#c0392b"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2328")
"""Those of Okabe and Ito (2008), which people with any colour vision can distinguish."""
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
_WIDTH, _ROW, _DPI = 10.0, 2.75, 160
_FEW = 40
"""Maximal number of points at which each one is marked by a dot."""
_SMOOTHED_FROM = 80
"""Number of points from which on noisy lines are smoothed."""
_AXES = {"time/sample": "samples", "time/token": "tokens", "time/seconds": "wall-clock time (s)"}
_NO_EVALUATION = ("lr", "loss", "speed/", "memory/", "time/seconds")


def draw_curves(
    runs: RunRecords | str | os.PathLike[str] | Sequence[RunRecords | str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    x: str = "batch",
) -> Path:
    """Draw the curves of one run, or compare several runs.

    There are panels for the training loss, metrics, the learning rate and the throughput, as far as such numbers exist.
    With many batches, a mean over a thirtieth of them is drawn over the faint original numbers. A population is drawn
    as the median member in a band from the lowest to the highest. Numbers that are not finite leave gaps.

    Args:
        runs: One or several runs: their folders, or results of `read_run`.
        path: The picture, `*.png`, `*.svg` or `*.pdf`. The file appears only when it is complete.
        x: The column along the horizontal axis: "batch", "time/sample", "time/token", or "time/seconds" for wall-clock
            time.

    Returns:
        The path.

    Raises:
        ValueError: The suffix is unknown, there is no run, or the runs have no records or no such column.
        ImportError: Matplotlib is not installed.
        FileNotFoundError, NotADirectoryError: There is no such run folder; see `read_run`.

    Example::

        draw_curves(["runs/first", "runs/second"], "curves.png")
    """
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise ValueError(f"draw_curves: expected a file name that ends in {', '.join(_FORMATS)}, got {str(path)!r}")
    content = picture(_as_runs(runs), x, target.suffix.lower()[1:])
    with written(target) as new:
        new.write_bytes(content)
    return target


def picture(runs: Sequence[RunRecords], x: str = "batch", kind: str = "png") -> bytes:
    """Return a picture of the curves of runs, as the bytes of a file.

    Raises:
        ImportError: Matplotlib is not installed.
        ValueError: The runs have no records, or no column `x`.
    """
    buffer = io.BytesIO()
    figure = figure_of(runs, panels_of(runs, x), x)
    with warnings.catch_warnings():
        # Matplotlib warns of characters in a run's name that the font lacks.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(buffer, format=kind, dpi=_DPI)
    return buffer.getvalue()


def _as_runs(given: object) -> list[RunRecords]:
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not several:
        raise ValueError("draw_curves: expected at least one run, got none")
    runs = []
    for one in several:
        if not isinstance(one, (RunRecords, str, os.PathLike)):
            raise TypeError(f"draw_curves: expected the folder of a run, or the result of read_run, got {shown(one)}")
        runs.append(one if isinstance(one, RunRecords) else read_run(one))
    return runs


class Series:
    """A column of a run's records.

    Args:
        run: Index of the run, from 0.
        column: Name of the column.
        x: Place of each point along the horizontal axis.
        y: The numbers; those of a population are lists, with one for each member.
    """

    def __init__(self, run: int, column: str, x: Sequence[float], y: Sequence[Any]) -> None:
        self.run, self.column, self.x = run, column, x
        rows = [listed(value) for value in y]
        self.num_members = max(map(len, rows), default=0)
        padded = [[*row, *[math.nan] * (self.num_members - len(row))] for row in rows]
        self.y = torch.tensor(padded, dtype=torch.float64).reshape(len(rows), self.num_members)

    @cached_property
    def spread(self) -> Tensor:
        """Lowest, median and highest finite number of each point, (3, points); NaN if there is none."""
        finite = torch.where(self.y.isfinite(), self.y, math.nan)
        levels = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
        # In pieces, because torch bounds the size of what it sorts.
        return torch.cat([torch.nanquantile(part, levels, dim=1) for part in finite.split(10_000)], dim=1)

    @cached_property
    def not_finite(self) -> list[float]:
        """The places of numbers that are not finite."""
        is_bad = ~self.y.isfinite().all(1)
        return [at for at, bad in zip(self.x, is_bad.tolist(), strict=True) if bad]


class Panel(NamedTuple):
    """The series that share a pair of axes."""

    title: str
    kind: str
    """"loss", "metric", "lr" or "speed"."""
    series: tuple[Series, ...]

    @property
    def is_share(self) -> bool:
        """True if the numbers are shown in percent."""
        shares = (bool(((one.y >= 0) & (one.y <= 1) | ~one.y.isfinite()).all()) for one in self.series)
        return "accuracy" in self.title and all(shares)


def panels_of(runs: Sequence[RunRecords], x: str) -> list[Panel]:
    """Return the panels for which some run has numbers, with the column `x` along the horizontal axis.

    Raises:
        ValueError: There are no records, or none has this column.
    """
    columns = [*dict.fromkeys(name for run in runs for record in run.records for name in record)]
    if not columns:
        raise ValueError("draw_curves: the runs have no records yet")
    known = [name for name in columns if name == "batch" or name.startswith("time/")]
    if x not in known:
        raise ValueError(f"draw_curves: x={x!r}: expected one of {', '.join(known)}, which the records have")
    evaluated = list(dict.fromkeys(name for run in runs for name in evaluation_columns(run.records)))
    trained = [name for name in columns if name.startswith("train/") and name not in evaluated]
    rates = [name for name in ("speed/samples", "speed/batches") if name in columns]
    # The rates of parameter groups are drawn for a single run only; with several there would be too many lines.
    lrs = [name for name in columns if name == "lr" or (len(runs) == 1 and name.startswith("lr/"))]
    wanted = [("training loss", "loss", ["loss"])]
    wanted += [(name, "metric", [name]) for name in (*evaluated, *trained)]
    wanted += [("learning rate", "lr", lrs)]
    wanted += [(f"throughput ({name.removeprefix('speed/')} / s)", "speed", [name]) for name in rates[:1]]
    panels = []
    for title, kind, names in wanted:
        series = [_series_of(run, i, column, x) for column in names for i, run in enumerate(runs)]
        if drawn := tuple(one for one in series if one.x):
            panels.append(Panel(title, kind, drawn))
    return panels


def _series_of(run: RunRecords, index: int, column: str, x: str) -> Series:
    """Return a column of a run. A record without x, as of an evaluation, has the x of the record before it."""
    xs, ys, at = [], [], math.nan
    for record in run.records:
        at = record.get(x, at)
        if column in record and isinstance(at, int | float) and not math.isnan(at):
            xs.append(float(at))
            ys.append(record[column])
    return Series(index, column, xs, ys)


def evaluation_columns(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the names of evaluation metrics, which are in records without values of batches; names may repeat."""
    for record in records:
        if not any(name.startswith(_NO_EVALUATION) for name in record):
            yield from (name for name in record if "/" in name and not name.startswith("time/"))


def listed(value: Any) -> list[Any]:
    """Return the numbers of a population's members, or a list of one number."""
    return value if isinstance(value, list) else [value]


def smooth(values: Tensor, window: int) -> Tensor:
    """Return the means of the finite numbers in a window of odd size around each point; NaN where there are none.

    At the ends the window is shorter.

    Example:
        >>> smooth(torch.tensor([0.0, 3.0, 6.0, float("nan")]), 3).tolist()
        [1.5, 3.0, 4.5, 6.0]
    """
    is_finite = values.isfinite()
    parts = torch.stack([torch.where(is_finite, values, 0), is_finite.to(values.dtype)])
    total, share = torch.nn.functional.avg_pool1d(parts[:, None], window, 1, window // 2).squeeze(1)
    return total / share


def figure_of(runs: Sequence[RunRecords], panels: Sequence[Panel], x: str) -> Any:
    """Return a figure of the panels of runs.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise ImportError("drawing needs matplotlib; install it with `pip install 'purecompose[run]'`") from error
    names = _names(runs, panels)
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    per_row = max(130 // (max(map(len, names)) + 8), 1)  # about 130 characters fit in one row
    legend_rows = math.ceil(len(names) / per_row) if len(names) > 1 else 0
    figure: Any = Figure(figsize=(_WIDTH, rows * _ROW + 0.24 * legend_rows + 0.1), layout="constrained")
    # Where the run continued, if there is only one.
    breaks = [start.batch for start in runs[0].starts[1:] if start.batch] if len(runs) == 1 and x == "batch" else []
    end = max((max(one.x) for panel in panels for one in panel.series), default=1.0) or 1.0
    grid = figure.add_gridspec(rows, columns)
    # If the number of panels is odd, the first one, the loss, is as wide as two.
    wide = len(panels) % columns
    for i, panel in enumerate(panels):
        row, column = divmod(i + wide * (i > 0), columns)
        axes = figure.add_subplot(grid[row, :] if wide and i == 0 else grid[row, column])
        _draw_panel(axes, panel, len(names), breaks)
        axes.set_xlim(-0.012 * end, 1.012 * end)
        _dress(axes, panel, is_counted=x != "time/seconds")
        if row == rows - 1:
            axes.set_xlabel(_AXES.get(x, x), fontsize=9, color=_FAINT)
    if legend_rows:
        handles = [Line2D([], [], **_style(i), linewidth=2) for i in range(len(names))]
        place = {"loc": "outside upper center", "ncols": min(per_row, len(names)), "handlelength": 1.8, "fontsize": 9}
        _add_legend(figure, handles, [name if len(name) <= 60 else f"...{name[-57:]}" for name in names], place)
    return figure


def _names(runs: Sequence[RunRecords], panels: Sequence[Panel]) -> list[str]:
    """Return the runs' names, preceded by the names of parent folders if they are equal."""
    names, depth = [run.name for run in runs], 2
    while len(set(names)) < len(names) and depth <= max(len(run.path.resolve().parts) for run in runs):
        names, depth = ["/".join(run.path.resolve().parts[-depth:]) for run in runs], depth + 1
    members = [
        max((s.num_members for one in panels for s in one.series if s.run == i), default=0) for i in range(len(runs))
    ]
    return [f"{name} (median of {num})" if num > 1 else name for name, num in zip(names, members, strict=True)]


def _add_legend(owner: Any, handles: Any, names: Sequence[str], place: dict[str, Any]) -> None:
    # Names are set later, since in one that is given here a first "_" would hide the line.
    legend = owner.legend(handles, [str(i) for i in range(len(names))], frameon=False, labelcolor=_TEXT, **place)
    for text, name in zip(legend.get_texts(), names, strict=True):
        _set_text(text, name)


def _set_text(text: Any, words: str) -> None:
    """Set a text literally: dollar signs do not enclose formulas."""
    text.set_parse_math(False)
    text.set_text(words)


def _style(i: int) -> dict[str, Any]:
    return {"color": _COLORS[i % len(_COLORS)], "linestyle": _DASHES[i // len(_COLORS) % len(_DASHES)]}


def _draw_panel(axes: Any, panel: Panel, num_runs: int, breaks: Sequence[int]) -> None:
    is_noisy = panel.kind in ("loss", "speed") or panel.title.startswith("train/")
    lines = []
    for i, series in enumerate(panel.series):
        style = _style(series.run if num_runs > 1 else i)
        lines += _draw_series(axes, series, style, is_noisy, 0.12 if num_runs > 3 else 0.25)
    _limit(axes, panel)
    for batch in breaks:
        axes.axvline(batch, color=_FAINT, alpha=0.6, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    if num_runs == 1 and len(panel.series) > 1:
        _add_legend(axes, lines, [one.column for one in panel.series], {"fontsize": 8})
    bad = [at for series in panel.series for at in series.not_finite]
    title = axes.set_title("", loc="left", fontsize=10, fontweight="bold", color=_TEXT, pad=20 if bad else 7)
    _set_text(title, panel.title)
    if bad:
        total = sum(len(series.x) for series in panel.series)
        words = f"{len(bad):,} of {total:,} not finite, the first at {min(bad):,.10g}"
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 8.5, "color": _ALARM}
        axes.annotate(words, (0, 1), (0, 6), **place)


def _draw_series(axes: Any, series: Series, style: dict[str, Any], is_noisy: bool, alpha: float) -> Any:
    """Draw one line, with the band of a population or the original numbers of a smoothed line; return the line."""
    low, median, high = series.spread
    if is_noisy and len(series.x) >= _SMOOTHED_FROM:
        window = 2 * max(len(series.x) // 60, 3) + 1
        smoothed = smooth(median, window)
        if series.num_members > 1:
            low, high = smooth(low, window), smooth(high, window)
        else:
            axes.plot(series.x, median, color=style["color"], linewidth=0.6, alpha=alpha, zorder=2)
            smoothed[median.isnan()] = math.nan  # a gap in the smoothed line, too
        median = smoothed
    if series.num_members > 1:
        axes.fill_between(series.x, low, high, color=style["color"], alpha=0.18, linewidth=0, zorder=2)
    marker = {"marker": "o", "markersize": 3.2} if len(series.x) <= _FEW else {}
    return axes.plot(series.x, median, linewidth=1.5, **style, **marker, zorder=3)


def _limit(axes: Any, panel: Panel) -> None:
    """Start a throughput at 0, and draw losses that fall by a factor of more than 30 logarithmically."""
    values = torch.cat([one.spread.flatten() for one in panel.series])
    values = values[values.isfinite()]
    if not len(values):
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        return
    if panel.kind == "speed":
        axes.set_ylim(bottom=0)
    if panel.kind == "loss" and 0 < 30 * values.min() < values.max():
        axes.set_yscale("log")


def _dress(axes: Any, panel: Panel, *, is_counted: bool) -> None:
    """Format the axes, without decoration; `is_counted` is true if the numbers along the horizontal axis are whole."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    axes.grid(True, axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(which="both", colors=_FAINT, labelsize=8.5, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=is_counted, min_n_ticks=1))
    if axes.get_xlim()[1] >= 1e4:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.kind == "speed":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif panel.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
