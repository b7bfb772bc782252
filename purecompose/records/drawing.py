"""Drawing of panels with matplotlib's object interface, which neither reads nor changes global settings."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

from purecompose.records.axes import dress, limit, remark
from purecompose.records.panels import Line, Panel, Series
from purecompose.records.theme import DARK, LIGHT, Theme


_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
_WIDTH, _ROW, _DPI = 10.0, 2.75, 160
# In inches. The letters have a fixed size, so a picture for a phone has to be narrow.
_NARROW, _NARROW_ROW = 4.4, 2.3
_FEW = 40
"""Maximal number of points at which each one is marked by a dot."""
_AXES = {
    "batch": "batch",
    "epoch": "epoch",
    "time/sample": "samples",
    "time/token": "tokens",
    "time/seconds": "wall-clock time (s)",
}


def save_figure(figure: Any, file: Any, kind: str) -> None:
    """Write a figure to a binary file."""
    with warnings.catch_warnings():
        # Matplotlib warns of characters in a run's name that the font lacks.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(file, format=kind, dpi=_DPI, facecolor=figure.get_facecolor())


def new_figure(size: tuple[float, float], theme: Theme, **spaces: Any) -> Any:
    """Return an empty figure of a size in inches, with spaces between its panels.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("drawing needs matplotlib; install it with `pip install 'purecompose[run]'`") from error
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(**spaces))
    FigureCanvasAgg(figure)
    figure.set_facecolor(theme.back)
    return figure


def drawn(
    panels: Sequence[Panel], names: Sequence[str], breaks: Sequence[int], x: str, dark: bool, narrow: bool = False
) -> Any:
    """Return a figure of panels."""
    theme = DARK if dark else LIGHT
    columns = 1 if narrow else min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    legend_rows = 0 if len(names) < 2 else math.ceil(len(names) / _legend_columns(names))
    width, row_height = (_NARROW, _NARROW_ROW) if narrow else (_WIDTH, _ROW)
    size = width, rows * row_height + 0.24 * legend_rows + 0.1
    figure = new_figure(size, theme, w_pad=0.12, h_pad=0.1, hspace=0.02, wspace=0.02)
    end = max((max(one.x) for panel in panels for one in panel.series), default=1.0) or 1.0
    grid = figure.add_gridspec(rows, columns)
    # If the number of panels is odd, the first one, the loss, is as wide as two.
    wide = len(panels) % columns
    for i, panel in enumerate(panels):
        place = i + wide * (i > 0)
        row, column = divmod(place, columns)
        axes = figure.add_subplot(grid[row, :] if wide and i == 0 else grid[row, column])
        # Width of the panel without the numbers along its axis, in points.
        room = 72 * (width if columns == 1 or (wide and i == 0) else width / 2) - 60
        _draw_panel(axes, panel, theme, len(names), breaks, room)
        axes.set_xlim(-0.012 * end, 1.012 * end)
        dress(axes, theme, panel, is_counted=x not in ("epoch", "time/seconds"))
        if row == rows - 1:
            axes.set_xlabel(_AXES.get(x, x), fontsize=9, color=theme.faint)
    if legend_rows:
        _add_legend(figure, names, theme)
    return figure


def _legend_columns(names: Sequence[str]) -> int:
    if sum(map(len, names)) + 8 * len(names) <= 130:  # characters in one row
        return len(names)
    most = max(int(130 / (min(max(map(len, names)), 60) + 8)), 1)
    return math.ceil(len(names) / math.ceil(len(names) / most))


def _add_legend(figure: Any, names: Sequence[str], theme: Theme) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **_style(i, theme), linewidth=2) for i in range(len(names))]
    legend = figure.legend(
        handles,
        [str(i) for i in range(len(names))],
        loc="outside upper center",
        ncols=_legend_columns(names),
        frameon=False,
        fontsize=9,
        labelcolor=theme.text,
        handlelength=1.8,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        _say(text, name if len(name) <= 60 else f"...{name[-57:]}")


def _say(text: Any, words: str) -> None:
    """Set a text literally: dollar signs do not enclose formulas, and no first character is special."""
    text.set_parse_math(False)
    text.set_text(words)


def _style(i: int, theme: Theme) -> dict[str, Any]:
    num = len(theme.lines)
    return {"color": theme.lines[i % num], "linestyle": _DASHES[i // num % len(_DASHES)]}


def _draw_panel(axes: Any, panel: Panel, theme: Theme, num_runs: int, breaks: Sequence[int], room: float) -> None:
    for i, (series, line) in enumerate(zip(panel.series, panel.lines, strict=True)):
        style = _style(series.run if num_runs > 1 else i, theme)
        if panel.kind == "lr" and num_runs > 1:
            # Runs often have the same schedule. A covered line is wider, so that it shows on both sides of the upper.
            above = sum((other.x, other.y) == (series.x, series.y) for other in panel.series[i + 1 :])
            style["linewidth"] = 1.4 + 1.4 * min(above, 3)
        _draw_line(axes, line, style, is_faint=num_runs > 3, is_dotted=len(series.x) <= _FEW)
    limit(axes, panel)
    for batch in breaks:
        axes.axvline(batch, color=theme.faint, alpha=0.6, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    if num_runs == 1 and len(panel.series) > 1:
        _name_lines(axes, panel.series, theme)
    words, is_alarm = remark(panel, num_runs)
    _head(axes, f"{panel.title} ({panel.unit})" if panel.unit else panel.title, words, theme, is_alarm, room)


def _head(axes: Any, title: str, words: str, theme: Theme, is_alarm: bool, room: float) -> None:
    """Draw a panel's title and remark side by side, or the remark below if there is not enough `room` (in points)."""
    fits = 7 * len(title) + 5 * len(words) + 10 <= room  # average widths of letters at these font sizes
    head = axes.set_title("", loc="left", fontsize=10, fontweight="bold", color=theme.text, pad=7 if fits else 20)
    _say(head, title)
    look = {"fontsize": 8.5, "color": theme.alarm if is_alarm else theme.faint}
    if fits:
        note = axes.set_title("", loc="right", pad=7, **look)
    else:
        note = axes.annotate("", (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", **look)
    _say(note, words)


def _draw_line(axes: Any, line: Line, style: dict[str, Any], *, is_faint: bool, is_dotted: bool) -> None:
    """Draw one line with its band or the original numbers."""
    width, marker = 1.6 if line.band or line.faint else 1.4, {"marker": "o", "markersize": 3.2} if is_dotted else {}
    if line.band is not None:
        axes.fill_between(line.x, *line.band, color=style["color"], alpha=0.18, linewidth=0, zorder=2)
    if line.faint is not None:
        alpha = 0.12 if is_faint else 0.25
        axes.plot(*line.faint, color=style["color"], linewidth=0.6, alpha=alpha, zorder=2)
    axes.plot(line.x, line.y, **{"linewidth": width, **style}, **marker, zorder=3)


def _name_lines(axes: Any, series: Sequence[Series], theme: Theme) -> None:
    """Add a small legend for the lines of one run."""
    legend = axes.legend(
        axes.get_lines()[: len(series)],
        [str(i) for i in range(len(series))],
        frameon=False,
        fontsize=8,
        labelcolor=theme.text,
    )
    for text, one in zip(legend.get_texts(), series, strict=True):
        _say(text, one.column)
