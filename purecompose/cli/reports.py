"""Pages, pictures and tables of runs: the commands `report`, `plot` and `runs`."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from purecompose._support.messages import say
from purecompose.cli.options import File, Run, UsageError, check_target, one_line
from purecompose.cli.results import KeptRun, Which, at_checkpoint
from purecompose.cli.setup import arithmetic_of
from purecompose.data import ImageData
from purecompose.errors import CheckpointError
from purecompose.records import Predictions, draw_curves, read_run, write_report
from purecompose.run.evaluation import predict


def report(
    runs: list[Run],
    *,
    out: File = "report.html",
    checkpoint: Which = "newest",
    curves_only: bool = False,
    allow_imports: bool = False,
) -> None:
    """Write a page about one or several runs: curves, settings that differ, mistakes.

    Args:
        runs: Folders of runs.
        out: HTML file.
        checkpoint: Name of the checkpoint whose predictions are shown, or one of these.
        curves_only: Leave out the confusion matrix and the worst examples, which need the data and a checkpoint.
        allow_imports: Import code (my_module:name) that the settings of a run name.

    Examples:
        python -m purecompose report runs/a runs/b --out report.html
    """
    check_target("--out", out)
    with _reported():
        found = [read_run(Path(path)) for path in runs]
        shown = [] if curves_only else [_predictions(path, checkpoint, allow_imports) for path in runs]
        write_report(found, Path(out), predictions=shown)
    say(f"the report of {len(runs)} run{'s' * (len(runs) > 1)} in {out}")


def _predictions(run: str, checkpoint: str, allow_imports: bool) -> Predictions | None:
    """Return what a run predicts for its test images; `None`, with a warning, if it cannot be loaded."""
    kept = KeptRun(run, data=None, allow_imports=allow_imports)
    try:
        if kept.settings().get("seeds", 1) > 1:  # a population
            return None
        settings, data = kept.completed()
        if not isinstance(data, ImageData):
            return None
        with arithmetic_of(settings):
            setup, state, _ = at_checkpoint(run, checkpoint, settings, data)
            outputs = torch.cat(predict(state, setup.test_data, step=setup.plain_step)).cpu()
    except (UsageError, CheckpointError, ImportError, OSError, TypeError) as error:
        warnings.warn(f"{run}: without confusion matrix and worst examples: {one_line(error)}", stacklevel=2)
        return None
    return Predictions(outputs, data.test_targets, data.test_inputs)


@contextmanager
def _reported() -> Iterator[None]:
    """Turn an error about runs or files into a `UsageError` of one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = one_line(error)
        for prefix in ("read_run: ", "draw_curves: ", "write_report: "):
            text = text.removeprefix(prefix)
        raise UsageError(text) from error


def plot(
    runs: list[Run],
    *,
    out: File = "curves.png",
    x: Literal["batch", "epoch", "time/sample", "time/token", "time/seconds"] = "batch",
) -> None:
    """Draw the curves of one or several runs as a picture.

    Args:
        runs: Folders of runs.
        out: Image file, *.png, *.svg or *.pdf.
        x: Column along the horizontal axis.

    Examples:
        python -m purecompose plot runs/a runs/b --out curves.png
    """
    check_target("--out", out)
    with _reported():
        draw_curves([read_run(Path(path)) for path in runs], Path(out), x=x)
    say(f"the curves of {len(runs)} run{'s' * (len(runs) > 1)} in {out}")
