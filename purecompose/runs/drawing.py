"""How panels look: matplotlib by its objects alone, so that nobody's settings are read or changed."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from purecompose.metrics import is_lower_better
from purecompose.runs.panels import Panel, Series, smooth, spread


__all__ = ["Drawing", "drawn"]


class _Theme(NamedTuple):
    back: str
    text: str
    faint: str
    grid: str
    alarm: str
    lines: tuple[str, ...]


# The colours of Okabe and Ito (2008), which people with any colour vision tell apart; on dark the lighter of them.
_LIGHT = _Theme(
    "#ffffff",
    "#1f2328",
    "#656d76",
    "#e6e8eb",
    "#c0392b",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2328"),
)
_DARK = _Theme(
    "#161b22",
    "#e6edf3",
    "#9198a1",
    "#2a313a",
    "#ff7b72",
    ("#56b4e9", "#e69f00", "#2fc59a", "#e29bc4", "#f0e442", "#d55e00", "#e6edf3"),
)
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))

_WIDTH, _ROW, _DPI = 10.0, 2.75, 160
_FEW = 40
"""Up to so many points each has a dot; from twice as many on lines are smoothed."""
_STEPS = [1, 2, 2.5, 5, 10]
_AXES = {
    "batch": "batch",
    "epoch": "epoch",
    "time/sample": "samples",
    "time/token": "tokens",
    "time/seconds": "wall-clock time (s)",
}


class Drawing:
    """A finished figure."""

    def __init__(self, figure: Any) -> None:
        self._figure = figure

    def savefig(self, file: Any, kind: str) -> None:
        """Writes it to a binary file."""
        with warnings.catch_warnings():
            # Of characters in a run's name that the font does not have.
            warnings.simplefilter("ignore", UserWarning)
            self._figure.savefig(file, format=kind, dpi=_DPI, facecolor=self._figure.get_facecolor())


def drawn(panels: Sequence[Panel], names: Sequence[str], breaks: Sequence[int], x: str, dark: bool) -> Drawing:
    """A picture of panels.

    Args:
        panels: At least one.
        names: Of the runs.
        breaks: The batches at which the run went on.
        x: The column along the horizontal axis.
        dark: Light on dark.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("drawing needs matplotlib; install it with `pip install 'purecompose[run]'`") from error
    theme = _DARK if dark else _LIGHT
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    legend_rows = 0 if len(names) < 2 else math.ceil(len(names) / _legend_columns(names))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, hspace=0.02, wspace=0.02)
    figure = Figure(figsize=(_WIDTH, rows * _ROW + 0.24 * legend_rows + 0.1), layout=layout)
    FigureCanvasAgg(figure)
    figure.set_facecolor(theme.back)
    end = max((max(one.x) for panel in panels for one in panel.series), default=1.0) or 1.0
    grid = figure.add_gridspec(rows, columns)
    # Of an odd number the first one, the loss, is as wide as two.
    wide = len(panels) % columns
    for i, panel in enumerate(panels):
        place = i + wide * (i > 0)
        row, column = divmod(place, columns)
        axes = figure.add_subplot(grid[row, :] if wide and i == 0 else grid[row, column])
        _draw_panel(axes, panel, theme, len(names), breaks)
        _dress(axes, theme, panel)
        axes.set_xlim(-0.012 * end, 1.012 * end)
        if row == rows - 1:
            axes.set_xlabel(_AXES.get(x, x), fontsize=9, color=theme.faint)
    if legend_rows:
        _add_legend(figure, names, theme)
    return Drawing(figure)


def _legend_columns(names: Sequence[str]) -> int:
    if sum(map(len, names)) + 8 * len(names) <= 130:  # characters beside each other
        return len(names)
    most = max(int(130 / (min(max(map(len, names)), 60) + 8)), 1)
    return math.ceil(len(names) / math.ceil(len(names) / most))


def _add_legend(figure: Any, names: Sequence[str], theme: _Theme) -> None:
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
    """Sets words as they are: no formulas between dollars, no special first characters."""
    text.set_parse_math(False)
    text.set_text(words)


def _style(i: int, theme: _Theme) -> dict[str, Any]:
    num = len(theme.lines)
    return {"color": theme.lines[i % num], "linestyle": _DASHES[i // num % len(_DASHES)]}


def _draw_panel(axes: Any, panel: Panel, theme: _Theme, num_runs: int, breaks: Sequence[int]) -> None:
    smoothed: list[float] = []
    raw: list[float] = []
    for i, series in enumerate(panel.series):
        style = _style(series.run if num_runs > 1 else i, theme)
        is_noisy = panel.kind in ("loss", "speed") or series.column.startswith("train/")
        line, around = _draw_series(axes, series, style, is_noisy=is_noisy, is_faint=num_runs > 3)
        smoothed += line
        raw += around
    _limit(axes, panel, smoothed, raw)
    for batch in breaks:
        axes.axvline(batch, color=theme.faint, alpha=0.6, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    if num_runs == 1 and len(panel.series) > 1:
        _name_lines(axes, panel.series, theme)
    title = axes.set_title("", loc="left", fontsize=10, fontweight="bold", color=theme.text, pad=7)
    _say(title, f"{panel.title} ({panel.unit})" if panel.unit else panel.title)
    words, is_alarm = _remark(panel, num_runs)
    note = axes.set_title("", loc="right", fontsize=8.5, color=theme.alarm if is_alarm else theme.faint, pad=7)
    _say(note, words)


def _draw_series(
    axes: Any, series: Series, style: dict[str, Any], *, is_noisy: bool, is_faint: bool
) -> tuple[list[float], list[float]]:
    """Draws one line, with its band or with the numbers behind it; gives what decides on the limits of the axes."""
    parts = spread(series.y)
    window = len(series.x) // 50 if is_noisy and len(series.x) >= 2 * _FEW else 1
    # More points than pixels would only take time.
    stride = len(series.x) // 2000 if window > 1 and len(series.x) > 2000 else 1
    low, median, high = ((smooth(side, window, stride) if window > 1 else side) for side in parts)
    x, marker = series.x[::stride], {"marker": "o", "markersize": 3.2} if len(series.x) <= _FEW else {}
    if series.is_population:
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0, zorder=2)
        axes.plot(x, median, **style, **marker, linewidth=1.6, zorder=3)
        return [*low, *high], []
    if window == 1:
        axes.plot(x, median, **style, **marker, linewidth=1.4, zorder=3)
        return median, []
    alpha = 0.12 if is_faint else 0.25
    axes.plot(series.x, parts.median, color=style["color"], linewidth=0.6, alpha=alpha, zorder=2)
    # Where a number is not finite the smoothed line has its gap as well, however wide the window.
    single = parts.median[::stride]
    shown = [mean if math.isfinite(one) else math.nan for mean, one in zip(median, single, strict=True)]
    axes.plot(x, shown, **style, linewidth=1.6, zorder=3)
    return median, parts.median


def _limit(axes: Any, panel: Panel, smoothed: Sequence[float], raw: Sequence[float]) -> None:
    """Vertical limits around nearly all numbers: a few outliers do not press the rest into a line.

    Losses that fall by a factor of 30 have a logarithmic axis.
    """
    line = sorted(value for value in smoothed if math.isfinite(value))
    if not line:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        return
    around = sorted(value for value in raw if math.isfinite(value)) or line
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
        axes.set_ylim(low - gap, min(high + gap, 1.015) if _is_share(panel) else high + gap)


def _remark(panel: Panel, num_runs: int) -> tuple[str, bool]:
    """What stands at the right of a panel's title, and whether it is bad news."""
    bad = [at for series in panel.series for at, y in zip(series.x, series.y, strict=True) if not _is_finite(y)]
    total = sum(len(series.x) for series in panel.series)
    if bad:
        return f"{len(bad):,} of {total:,} not finite, the first at {_short(min(bad))}", True
    if num_runs > 1 or panel.kind not in ("metric", "loss"):
        return "", False
    values = spread(panel.series[0].y).median
    # Of the loss the mean over the last hundredth: a single batch is a matter of luck.
    tail = values[-max(len(values) // 100, 1) :] if panel.kind == "loss" else values[-1:]
    last = smooth(tail, 2 * len(tail))[-1]
    kind = "median, last" if panel.series[0].is_population else "last"
    words = f"{kind} {_value(panel, last)}"
    if panel.kind == "metric" and len(values) > 1:
        best = min(values) if is_lower_better(panel.title) else max(values)
        words += f", best {_value(panel, best)}"
    return words, False


def _value(panel: Panel, value: float) -> str:
    return f"{value:.2%}" if _is_share(panel) else f"{value:.4g}"


def _is_share(panel: Panel) -> bool:
    """Whether a panel's numbers are to be read as per cent."""
    values = [one for series in panel.series for y in series.y for one in (y if isinstance(y, list) else [y])]
    return "accuracy" in panel.title and all(0 <= one <= 1 for one in values if math.isfinite(one))


def _is_finite(value: Any) -> bool:
    return all(math.isfinite(one) for one in (value if isinstance(value, list) else [value]))


def _name_lines(axes: Any, series: Sequence[Series], theme: _Theme) -> None:
    """A small legend for the lines of one run."""
    legend = axes.legend(
        axes.get_lines()[: len(series)],
        [str(i) for i in range(len(series))],
        frameon=False,
        fontsize=8,
        labelcolor=theme.text,
    )
    for text, one in zip(legend.get_texts(), series, strict=True):
        _say(text, one.column)


def _dress(axes: Any, theme: _Theme, panel: Panel) -> None:
    """Axes without what carries no meaning."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

    axes.set_facecolor(theme.back)
    axes.grid(True, axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.tick_params(which="both", colors=theme.faint, labelsize=8.5, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: _short(value)))
    if not len(axes.get_yticks()):
        return
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    if _is_share(panel):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.kind == "speed" or axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: _short(value)))


def _short(value: float) -> str:
    """A number in few characters: 1,500 and 20k and 1.5M.

    Example:
        >>> _short(1500), _short(20000), _short(1500000), _short(0.25)
        ('1,500', '20k', '1.5M', '0.25')
    """
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"
