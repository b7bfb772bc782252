"""Pages and tables of runs: the commands `report` and `runs`."""

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from purecompose._support.files import to_json
from purecompose._support.messages import say
from purecompose._support.tables import table
from purecompose.cli.options import File, Folder, Run, Shown, UsageError, check_target, one_line
from purecompose.cli.results import KeptRun, Which, at_checkpoint, predictions_of
from purecompose.cli.setup import arithmetic_of
from purecompose.errors import CheckpointError
from purecompose.observers.progress import describe_seconds
from purecompose.records import Predictions, list_runs, read_run, write_report
from purecompose.records.listing import differing
from purecompose.records.report import number


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
        settings, data = kept.completed()
        with arithmetic_of(settings):
            setup, state, _ = at_checkpoint(run, checkpoint, settings, data)
            return predictions_of(setup, state)
    except (UsageError, CheckpointError, ImportError, OSError, TypeError) as error:
        warnings.warn(f"{run}: without confusion matrix and worst examples: {one_line(error)}", stacklevel=2)
        return None


@contextmanager
def _reported() -> Iterator[None]:
    """Turn an error about runs or files into a `UsageError` of one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = one_line(error)
        for prefix in ("read_run: ", "write_report: ", "list_runs: "):
            text = text.removeprefix(prefix)
        raise UsageError(text) from error


def runs(folder: Folder = "runs", *, sort: Annotated[str, Shown("NAME")] | None = None, json: bool = False) -> None:
    """List the runs in a folder: their progress, metrics and the settings that differ.

    Args:
        folder: The folder; its subfolders are searched.
        sort: Metric, from the best to the worst, or setting; -NAME reverses it (default: the newest first).
        json: Print one line of JSON per run.

    Examples:
        python -m purecompose runs runs --sort eval/accuracy
    """
    with _reported():
        rows = list_runs(folder, sort=sort)
    if json:
        for row in rows:
            say(dumps(to_json(row)))
        return
    if not rows:
        say(f"no runs in {folder}")
        return
    metrics = list(dict.fromkeys(name for row in rows for name in row["best"]))
    head = ["run", "status", "done", *(f"{name} (best)" for name in metrics), "time", "started", "settings that differ"]
    width = shutil.get_terminal_size((110, 24)).columns  # a wide one has room for the settings
    say(table(head, [_cells(row, metrics, one) for row, one in zip(rows, differing(rows), strict=True)], width=width))


def _cells(row: Mapping[str, Any], metrics: Sequence[str], settings: Mapping[str, str]) -> list[str]:
    known = [name for name in metrics if name in row["best"]]
    values = {name: f"{number(row['metrics'].get(name), name)} ({number(row['best'][name], name)})" for name in known}
    own = "; ".join(f"{name}={text if len(text) <= 80 else f'{text[:77]}...'}" for name, text in settings.items())
    done = "-" if row["progress"] is None else f"{row['progress']:.0%}"
    return [
        *(row["name"], row["status"], done),
        *(values.get(name, "-") for name in metrics),
        *(describe_seconds(row["seconds"]), row["started"][:16].replace("T", " "), own),
    ]
