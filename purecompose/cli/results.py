"""`evaluate`, `predict` and `plot`: what the command line does with runs that are there."""

import argparse
import csv
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from purecompose import batch as batches, metrics
from purecompose.cli.kinds import TEXT, Data, Kind, load as load_data
from purecompose.cli.sampling import Prompt, continued, prompt_of
from purecompose.cli.settings import UsageError, check_target, settings_of
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, plain_warnings, prepare, reported_as
from purecompose.compilation import CompiledStep
from purecompose.data import Arrays, TextData
from purecompose.evaluation import evaluate, predict
from purecompose.runs import draw_curves, read_run
from purecompose.saving import load, newest
from purecompose.saving.folder import all_in, read_index
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
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        trained = _trained(options, settings, data)
        tested = _tested(options, settings, trained.setup)
        wanted = {**trained.setup.kind.metrics, "top_5": metrics.top_k(5), "loss": trained.state.context.loss}
        if data.num_classes < 5:
            del wanted["top_5"]
        step = trained.setup.step
        composed = step.step if isinstance(step, CompiledStep) else step
        with nullcontext() if options.length is None else reported_as("--length"):
            found = evaluate(trained.state, tested, wanted, step=composed)
    told = {"checkpoint": str(trained.checkpoint), "batch": trained.state.timestamp.batch, **found}
    if options.json:
        print(json.dumps(told))
        return
    width = max(map(len, told))
    for name, value in told.items():
        print(f"{name:<{width}}  {_shown(value)}")


def show_predictions(options: argparse.Namespace) -> None:
    """Writes the predicted class of each test image, with its probability, as CSV; of a text, each next character.

    With a prompt it writes the text that a language model goes on with.

    Raises:
        UsageError: There is no such run or checkpoint, or the output cannot be written; a prompt for images.
        CheckpointError: The checkpoint cannot be used.
    """
    if options.out is not None:
        check_target("--out", options.out)
    settings = _settings(options)
    if settings.get("seeds", 1) > 1:
        raise UsageError(f"{options.run} trained a population; predictions are those of a single network")
    prompt = prompt_of(options, settings)
    if prompt is not None:
        _write_text(options, settings, prompt)
        return
    settings, data = completed(settings)
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        trained = _trained(options, settings, data)
        rows = list(_predicted(trained))
    with _opened(options.out) as file:
        writer = csv.writer(file)
        writer.writerow(["index", "class", "probability", "target"])
        writer.writerows([index, found, f"{share:.6f}", target] for index, (found, share, target) in enumerate(rows))
    if options.out is not None:
        print(f"{len(rows):,} predictions of {trained.checkpoint} in {options.out}")


def _write_text(options: argparse.Namespace, settings: Mapping[str, Any], prompt: Prompt) -> None:
    """Writes what a language model goes on with, as it comes."""
    # Of the run's text the network needs the form alone, and the schedules how many batches there were.
    num = read_index(_checkpoint(options, TEXT)).time["batches_per_epoch"] * settings["batch_size"]
    blank = torch.zeros(1, prompt.window, dtype=torch.int64).expand(num, -1)
    data = TextData(blank, blank, blank, blank, prompt.vocabulary, num_dropped=0)
    settings, _ = completed({**settings, "validation": 0.0}, data)
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        trained = _trained(options, settings, data)
        with _opened(options.out) as file:
            for text in continued(trained.state, prompt):
                print(text, end="", file=file, flush=True)
            print(file=file)


def _tested(options: argparse.Namespace, settings: Mapping[str, Any], setup: Setup) -> Arrays:
    """The test data, of a text in windows of the length that is asked for."""
    if options.length is None:
        return setup.test_data
    if setup.kind is not TEXT:
        raise UsageError("--length is for text, and the run trained a network for images")
    with reported_as("--length"):
        data, _ = load_data({**settings, "length": options.length})
    return setup.kind.stored(data.test_inputs, data.test_targets).to(setup.state.device)


def _predicted(trained: _Trained) -> Iterator[tuple[Any, float, Any]]:
    """For each example, of a text for each position: class, probability and target; a text's are characters."""
    data = trained.setup.data
    named = data.vocabulary.characters if isinstance(data, TextData) else range(data.num_classes)
    # Batch by batch: a text's probabilities take the vocabulary's size for each of its characters.
    for batch in trained.setup.test_data:
        (outputs,) = predict(trained.state, [batch])
        shares, classes = (found.flatten().tolist() for found in outputs.softmax(1).max(1))
        targets = batches.get(batch, trained.state.context.target_key).flatten().tolist()
        yield from zip([named[one] for one in classes], shares, [named[one] for one in targets], strict=True)


@contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    """A file to write to, or standard output."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = Path(path).open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be written: {error.strerror}") from error
    with file:
        yield file


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


def _trained(options: argparse.Namespace, settings: Mapping[str, Any], data: Data) -> _Trained:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what methods say when they are initialised, the run has told
        setup = prepare(settings, data)
    path = _checkpoint(options, setup.kind)
    return _Trained(setup, load(path, setup.state, step=setup.step), path)


def _checkpoint(options: argparse.Namespace, kind: Kind) -> Path:
    _, folder = _places(options.run)
    return folder if (folder / "index.json").exists() else _chosen(folder, options.checkpoint, kind)


def _places(text: str) -> tuple[Path, Path]:
    """The run's folder, and that of its checkpoints or of the one that was named."""
    path = Path(text)
    if (path / "index.json").exists():
        return path.parent.parent, path
    return path, path / "checkpoints"


def _chosen(folder: Path, which: str, kind: Kind) -> Path:
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
    names = (f"val/{kind.decides}", f"eval/{kind.decides}")
    rated = {path: next((i.metrics[name] for name in names if name in i.metrics), None) for path, i in indexes.items()}
    known = {path: value for path, value in rated.items() if isinstance(value, float)}
    return max(known, key=lambda path: kind.rating(known[path])) if known else found


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
