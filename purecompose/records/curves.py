"""Pictures of the curves of runs."""

import io
import os
from collections.abc import Sequence
from pathlib import Path

from purecompose._support.checks import check_flag, shown
from purecompose.records.drawing import drawn, save_figure
from purecompose.records.panels import Panel, panels_of
from purecompose.records.reading import RunRecords, read_run
from purecompose.run.saving.folder import written


_FORMATS = (".png", ".svg", ".pdf")


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
    is_dark, kind = check_flag(dark, "draw_curves: dark"), target.suffix.lower()[1:]
    content = _picture(_as_runs(runs), x, is_dark, kind, False, None)
    with written(target) as new:
        new.write_bytes(content)
    return target


def curves_as_png(run: RunRecords, *, dark: bool, narrow: bool = False, panels: Sequence[Panel] | None = None) -> bytes:
    """Return the curves of one run along its batches, as the bytes of a PNG file; `narrow` is for narrow screens.

    Raises the same errors as `draw_curves`. For several pictures of a run, `panels` are those of `panels_of`.
    """
    return _picture([run], "batch", dark, "png", narrow, panels)


def _picture(
    runs: Sequence[RunRecords], x: str, dark: bool, kind: str, narrow: bool, panels: Sequence[Panel] | None
) -> bytes:
    buffer, panels = io.BytesIO(), panels_of(runs, x) if panels is None else panels
    names = [f"{name}{_members(panels, i)}" for i, name in enumerate(_names(runs))]
    save_figure(drawn(panels, names, _breaks(runs, x), x, dark, narrow), buffer, kind)
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


def _names(runs: Sequence[RunRecords]) -> list[str]:
    """Return the runs' names, preceded by the names of parent folders if they are equal."""
    names = [run.name for run in runs]
    depth = 2
    while len(set(names)) < len(names) and depth <= max(len(run.path.resolve().parts) for run in runs):
        names = ["/".join(run.path.resolve().parts[-depth:]) for run in runs]
        depth += 1
    return names


def _members(panels: Sequence[Panel], run: int) -> str:
    """Return the number of members of a run as a remark; empty if it is not a population."""
    members = max((one.members for panel in panels for one in panel.series if one.run == run), default=1)
    return f" (median of {members})" if members > 1 else ""


def _breaks(runs: Sequence[RunRecords], x: str) -> list[int]:
    """Return the batches from which a single run continued."""
    return [start.batch for start in runs[0].starts[1:] if start.batch] if len(runs) == 1 and x == "batch" else []
