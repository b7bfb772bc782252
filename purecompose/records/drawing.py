"""Pictures of the curves of runs, with matplotlib's object interface, which neither reads nor sets global settings."""

import io
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from purecompose._support.checks import check_flag, shown
from purecompose.losses.metrics import is_lower_better
from purecompose.records.panels import Line, Panel, panels_of, spread
from purecompose.records.reading import RunRecords, read_run
from purecompose.run.saving.folder import written


class Theme(NamedTuple):
    """Colours of a picture, with those of its lines in order."""

    back: str
    text: str
    faint: str
    grid: str
    alarm: str
    lines: tuple[str, ...]


# The colours of Okabe and Ito (2008), which people with any colour vision can distinguish; lighter ones on dark.
LIGHT = Theme(
    "#ffffff",
    "#1f2328",
    "#656d76",
    "#e6e8eb",
    "#c0392b",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2328"),
)
DARK = Theme(
    "#161b22",
    "#e6edf3",
    "#9198a1",
    "#2a313a",
    "#ff7b72",
    ("#56b4e9", "#e69f00", "#2fc59a", "#e29bc4", "#f0e442", "#d55e00", "#e6edf3"),
)
_FORMATS = (".png", ".svg", ".pdf")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
_STEPS = [1, 2, 2.5, 5, 10]
_WIDTH, _ROW, _DPI = 10.0, 2.75, 160
_FEW = 40
"""Maximal number of points at which each one is marked by a dot."""
_AXES = {"time/sample": "samples", "time/token": "tokens", "time/seconds": "wall-clock time (s)"}


def draw_curves(
    runs: RunRecords | str | os.PathLike[str] | Sequence[RunRecords | str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    x: str = "batch",
    dark: bool = False,
) -> Path:
    """Draw the curves of one run, or compare several runs.

    There is a panel for the training loss, for each metric of evaluations and of training, for the learning rate and
    for the throughput, as far as such numbers exist. With many batches, a mean over a thirtieth of them is drawn over
    the faint original numbers. Populations are drawn as the median member in a band from the lowest to the highest.
    Numbers that are not finite leave gaps, which the panel mentions.

    Args:
        runs: One or several runs: their folders, or results of `read_run`.
        path: The picture, `*.png`, `*.svg` or `*.pdf`. The file appears only when it is complete.
        x: The column along the horizontal axis: "batch", "epoch", "time/sample", "time/token", or "time/seconds" for
            wall-clock time.
        dark: True for light curves on a dark background.

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
    is_dark, found = check_flag(dark, "draw_curves: dark"), _as_runs(runs)
    content = picture(found, panels_of(found, x), x, dark=is_dark, kind=target.suffix.lower()[1:])
    with written(target) as new:
        new.write_bytes(content)
    return target


def picture(
    runs: Sequence[RunRecords], panels: Sequence[Panel], x: str = "batch", *, dark: bool = False, kind: str = "png"
) -> bytes:
    """Return a picture of the panels of runs, as the bytes of a file.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    buffer = io.BytesIO()
    save_figure(figure_of(runs, panels, x, dark=dark), buffer, kind)
    return buffer.getvalue()


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


def figure_of(runs: Sequence[RunRecords], panels: Sequence[Panel], x: str, *, dark: bool = False) -> Any:
    """Return a figure of the panels of runs."""
    theme, names = DARK if dark else LIGHT, _names(runs, panels)
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    per_row = max(130 // (max(map(len, names)) + 8), 1)  # about 130 characters fit in one row
    legend_rows = math.ceil(len(names) / per_row) if len(names) > 1 else 0
    size = _WIDTH, rows * _ROW + 0.24 * legend_rows + 0.1
    figure = new_figure(size, theme, w_pad=0.12, h_pad=0.1, hspace=0.02, wspace=0.02)
    # Where the run continued, if there is only one.
    breaks = [start.batch for start in runs[0].starts[1:] if start.batch] if len(runs) == 1 and x == "batch" else []
    end = max((max(one.x) for panel in panels for one in panel.series), default=1.0) or 1.0
    grid = figure.add_gridspec(rows, columns)
    # If the number of panels is odd, the first one, the loss, is as wide as two.
    wide = len(panels) % columns
    for i, panel in enumerate(panels):
        row, column = divmod(i + wide * (i > 0), columns)
        axes = figure.add_subplot(grid[row, :] if wide and i == 0 else grid[row, column])
        _draw_panel(axes, panel, theme, len(names), breaks)
        axes.set_xlim(-0.012 * end, 1.012 * end)
        _dress(axes, theme, panel, is_counted=x not in ("epoch", "time/seconds"))
        if row == rows - 1:
            axes.set_xlabel(_AXES.get(x, x), fontsize=9, color=theme.faint)
    if legend_rows:
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], **_style(i, theme), linewidth=2) for i in range(len(names))]
        place = {"loc": "outside upper center", "ncols": min(per_row, len(names)), "handlelength": 1.8, "fontsize": 9}
        _add_legend(figure, handles, [name if len(name) <= 60 else f"...{name[-57:]}" for name in names], theme, place)
    return figure


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


def _names(runs: Sequence[RunRecords], panels: Sequence[Panel]) -> list[str]:
    """Return the runs' names, preceded by the names of parent folders if they are equal."""
    names, depth = [run.name for run in runs], 2
    while len(set(names)) < len(names) and depth <= max(len(run.path.resolve().parts) for run in runs):
        names, depth = ["/".join(run.path.resolve().parts[-depth:]) for run in runs], depth + 1
    members = [
        max((s.members for one in panels for s in one.series if s.run == i), default=0) for i in range(len(runs))
    ]
    return [f"{name} (median of {num})" if num > 1 else name for name, num in zip(names, members, strict=True)]


def _add_legend(owner: Any, handles: Any, names: Sequence[str], theme: Theme, place: dict[str, Any]) -> None:
    # Names are set later, since in one that is given here a first "_" would hide the line.
    numbers = [str(i) for i in range(len(names))]
    legend = owner.legend(handles, numbers, frameon=False, labelcolor=theme.text, **place)
    for text, name in zip(legend.get_texts(), names, strict=True):
        _set_text(text, name)


def _set_text(text: Any, words: str) -> None:
    """Set a text literally: dollar signs do not enclose formulas."""
    text.set_parse_math(False)
    text.set_text(words)


def _style(i: int, theme: Theme) -> dict[str, Any]:
    num = len(theme.lines)
    return {"color": theme.lines[i % num], "linestyle": _DASHES[i // num % len(_DASHES)]}


def _draw_panel(axes: Any, panel: Panel, theme: Theme, num_runs: int, breaks: Sequence[int]) -> None:
    for i, (series, line) in enumerate(zip(panel.series, panel.lines, strict=True)):
        style = _style(series.run if num_runs > 1 else i, theme)
        if panel.kind == "lr" and num_runs > 1:
            # Runs often have the same schedule. A covered line is wider, so that it shows on both sides of the upper.
            above = sum((other.x, other.y) == (series.x, series.y) for other in panel.series[i + 1 :])
            style["linewidth"] = 1.4 + 1.4 * min(above, 3)
        _draw_line(axes, line, style, is_faint=num_runs > 3, is_dotted=len(series.x) <= _FEW)
    _limit(axes, panel)
    for batch in breaks:
        axes.axvline(batch, color=theme.faint, alpha=0.6, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    if num_runs == 1 and len(panel.series) > 1:
        names = [one.column for one in panel.series]
        _add_legend(axes, axes.get_lines()[: len(names)], names, theme, {"fontsize": 8})
    words, is_alarm = _remark(panel, num_runs)
    title = axes.set_title("", loc="left", fontsize=10, fontweight="bold", color=theme.text, pad=20 if words else 7)
    _set_text(title, f"{panel.title} ({panel.unit})" if panel.unit else panel.title)
    look = {"fontsize": 8.5, "color": theme.alarm if is_alarm else theme.faint}
    _set_text(axes.annotate("", (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", **look), words)


def _draw_line(axes: Any, line: Line, style: dict[str, Any], *, is_faint: bool, is_dotted: bool) -> None:
    """Draw one line with its band or the original numbers."""
    width, marker = 1.6 if line.band or line.faint else 1.4, {"marker": "o", "markersize": 3.2} if is_dotted else {}
    if line.band is not None:
        axes.fill_between(line.x, *line.band, color=style["color"], alpha=0.18, linewidth=0, zorder=2)
    if line.faint is not None:
        alpha = 0.12 if is_faint else 0.25
        axes.plot(*line.faint, color=style["color"], linewidth=0.6, alpha=alpha, zorder=2)
    axes.plot(line.x, line.y, **{"linewidth": width, **style}, **marker, zorder=3)


def _limit(axes: Any, panel: Panel) -> None:
    """Set vertical limits around nearly all numbers, so that a few outliers do not flatten the rest into a line.

    Losses that fall by a factor of more than 30 get a logarithmic axis.
    """
    pairs = list(zip(panel.lines, panel.series, strict=True))
    line = _finite(value for one, _ in pairs for values in one.band or [one.y] for value in values)
    if not line:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        return
    around = _finite(value for one, series in pairs if one.faint for value in series.spread.median) or line
    cut = len(around) // 100
    low, high = min(line[0], around[cut]), max(line[-1], around[-1 - cut])
    usual = line[-1 - len(line) // 25]
    if panel.kind == "loss" and 0 < 10 * usual < line[-1]:
        line, high = [value for value in line if value <= usual], 1.2 * usual
    if panel.kind == "speed":
        axes.set_ylim(0, 1.15 * line[-1 - len(line) // 50] or 1)
    elif panel.kind == "loss" and line[0] > 0 and line[-1] / line[0] > 30:
        axes.set_yscale("log")
        axes.set_ylim(line[0] / 1.6, high * 1.3)
    else:
        gap = 0.06 * (high - low) or 0.06 * abs(high) or 0.1
        axes.set_ylim(low - gap, min(high + gap, 1.015) if panel.is_share else high + gap)


def _finite(values: Iterable[float]) -> list[float]:
    return sorted(filter(math.isfinite, values))


def _remark(panel: Panel, num_runs: int) -> tuple[str, bool]:
    """Return the remark below a panel's title, and whether it is a warning."""
    if bad := panel.not_finite:
        total = sum(len(series.x) for series in panel.series)
        return f"{len(bad):,} of {total:,} not finite, the first at {min(bad):,.10g}", True
    if num_runs > 1 or panel.kind not in ("metric", "loss"):
        return "", False
    series, form = panel.series[0], ".2%" if panel.is_share else ".4g"
    is_mean = series.tail > 1
    words = f"median of {series.members}{',' if is_mean else ':'} " if series.members else ""
    words += f"mean of the last {series.tail}: " if is_mean else "last "
    words += format(spread([series.last]).median[0], form)
    # The best value of single training batches would only be luck, so it is reported for evaluations only.
    if panel.kind == "metric" and len(series.y) > 1 and not series.column.startswith("train/"):
        is_lower = is_lower_better(panel.title)
        if is_lower is not None:
            words += f", best {(min if is_lower else max)(series.spread.median):{form}}"
    return words, False


def _dress(axes: Any, theme: Theme, panel: Panel, *, is_counted: bool) -> None:
    """Format the axes, without decoration; `is_counted` is true if the numbers along the horizontal axis are whole."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

    axes.set_facecolor(theme.back)
    axes.grid(True, axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.tick_params(which="both", colors=theme.faint, labelsize=8.5, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=_STEPS, integer=is_counted, min_n_ticks=1))
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if axes.get_xlim()[1] >= 1e4 else "{x:,.4g}")
    if not len(axes.get_yticks()):
        return
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=_STEPS, min_n_ticks=3))
    if panel.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.kind == "speed" or axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(EngFormatter(sep="") if high >= 1e4 else "{x:,.4g}")
