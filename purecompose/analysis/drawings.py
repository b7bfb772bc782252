"""Pictures of an ablation and of a range test, with matplotlib's object interface, which changes no global settings."""

import math
import os
from pathlib import Path
from typing import Any

from purecompose._support.checks import check_flag
from purecompose.analysis.effects import Ablation, Effect
from purecompose.analysis.rates import LearningRateRange
from purecompose.losses.metrics import is_lower_better
from purecompose.records.theme import DARK, LIGHT, Theme
from purecompose.run.saving.folder import written


__all__ = ["draw_ablation", "draw_learning_rate_range"]

_FORMATS = (".png", ".svg", ".pdf")
_SIZE, _DPI = (7.2, 4.4), 160


def draw_ablation(ablation: Ablation, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
    """Draw the effect of each method on the metric against its effect on the time of a step, with intervals.

    Methods without finite intervals are left out. Without step times, the methods are next to each other.

    Args:
        ablation: The result of `ablate`.
        path: The picture, `*.png`, `*.svg` or `*.pdf`.
        dark: True for a dark background.

    Returns:
        The path.

    Raises:
        ValueError: The suffix is unknown, or no method has a finite interval.
        ImportError: Matplotlib is not installed.
    """
    shown = [one for one in ablation.effects if one.interval is not None and math.isfinite(one.interval.high)]
    if not shown:
        raise ValueError(f"draw_ablation: no method has a finite interval: {len(ablation.seeds)} seeds are too few")
    figure, axes, theme = _figure(path, dark, "draw_ablation")
    is_timed = all(one.slowdown is not None for one in shown)
    for i, one in enumerate(shown):
        _draw_effect(axes, one, theme, None if is_timed else i)
    axes.axhline(0, color=theme.faint, linewidth=0.8)
    better = "lower is better" if is_lower_better(ablation.metric) else "higher is better"
    axes.set_ylabel(f"change of {ablation.metric} ({better})", color=theme.text, fontsize=9)
    if is_timed:
        from matplotlib.ticker import PercentFormatter

        axes.axvline(0, color=theme.faint, linewidth=0.8)
        axes.set_xlabel("change of the time of a step", color=theme.text, fontsize=9)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.margins(x=0.18)
    else:
        axes.set_xticks(range(len(shown)), [one.method for one in shown])
    axes.margins(y=0.15)
    title = f"what each method adds: {len(ablation.seeds)} seeds, all intervals hold with {ablation.confidence:.0%}"
    axes.set_title(title, loc="left", fontsize=10, color=theme.text)
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
    if place is None:
        label = axes.annotate(
            "", (x, interval.mean), (6, 4), textcoords="offset points", fontsize=8.5, color=theme.text
        )
        label.set_parse_math(False)
        label.set_text(effect.method)


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
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("drawing needs matplotlib; install it with `pip install 'purecompose[run]'`") from error
    theme = DARK if dark else LIGHT
    figure = Figure(figsize=_SIZE, layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    figure.set_facecolor(theme.back)
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
        figure.savefig(file, format=target.suffix.lower()[1:], dpi=_DPI, facecolor=figure.get_facecolor())
    return target
