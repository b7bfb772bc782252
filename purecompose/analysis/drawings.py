"""Pictures of an ablation and of a range test, with matplotlib's object interface, which changes no global settings."""

import math
import os
from pathlib import Path
from typing import Any

from purecompose._support.checks import check_flag
from purecompose.analysis.effects import Ablation
from purecompose.analysis.sweeping import LearningRateRange
from purecompose.records.drawing import DARK, LIGHT, Theme, new_figure, save_figure
from purecompose.run.saving.folder import written


_FORMATS = (".png", ".svg", ".pdf")
_WIDTH, _HEIGHT = 7.2, 4.4


def draw_ablation(ablation: Ablation, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
    """Draw the effect of each method on the metric, and beside it that on the step time if it was measured.

    A line is the interval, a dot the mean. Green is better, orange is worse, and gray is undecided or no difference.
    Methods without finite intervals are left out.

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
    is_timed = all(one.slowdown is not None and math.isfinite(one.slowdown.high) for one in shown)
    better = "lower is better" if ablation.mode == "min" else "higher is better"
    columns = [(f"change of {ablation.metric} ({better})", 0.0, [one.interval for one in shown])]
    columns += [("step time with / without the method", 1.0, [one.slowdown for one in shown])] if is_timed else []
    figure, panels, theme = _panels(path, dark, "draw_ablation", len(columns), 1.3 + 0.36 * len(shown))
    colors = {"better": theme.lines[2], "worse": theme.lines[1]}
    for axes, (label, neutral, intervals) in zip(panels, columns, strict=True):
        axes.axvline(neutral, color=theme.faint, linewidth=0.8)
        for place, (one, interval) in enumerate(zip(shown, intervals, strict=True)):
            assert interval is not None
            color = colors.get(one.verdict, theme.faint) if neutral == 0.0 else theme.text
            axes.plot([interval.low, interval.high], [place, place], color=color, linewidth=1.8)
            axes.plot([interval.mean], [place], marker="o", markersize=5, color=color)
        axes.set_xlabel(label, color=theme.text, fontsize=9)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_yticks(range(len(shown)), [one.method if axes is panels[0] else "" for one in shown], color=theme.text)
    title = f"effect of each method: {len(ablation.seeds)} seeds, simultaneous {ablation.confidence:.0%} intervals"
    figure.suptitle(title, x=0.02, ha="left", fontsize=10, color=theme.text)
    return _saved(figure, path)


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
    figure, (axes,), theme = _panels(path, dark, "draw_learning_rate_range", 1, _HEIGHT)
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


def _panels(
    path: str | os.PathLike[str], dark: bool, where: str, num: int, height: float
) -> tuple[Any, list[Any], Theme]:
    """Return a figure with empty panels side by side, and the colours."""
    check_flag(dark, f"{where}: dark")
    if Path(path).suffix.lower() not in _FORMATS:
        raise ValueError(f"{where}: expected a file name that ends in {', '.join(_FORMATS)}, got {str(path)!r}")
    theme = DARK if dark else LIGHT
    figure = new_figure((_WIDTH, height), theme)
    panels = [figure.add_subplot(1, num, place + 1) for place in range(num)]
    for axes in panels:
        axes.set_facecolor(theme.back)
        axes.grid(True, color=theme.grid, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.tick_params(which="both", colors=theme.faint, labelsize=8.5, length=0)
    return figure, panels, theme


def _saved(figure: Any, path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    with written(target) as new, new.open("wb") as file:
        save_figure(figure, file, target.suffix.lower()[1:])
    return target
