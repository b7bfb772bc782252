"""Axes and titles of panels: limits, ticks and formatted numbers."""

import math
from typing import Any

from purecompose.losses.metrics import is_lower_better
from purecompose.records.panels import Panel, spread
from purecompose.records.theme import Theme


_STEPS = [1, 2, 2.5, 5, 10]
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def limit(axes: Any, panel: Panel) -> None:
    """Set vertical limits around nearly all numbers, so that a few outliers do not flatten the rest into a line.

    Losses that fall by a factor of more than 30 get a logarithmic axis.
    """
    line = sorted(value for one in panel.lines for value in one.values if math.isfinite(value))
    if not line:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        return
    around = sorted(value for one in panel.lines for value in one.around if math.isfinite(value)) or line
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


def remark(panel: Panel, num_runs: int) -> tuple[str, bool]:
    """Return the remark to the right of a panel's title, and whether it is a warning."""
    bad = panel.not_finite
    total = sum(len(series.x) for series in panel.series)
    if bad:
        return f"{len(bad):,} of {total:,} not finite, the first at {_short(min(bad))}", True
    if num_runs > 1 or panel.kind not in ("metric", "loss"):
        return "", False
    series = panel.series[0]
    is_mean = series.tail > 1
    words = f"median of {series.members}{',' if is_mean else ':'} " if series.is_population else ""
    words += f"mean of the last {series.tail}: " if is_mean else "last "
    words += _value(panel, spread([series.last]).median[0])
    # The best value of single training batches would only be luck, so it is reported for evaluations only.
    if panel.kind == "metric" and len(series.y) > 1 and not series.column.startswith("train/"):
        is_lower = is_lower_better(panel.title)
        if is_lower is not None:
            words += f", best {_value(panel, (min if is_lower else max)(series.spread.median))}"
    return words, False


def _value(panel: Panel, value: float) -> str:
    return f"{value:.2%}" if panel.is_share else f"{value:.4g}"


def dress(axes: Any, theme: Theme, panel: Panel, *, is_counted: bool) -> None:
    """Format the axes, without decoration; `is_counted` is true if the numbers along the horizontal axis are whole."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

    axes.set_facecolor(theme.back)
    axes.grid(True, axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.tick_params(which="both", colors=theme.faint, labelsize=8.5, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=_STEPS, integer=is_counted, min_n_ticks=1))
    axes.xaxis.set_major_formatter(_in_short(axes.get_xlim()[1]))
    if not len(axes.get_yticks()):
        return
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=_STEPS, min_n_ticks=3))
    if panel.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.kind == "speed":
        axes.yaxis.set_major_formatter(_in_short(axes.get_ylim()[1]))
    elif axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: _short(value)))


def _in_short(largest: float) -> Any:
    """Return a formatter for an axis with all numbers in one unit: 0, 5k, 10k."""
    from matplotlib.ticker import FuncFormatter

    size, letter = next((one for one in _UNITS if largest >= (1e4 if one[1] == "k" else one[0])), (1.0, ""))
    return FuncFormatter(
        lambda value, position: f"{value / size:,.4g}{letter if value else ''}" if letter else _short(value)
    )


def _short(value: float) -> str:
    """Return a number as a short text.

    Example:
        >>> _short(1500), _short(20000), _short(1500000), _short(0.25)
        ('1,500', '20k', '1.5M', '0.25')
    """
    for size, letter in _UNITS:
        if abs(value) >= (1e4 if letter == "k" else size):
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"
