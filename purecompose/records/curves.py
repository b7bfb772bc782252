"""Pictures of the curves of runs, by matplotlib without its global state."""

import io
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from purecompose.records.layout import RunRecords, runs_of
from purecompose.records.series import AXES, SMOOTHED_FROM, Panel, Series, names_of, panels_of, smooth
from purecompose.run.saving.folder import written


_FORMATS = (".png", ".svg", ".pdf")
_TEXT, _FAINT, _GRID, _ALARM = "#1f2328", "#656d76", "#e6e8eb", "#c0392b"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2328")
"""Those of Okabe and Ito (2008), which people with any colour vision can distinguish."""
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
_WIDTH, _ROW, _DPI = 10.0, 2.75, 160
_FEW = 40
"""Maximal number of points at which each one is marked by a dot."""


def draw_curves(
    runs: RunRecords | str | os.PathLike[str] | Sequence[RunRecords | str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    x: str = "batch",
) -> Path:
    """Draw the curves of one run, or compare several runs.

    There are panels for the loss, metrics, the learning rate, the throughput and memory, as far as such numbers exist.
    With many batches, a mean over a thirtieth of them is drawn over the faint original numbers. A population is drawn
    as the median member in a band from the lowest to the highest. Numbers that are not finite leave gaps.

    Args:
        runs: One or several runs: their folders, or results of `read_run`.
        path: The picture, `*.png`, `*.svg` or `*.pdf`. The file appears only when it is complete.
        x: The column along the horizontal axis: "batch", "epoch", "time/sample", "time/token", or "time/seconds" for
            wall-clock time.

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
    content = picture(runs_of(runs, "draw_curves"), x, target.suffix.lower()[1:])
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
        _dress(axes, panel, is_counted=x not in ("time/seconds", "epoch"))
        if row == rows - 1:
            axes.set_xlabel(AXES[x], fontsize=9, color=_FAINT)
    if legend_rows:
        styles = [_style(i, i // len(_COLORS)) for i in range(len(names))]
        handles = [Line2D([], [], **style, linewidth=2) for style in styles]
        place = {"loc": "outside upper center", "ncols": min(per_row, len(names)), "handlelength": 1.8, "fontsize": 9}
        _add_legend(figure, handles, [name if len(name) <= 60 else f"...{name[-57:]}" for name in names], place)
    return figure


def _names(runs: Sequence[RunRecords], panels: Sequence[Panel]) -> list[str]:
    """Return the runs' names; a population is marked as one."""
    members = [
        max((s.num_members for one in panels for s in one.series if s.run == i), default=0) for i in range(len(runs))
    ]
    named = zip(names_of(runs), members, strict=True)
    return [f"{name} (median of {num})" if num > 1 else name for name, num in named]


def _add_legend(owner: Any, handles: Any, names: Sequence[str], place: dict[str, Any]) -> None:
    # Names are set later, since in one that is given here a first "_" would hide the line.
    legend = owner.legend(handles, [str(i) for i in range(len(names))], frameon=False, labelcolor=_TEXT, **place)
    for text, name in zip(legend.get_texts(), names, strict=True):
        _set_text(text, name)


def _set_text(text: Any, words: str) -> None:
    """Set a text literally: dollar signs do not enclose formulas."""
    text.set_parse_math(False)
    text.set_text(words)


def _style(color: int, dashes: int) -> dict[str, Any]:
    return {"color": _COLORS[color % len(_COLORS)], "linestyle": _DASHES[dashes % len(_DASHES)]}


def _draw_panel(axes: Any, panel: Panel, num_runs: int, breaks: Sequence[int]) -> None:
    lines, columns = {}, panel.columns
    for series in panel.series:
        i = columns.index(series.column)
        # A colour for each run, or in the curves of a single one for each column.
        style = _style(series.run, i or series.run // len(_COLORS)) if num_runs > 1 else _style(i, 0)
        line = _draw_series(axes, series, style, series.is_noisy, 0.12 if num_runs > 3 else 0.25)
        lines.setdefault(series.column, line[0])
    _limit(axes, panel)
    for batch in breaks:
        axes.axvline(batch, color=_FAINT, alpha=0.6, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    if len(lines) > 1:
        _add_legend(axes, lines.values(), list(lines), {"fontsize": 8})
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
    if is_noisy and len(series.x) >= SMOOTHED_FROM:
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
    if panel.is_logarithmic:
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
