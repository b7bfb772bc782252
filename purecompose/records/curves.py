"""Pictures of the curves of runs, by matplotlib without its global state."""

import io
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from purecompose.records.layout import RunRecords, runs_of
from purecompose.records.series import AXES, SMOOTHED_FROM, Panel, Series, names_of, panels_of, smooth
from purecompose.run.saving.folder import written


_FORMATS = (".png", ".svg", ".pdf")
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2328")
"""Those of Okabe and Ito (2008), which people with any colour vision can distinguish."""
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))


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
        figure.savefig(buffer, format=kind, dpi=160)
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
    rows, names = math.ceil(len(panels) / 2), names_of(runs)
    figure: Any = Figure(figsize=(10.0, 2.75 * rows + 0.25 * len(names)), layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(rows, 2, i + 1)
        for series in panel.series:
            _draw(axes, series, _style(series.run, panel.columns.index(series.column), len(runs)))
        axes.grid(True, axis="y", alpha=0.3)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(f"{panel.title}: {panel.bad}" if panel.bad else panel.title, loc="left", parse_math=False)
        axes.set_xlabel(AXES[x])
        if panel.is_logarithmic:
            axes.set_yscale("log")
        elif panel.kind == "speed":
            axes.set_ylim(bottom=0)
        if len(panel.columns) > 1:
            keys = [_style(-1, k, len(runs)) for k in range(len(panel.columns))]
            _add_legend(axes, [Line2D([], [], **key) for key in keys], panel.columns, fontsize=8)
    if len(runs) > 1:
        lines = [Line2D([], [], **_style(i, 0, len(runs))) for i in range(len(runs))]
        _add_legend(figure, lines, names, loc="outside upper left")
    return figure


def _style(run: int, column: int, num_runs: int) -> dict[str, Any]:
    """Return the style of a line: of several runs, each has a colour, and each column its dashes."""
    if num_runs == 1:
        return {"color": _COLORS[column % len(_COLORS)]}
    return {
        "color": _COLORS[run % len(_COLORS)],
        "linestyle": _DASHES[(column or max(run, 0) // len(_COLORS)) % len(_DASHES)],
    }


def _draw(axes: Any, series: Series, style: dict[str, Any]) -> None:
    """Draw one line, with the band of a population or the original numbers of a smoothed line."""
    low, median, high = series.spread
    if series.is_noisy and len(series.x) >= SMOOTHED_FROM:
        if series.num_members == 1:
            axes.plot(series.x, median, color=style["color"], linewidth=0.6, alpha=0.25)
        window = 2 * max(len(series.x) // 60, 3) + 1
        low, median, high = (smooth(level, window).where(~level.isnan(), math.nan) for level in series.spread)
    if series.num_members > 1:
        axes.fill_between(series.x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.plot(series.x, median, linewidth=1.5, **style)


def _add_legend(owner: Any, lines: Sequence[Any], names: Sequence[str], **place: Any) -> None:
    # Names are set later: in one that is given here, a first "_" would hide the line, and "$" begin a formula.
    legend = owner.legend(lines, [str(i) for i in range(len(names))], frameon=False, **place)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)
