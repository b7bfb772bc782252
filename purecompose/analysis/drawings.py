"""Pictures of an ablation and of a range test, with matplotlib's object interface, which changes no global settings."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from purecompose._support.checks import check_flag
from purecompose.analysis.effects import Ablation, Effect
from purecompose.analysis.rates import LearningRateRange
from purecompose.records.drawing import DARK, LIGHT, Theme, new_figure, save_figure
from purecompose.run.saving.folder import written


_FORMATS = (".png", ".svg", ".pdf")
_SIZE = 7.2, 4.4
_OFFSETS = [(dx, dy) for dy in (4, -12, 16, -24, 28, -36, 60, -68) for dx in (6, -6, 24, -24)]
"""Places of a label relative to its point, in points (1/72 inch), the preferred one first."""


def draw_ablation(ablation: Ablation, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
    """Draw the effect of each method on the metric against its effect on the step time, with intervals.

    Thick vertical lines are the intervals of the metric, thin horizontal lines those of the step time. Green is better,
    orange is worse, and gray is undecided or no difference. Methods without finite intervals are left out. Without step
    times, the methods are next to each other.

    Args:
        ablation: The result of `ablate`.
        path: The picture, `*.png`, `*.svg` or `*.pdf`.
        dark: True for a dark background.

    Returns:
        The path.

    Raises:
        ValueError: The suffix is unknown, or no method has a finite interval.
        ImportError: Matplotlib is not installed.

    Example::

        draw_ablation(ablation, "ablation.png")
    """
    shown = [one for one in ablation.effects if one.interval is not None and math.isfinite(one.interval.high)]
    if not shown:
        raise ValueError(f"draw_ablation: no method has a finite interval: {len(ablation.seeds)} seeds are too few")
    figure, axes, theme = _figure(path, dark, "draw_ablation")
    is_timed = all(one.slowdown is not None for one in shown)
    for i, one in enumerate(shown):
        _draw_effect(axes, one, theme, None if is_timed else i)
    axes.axhline(0, color=theme.faint, linewidth=0.8)
    better = "lower is better" if ablation.mode == "min" else "higher is better"
    axes.set_ylabel(f"change of {ablation.metric} ({better})", color=theme.text, fontsize=9)
    if is_timed:
        from matplotlib.ticker import PercentFormatter

        axes.axvline(0, color=theme.faint, linewidth=0.8)
        axes.set_xlabel("change of the step time", color=theme.text, fontsize=9)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.margins(x=0.18)
    else:
        axes.set_xticks(range(len(shown)), [one.method for one in shown])
    axes.margins(y=0.15)
    title = f"effect of each method: {len(ablation.seeds)} seeds, simultaneous {ablation.confidence:.0%} intervals"
    axes.set_title(title, loc="left", fontsize=10, color=theme.text)
    if is_timed:
        _add_labels(figure, axes, shown, theme)
    return _saved(figure, path)


def _draw_effect(axes: Any, effect: Effect, theme: Theme, place: int | None) -> None:
    """Draw one method; `place` is its number if times are not measured."""
    interval, slowdown = effect.interval, effect.slowdown
    assert interval is not None
    colors = {"better": theme.lines[2], "worse": theme.lines[1]}
    color = colors.get(effect.verdict, theme.faint)
    x = float(place) if place is not None else slowdown.mean - 1 if slowdown is not None else 0.0
    axes.plot([x, x], [interval.low, interval.high], color=color, linewidth=1.8, solid_capstyle="butt")
    if place is None and slowdown is not None and math.isfinite(slowdown.high):
        axes.plot([slowdown.low - 1, slowdown.high - 1], [interval.mean] * 2, color=color, linewidth=1.0, alpha=0.6)
    axes.plot([x], [interval.mean], marker="o", markersize=5, color=color)


def _add_labels(figure: Any, axes: Any, shown: Sequence[Effect], theme: Theme) -> None:
    """Write the name of each method beside its point, where it overlaps the fewest other names and lines."""
    from matplotlib.patheffects import withStroke

    figure.draw_without_rendering()  # fixes the limits and the layout, on which places in pixels depend
    lines, names = [line.get_window_extent() for line in axes.lines], []
    leader = {"arrowstyle": "-", "color": theme.faint, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
    for one in shown:
        assert one.interval is not None and one.slowdown is not None
        point = one.slowdown.mean - 1, one.interval.mean
        label = axes.annotate(
            "", point, (0, 0), textcoords="offset points", fontsize=8.5, color=theme.text, arrowprops=leader
        )
        label.set_parse_math(False)
        label.set_text(one.method)
        label.set_path_effects([withStroke(linewidth=2.5, foreground=theme.back)])  # readable on a line, too
        overlaps = []
        for offset in _OFFSETS:
            extent = _extent_at(label, offset)
            is_outside = extent.x0 < axes.bbox.x0 or extent.x1 > axes.bbox.x1
            overlaps.append((sum(map(extent.overlaps, names)) + is_outside, sum(map(extent.overlaps, lines))))
        names.append(_extent_at(label, _OFFSETS[overlaps.index(min(overlaps))]))


def _extent_at(label: Any, offset: tuple[int, int]) -> Any:
    """Move a label to an offset from its point, and return its bounding box in pixels."""
    from matplotlib.text import Text

    label.set_position(offset)
    label.set_horizontalalignment("left" if offset[0] > 0 else "right")
    label.update_positions(label.figure.canvas.get_renderer())
    return Text.get_window_extent(label)  # that of an annotation includes the line to the point


def draw_learning_rate_range(found: LearningRateRange, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
    """Draw the loss of a range test over the learning rate, with the suggested rate.

    Args:
        found: The result of `learning_rate_range`.
        path: The picture, `*.png`, `*.svg` or `*.pdf`.
        dark: True for a dark background.

    Returns:
        The path.

    Raises:
        ValueError: The suffix is unknown.
        ImportError: Matplotlib is not installed.

    Example::

        draw_learning_rate_range(found, "rates.png")
    """
    figure, axes, theme = _figure(path, dark, "draw_learning_rate_range")
    axes.plot(found.rates, found.losses, color=theme.lines[0], alpha=0.3, linewidth=0.8)
    axes.plot(found.rates, found.smoothed, color=theme.lines[0], linewidth=1.8)
    axes.axvline(found.suggested, color=theme.lines[1], linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_xscale("log")
    finite = [loss for loss in found.smoothed if math.isfinite(loss)]
    axes.set_ylim(0.9 * min(finite), 1.1 * max(max(finite[: len(finite) // 2 + 1]), finite[0]))
    axes.set_xlabel("learning rate", color=theme.text, fontsize=9)
    axes.set_ylabel("training loss", color=theme.text, fontsize=9)
    axes.set_title(f"suggested learning rate: {found.suggested:.2g}", loc="left", fontsize=10, color=theme.text)
    return _saved(figure, path)


def _figure(path: str | os.PathLike[str], dark: bool, where: str) -> tuple[Any, Any, Theme]:
    """Return an empty figure with its axes, and the colours."""
    check_flag(dark, f"{where}: dark")
    if Path(path).suffix.lower() not in _FORMATS:
        raise ValueError(f"{where}: expected a file name that ends in {', '.join(_FORMATS)}, got {str(path)!r}")
    theme = DARK if dark else LIGHT
    figure = new_figure(_SIZE, theme)
    axes = figure.add_subplot()
    axes.set_facecolor(theme.back)
    axes.grid(True, color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(which="both", colors=theme.faint, labelsize=8.5, length=0)
    return figure, axes, theme


def _saved(figure: Any, path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    with written(target) as new, new.open("wb") as file:
        save_figure(figure, file, target.suffix.lower()[1:])
    return target
