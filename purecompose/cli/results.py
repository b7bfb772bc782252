"""Existing runs: `load_run`, and the commands `evaluate`, `predict` and `export`."""

import csv
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches, metrics, saving
from purecompose._support.messages import is_remote, say, with_urls
from purecompose._support.specs import did_you_mean
from purecompose.cli.options import File, Run, Shown, UsageError, allowed_by, check_target, reported_as
from purecompose.cli.settings import Settings, settings_of
from purecompose.cli.setup import Data, Kind, Setup, arithmetic_of, completed, prepare
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data import Arrays, TextData
from purecompose.errors import CheckpointWarning
from purecompose.records import Predictions
from purecompose.records.report import number
from purecompose.run.evaluation import evaluate as evaluated, predict as predicted
from purecompose.run.saving.folder import CHECKPOINTS, INDEX
from purecompose.run.saving.remote import fetched
from purecompose.saving import Ranked, load, newest, ranked
from purecompose.surgery import with_weights


Which = Annotated[str, Shown("NAME", ("newest", "best"))]


class LoadedRun(NamedTuple):
    """The result of `load_run`."""

    state: State
    """The state at the checkpoint; `to_module(state)` returns its network."""
    step: Step
    """The training step, with the run's algorithms; not compiled."""
    train_data: Arrays
    """The run's batches for training, to pass to `fit`."""
    test_data: Arrays
    """The run's batches for evaluation."""
    checkpoint: Path | str
    """The checkpoint's folder, or its URL."""


def load_run(
    run: str | Path, checkpoint: str = "newest", *, data: str | Path | None = None, allow_imports: bool = False
) -> LoadedRun:
    """Load a run that was trained by `python -m purecompose train --out FOLDER`.

    Training that continues from its result may produce other bits than `--resume`, which fixes threads and kernels.

    Args:
        run: The run's folder, or the folder of one of its checkpoints; or the URL of one.
        checkpoint: "newest", "best", or a checkpoint's name. If `run` is the folder of a checkpoint, only that one.
        data: Data to use instead of those that the run was trained on, as for `--data`.
        allow_imports: True to allow importing, and so running, code that the run's settings name, `my_module:name`.

    Raises:
        UsageError: There is no such run or checkpoint, its data are missing, or its settings name code that may not be
            imported; or for "best" no checkpoint has the metric that decides.
        CheckpointError: The checkpoint cannot be used.
        ImportError: A package that the data need is missing.

    Example::

        run = load_run("runs/first", "best")
        net = purecompose.to_module(run.state)
        outputs = run.state.forward(images)
        state = purecompose.fit(run.step, run.state, run.train_data, duration="60ep")
    """
    with fetched(run) as folder:
        kept = KeptRun(str(folder), data=None if data is None else str(data), allow_imports=allow_imports)
        settings, found = kept.completed(checkpoint)
        with arithmetic_of(settings):
            trained = at_checkpoint(folder, checkpoint, settings, found)
        setup, place = trained.setup, with_urls(trained.checkpoint) if is_remote(run) else trained.checkpoint
    return LoadedRun(trained.state, setup.plain_step, setup.train_data, setup.test_data, place)


def local_copy(run: str, stack: ExitStack) -> str:
    """Return a run, or if it is given by a URL its local copy, while the stack is open."""
    with reported_as("", OSError, ValueError):
        return str(stack.enter_context(fetched(run))) if is_remote(run) else run


@dataclass(frozen=True)
class KeptRun:
    """A run in a folder, on the command line.

    Attributes:
        run: Folder of a run, or of one of its checkpoints.
        data: Other data of the same form (default: those of the run).
        allow_imports: Import code (my_module:name) that the settings of the run name.
    """

    run: Run
    _: KW_ONLY
    data: str | None = None
    allow_imports: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the settings in the run's folder, with other data if given."""
        return settings_of(_places(self.run)[0]) | ({} if self.data is None else {"data": self.data})

    def check_single(self, what: str) -> None:
        if self.settings().get("seeds", 1) > 1:
            raise UsageError(f"{self.run} trained a population; only a single network {what}")

    def completed(self, checkpoint: str | None = None) -> tuple[Settings, Data]:
        """Return all settings of the run, and the data; raise before if there is no such checkpoint."""
        settings = self.settings()
        if checkpoint is not None:
            named_checkpoint(self.run, checkpoint)
        return completed(settings, allowed=allowed_by({"data": self.data}, self.allow_imports))


class _Trained(NamedTuple):
    """A run's state at one of its checkpoints."""

    setup: Setup
    state: State
    checkpoint: Path


def at_checkpoint(run: str | Path, checkpoint: str, settings: Settings, data: Data) -> _Trained:
    """Return the run that complete settings define, at one of its checkpoints."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has shown the warnings of initialisation
        setup = prepare(settings, data)
    path = checkpoint_of(run, checkpoint, setup.kind)
    with warnings.catch_warnings():  # no run continues, and a run of several processes is usually read by one
        warnings.filterwarnings("ignore", ".* continues, perhaps not to the same bits", CheckpointWarning)
        return _Trained(setup, load(path, setup.state, step=setup.step), path)


def _places(run: str | Path) -> tuple[Path, Path]:
    """Return the run's folder, and the folder of its checkpoints, or of one checkpoint if `run` is one."""
    path = Path(run)
    if (path / INDEX).exists():
        return path.resolve().parent.parent, path  # resolved, because the path may be "."
    return path, path / CHECKPOINTS


def checkpoint_of(run: str | Path, which: str, kind: Kind) -> Path:
    """Return a run's newest checkpoint, its best one, or the one with the given name."""
    if (found := named_checkpoint(run, which)) is not None:
        return found
    folder = _places(run)[1]
    if not (best := ranked_in(folder, kind)):
        raise UsageError(
            f"--checkpoint: no checkpoint in {folder} has a single number for {kind.decides}, which selects the best "
            "one; give newest, or a checkpoint's name"
        )
    return best[0].path


def named_checkpoint(run: str | Path, which: str) -> Path | None:
    """Return the checkpoint as `checkpoint_of`, but `None` for the best one, which depends on the kind of data."""
    _, folder = _places(run)
    if (folder / INDEX).exists():
        if which not in ("newest", folder.resolve().name):
            raise UsageError(f"--checkpoint: {run} is a checkpoint itself; for {which} give the run's folder")
        return folder
    if which not in ("newest", "best"):
        if not (folder / which / INDEX).exists():
            known = ["newest", "best", *sorted(path.name for path in folder.glob("[!.]*"))]
            hint = did_you_mean(which, known)
            raise UsageError(f"--checkpoint: {folder} has no {which};{hint} there are {', '.join(known)}")
        return folder / which
    found = newest(folder)
    if found is None:
        raise UsageError(f"there is no checkpoint in {folder}: has the run written one yet?")
    return found if which == "newest" else None


def ranked_in(folder: Path, kind: Kind) -> list[Ranked]:
    """Return the checkpoints in a folder that have a value of the metric that decides, the best first."""
    return ranked(folder, f"val/{kind.decides}") or ranked(folder, f"eval/{kind.decides}")


def evaluate(kept: KeptRun, *, checkpoint: Which = "newest", json: bool = False) -> None:
    """Show the metrics of a run's checkpoint.

    Args:
        kept: The run.
        checkpoint: Name of the checkpoint, or one of these.
        json: Print one line of JSON.

    Examples:
        python -m purecompose evaluate runs/a --checkpoint best --json
    """
    settings, data = kept.completed(checkpoint)
    with arithmetic_of(settings):
        setup, state, path = at_checkpoint(kept.run, checkpoint, settings, data)
        wanted = {**setup.kind.metrics, "loss": metrics.mean_loss()}
        found = evaluated(state, setup.test_data, wanted, step=setup.plain_step)
    reported = {"checkpoint": with_urls(path), "batch": state.timestamp.batch, **found}
    if json:
        say(dumps(reported))
        return
    width = max(map(len, reported))
    for name, value in reported.items():
        say(f"{name:<{width}}  {number(value, name)}")


def predictions_of(setup: Setup, state: State) -> Predictions | None:
    """Return what a network predicts for the test images; `None` for texts, populations and outputs without classes."""
    data = setup.data
    if isinstance(data, TextData) or state.key.ndim > 1:
        return None
    outputs = predicted(state, setup.test_data, step=setup.plain_step)
    if not all(isinstance(one, Tensor) and one.ndim == 2 for one in outputs):
        return None
    return Predictions(torch.cat(outputs).cpu(), data.test_targets, data.test_inputs)


def predict(kept: KeptRun, *, checkpoint: Which = "newest", out: File | None = None) -> None:
    """Write the classes that a run's checkpoint predicts; of a text, the next characters.

    Args:
        kept: The run.
        checkpoint: Name of the checkpoint, or one of these.
        out: CSV file (default: standard output).

    Examples:
        python -m purecompose predict runs/a --out predictions.csv
    """
    if out is not None:
        check_target("--out", out)
    kept.check_single("can predict")
    settings, data = kept.completed(checkpoint)
    with arithmetic_of(settings):
        run = at_checkpoint(kept.run, checkpoint, settings, data)
        rows = list(_predicted(run))
    with reported_as("--out"):
        opened = nullcontext(sys.stdout) if out is None else Path(out).open("w", newline="", encoding="utf-8")
    with opened as file:
        writer = csv.writer(file)
        writer.writerow(["index", "class", "probability", "target"])
        writer.writerows([index, found, f"{share:.6f}", target] for index, (found, share, target) in enumerate(rows))
    if out is not None:
        say(f"{len(rows):,} predictions of {with_urls(run.checkpoint)} in {out}")


def _predicted(run: _Trained) -> Iterator[tuple[Any, float, Any]]:
    """Yield class, probability and target of each example, or of each position of a text, as characters."""
    data = run.setup.data
    named = data.vocabulary.characters if isinstance(data, TextData) else range(data.num_classes)
    # Batch by batch, because each character of a text has as many probabilities as the vocabulary has characters.
    for batch in run.setup.test_data:
        (outputs,) = predicted(run.state, [batch], step=run.setup.plain_step)
        shares, classes = (found.flatten().tolist() for found in outputs.softmax(1).max(1))
        targets = batches.get(batch, run.state.context.target_field).flatten().tolist()
        yield from zip([named[one] for one in classes], shares, [named[one] for one in targets], strict=True)


_FORMS: Mapping[str, Callable[[State, Any, Path], Path]] = {
    ".onnx": lambda state, inputs, path: saving.export_onnx(state, inputs, path, dynamic_shapes=_any_batch()),
    ".pt2": lambda state, inputs, path: saving.export_program(state, inputs, path, dynamic_shapes=_any_batch()),
    ".safetensors": lambda state, inputs, path: saving.save_weights(state, path),
}
"""The functions that write a file, by its ending."""


def export(
    kept: KeptRun,
    *,
    out: list[File],
    checkpoint: Which = "newest",
    weights: Annotated[str, Shown("NAME")] | None = None,
) -> None:
    """Write the network of a run's checkpoint to files for other programs.

    Args:
        kept: The run.
        out: File, whose ending gives its form: *.onnx; *.pt2 for torch.export; *.safetensors for the weights alone; may
            be repeated.
        checkpoint: Name of the checkpoint, or one of these.
        weights: Write the averages of a method instead, such as ema.

    Examples:
        python -m purecompose export runs/a --out net.onnx
        python -m purecompose export runs/a --checkpoint best --out net.pt2 --out net.safetensors --weights ema

    Networks are in evaluation mode, and accept batches of any size if their code does.
    """
    for path in out:
        if Path(path).suffix.lower() not in _FORMS:
            raise UsageError(f"--out: {path}: expected a file name that ends in {', '.join(_FORMS)}")
        check_target("--out", path)
    kept.check_single("can be exported")
    settings, data = kept.completed(checkpoint)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names packages that are not installed
    with arithmetic_of(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporters
        trained = at_checkpoint(kept.run, checkpoint, settings, data)
        state = trained.state.to("cpu")
        with reported_as("--weights"):
            state = state if weights is None else with_weights(state, weights)
        first = next(iter(trained.setup.test_data.to("cpu")))
        inputs = batches.get(first, state.context.input_field)[:2]  # sizes of 1 would become constants
        for path in out:
            with reported_as("--out", OSError):
                _FORMS[Path(path).suffix.lower()](state, inputs, Path(path))
            say(f"{with_urls(trained.checkpoint)} in {path}")


def _any_batch() -> Any:
    """Return dynamic shapes in which the first size of the only argument is open."""
    return ({0: torch.export.Dim.AUTO},)
