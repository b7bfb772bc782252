"""`evaluate`, `predict` and `plot`: what the command line does with runs that are there."""

import argparse
import csv
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from purecompose import metrics
from purecompose.cli.settings import UsageError, check_target, settings_of
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, prepare
from purecompose.compilation import CompiledStep
from purecompose.evaluation import evaluate, predict
from purecompose.runs import draw_curves, read_run
from purecompose.saving import load, newest
from purecompose.saving.folder import all_in
from purecompose.state import State


__all__ = ["show_evaluation", "show_plot", "show_predictions"]


class _Trained(NamedTuple):
    """A run's state at one of its checkpoints."""

    setup: Setup
    state: State
    checkpoint: Path


def show_evaluation(options: argparse.Namespace) -> None:
    """Prints the metrics of a checkpoint on the test data.

    Raises:
        UsageError: There is no such run or checkpoint.
        CheckpointError: It cannot be used.
    """
    settings, data = completed(_settings(options))
    with fixed_arithmetic(settings["threads"]):
        trained = _trained(options, prepare(settings, data))
        wanted = {"accuracy": metrics.accuracy, "top_5": metrics.top_k(5), "loss": trained.state.context.loss}
        if data.num_classes < 5:
            del wanted["top_5"]
        step = trained.setup.step
        composed = step.step if isinstance(step, CompiledStep) else step
        found = evaluate(trained.state, trained.setup.test_data, wanted, step=composed)
    told = {"checkpoint": str(trained.checkpoint), "batch": trained.state.timestamp.batch, **found}
    if options.json:
        print(json.dumps(told))
        return
    width = max(map(len, told))
    for name, value in told.items():
        print(f"{name:<{width}}  {_shown(value)}")


def show_predictions(options: argparse.Namespace) -> None:
    """Writes the predicted class of each test image, with its probability, as CSV.

    Raises:
        UsageError: There is no such run or checkpoint, or the output cannot be written.
        CheckpointError: The checkpoint cannot be used.
    """
    if options.out is not None:
        check_target("--out", options.out)
    settings, data = completed(_settings(options))
    if settings["seeds"] > 1:
        raise UsageError(f"{options.run} trained a population; predictions are those of a single network")
    with fixed_arithmetic(settings["threads"]):
        trained = _trained(options, prepare(settings, data))
        outputs = torch.cat(predict(trained.state, trained.setup.test_data))
    probabilities, classes = outputs.softmax(1).max(1)
    rows = zip(classes.tolist(), probabilities.tolist(), trained.setup.test_data.targets.tolist(), strict=True)
    try:
        opened: Any = nullcontext(sys.stdout) if options.out is None else Path(options.out).open("w", newline="")
    except OSError as error:
        raise UsageError(f"--out: {options.out} cannot be written: {error.strerror}") from error
    with opened as file:
        writer = csv.writer(file)
        writer.writerow(["index", "class", "probability", "target"])
        writer.writerows([index, found, f"{share:.6f}", target] for index, (found, share, target) in enumerate(rows))
    if options.out is not None:
        print(f"{len(classes):,} predictions of {trained.checkpoint} in {options.out}")


def show_plot(options: argparse.Namespace) -> None:
    """Draws the curves of runs into one picture.

    Raises:
        UsageError: A folder that is no run, or a picture that cannot be written.
    """
    check_target("--out", options.out)
    try:
        runs = [read_run(Path(path)) for path in options.runs]
        draw_curves(runs, Path(options.out), x=options.x)
    except (OSError, ValueError) as error:
        message = " ".join(str(error).split())
        raise UsageError(message.removeprefix("read_run: ").removeprefix("draw_curves: ")) from error
    print(f"the curves of {len(runs)} run{'s' * (len(runs) > 1)} in {options.out}")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run, with the data that it is asked about."""
    run, _ = _places(options.run)
    return {**settings_of(run), **({} if options.data is None else {"data": options.data})}


def _trained(options: argparse.Namespace, setup: Setup) -> _Trained:
    _, folder = _places(options.run)
    path = folder if (folder / "index.json").exists() else _chosen(folder, options.checkpoint)
    step = setup.step
    state = load(path, setup.state, step=step)
    return _Trained(setup, state, path)


def _places(text: str) -> tuple[Path, Path]:
    """The run's folder, and that of its checkpoints or of the one that was named."""
    path = Path(text)
    if (path / "index.json").exists():
        return path.parent.parent, path
    return path, path / "checkpoints"


def _chosen(folder: Path, which: str) -> Path:
    """A run's newest checkpoint, its best, or the one of that name."""
    if which not in ("newest", "best"):
        if not (folder / which / "index.json").exists():
            known = sorted(path.name for path in folder.glob("*") if not _is_hidden(path))
            raise UsageError(f"--checkpoint: {folder} has no {which}; there are {', '.join(known) or 'none'}")
        return folder / which
    found = newest(folder)
    if found is None:
        raise UsageError(f"there is no checkpoint in {folder}: has the run written one yet?")
    if which == "newest":
        return found
    indexes = {one.path: one.index for one in all_in(folder)[0]}
    rated = {path: i.metrics.get("val/accuracy", i.metrics.get("eval/accuracy")) for path, i in indexes.items()}
    known = {path: value for path, value in rated.items() if isinstance(value, float)}
    return max(known, key=lambda path: known[path]) if known else found


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
