"""Loading of a run from its folder, at one of its checkpoints."""

import argparse
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from purecompose._support.urls import is_remote, with_urls
from purecompose.cli.kinds import Data, Kind
from purecompose.cli.settings import UsageError
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, prepare
from purecompose.cli.sources import settings_of
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data import Arrays
from purecompose.errors import CheckpointWarning
from purecompose.records.layout import COMMAND, CONFIG, HISTORY, PLAN, RECORDS, RESULT, VERSIONS
from purecompose.run.saving import load, newest
from purecompose.run.saving.files import Index
from purecompose.run.saving.folder import CHECKPOINTS, INDEX, all_in, read_index
from purecompose.run.saving.remote import fetched


_STATE = (CONFIG, INDEX)
_HISTORY = (*_STATE, RECORDS)
_READ = {
    "evaluate": _STATE,
    "predict": _STATE,
    "plan": (CONFIG,),
    "plot": (CONFIG, COMMAND, VERSIONS, PLAN, HISTORY, RECORDS, RESULT),
    **dict.fromkeys(("replay", "explain", "bisect", "compare", "sensitivity"), _HISTORY),
}
"""Names of the files that a command reads of a run in remote storage, besides the tensors of checkpoints."""


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


class Trained(NamedTuple):
    """A run's state at one of its checkpoints."""

    setup: Setup
    state: State
    checkpoint: Path


def load_run(
    run: str | Path,
    checkpoint: str = "newest",
    *,
    data: str | Path | None = None,
    allow_imports: bool = False,
) -> LoadedRun:
    """Load a run that was trained by `python -m purecompose train --out FOLDER`.

    The command line fixes threads and kernels for a run. This function does not, so training that continues from its
    result, instead of by `--resume`, may produce other bits.

    Args:
        run: The run's folder, or the folder of one of its checkpoints; or the URL of one.
        checkpoint: "newest", "best", or a checkpoint's name. If `run` is the folder of a checkpoint, only that one.
        data: Data to use instead of those that the run was trained on, as for `--data`.
        allow_imports: True to allow importing, and so running, code that the run's settings name, `my_module:name`.

    Raises:
        UsageError: There is no such run or checkpoint, its data are missing, or its settings name code that may not be
            imported; or "best" is given for a population, or for checkpoints without the metric that decides.
        CheckpointError: The checkpoint cannot be used.
        ImportError: A package that the data need is missing.

    Example::

        run = load_run("runs/first", "best")
        net = purecompose.to_module(run.state)
        outputs = run.state.forward(images)
        state = purecompose.fit(run.step, run.state, run.train_data, duration="60ep")
    """
    with fetched(run, _STATE) as folder:
        settings = settings_for(folder, None if data is None else str(data))
        settings, found = completed(settings, allowed=None if allow_imports else ())
        with fixed_arithmetic(settings["threads"]):
            setup, state, path = trained(folder, checkpoint, settings, found)
        place = with_urls(path) if is_remote(run) else path
    return LoadedRun(state, setup.plain_step, setup.train_data, setup.test_data, place)


@contextmanager
def local_runs(options: argparse.Namespace) -> Iterator[None]:
    """Replace runs that are given to a command by a URL by local copies, of what the command needs.

    Raises:
        UsageError: There is nothing at a URL, or it cannot be read.
    """
    with ExitStack() as stack:

        def local(run: str) -> str:
            return str(stack.enter_context(fetched(run, _READ[options.command]))) if is_remote(run) else run

        try:
            if getattr(options, "run", None) is not None:
                options.run = local(options.run)
            if hasattr(options, "runs"):
                options.runs = [local(run) for run in options.runs]
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from error
        yield


def settings_for(run: str | Path, data: str | None) -> dict[str, Any]:
    """Return the settings of a run, with other `data` if given."""
    folder, _ = _places(run)
    return {**settings_of(folder), **({} if data is None else {"data": data})}


def trained(run: str | Path, checkpoint: str, settings: Mapping[str, Any], data: Data) -> Trained:
    """Return the run that complete settings define, at one of its checkpoints."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has shown the warnings of initialisation
        setup = prepare(settings, data)
    path = _checkpoint(run, checkpoint, setup.kind)
    with warnings.catch_warnings():  # no run continues, and a run of several processes is usually read by one
        warnings.filterwarnings("ignore", ".* continues, perhaps not to the same bits", CheckpointWarning)
        return Trained(setup, load(path, setup.state, step=setup.step), path)


def index_of(run: str | Path, checkpoint: str, kind: Kind) -> Index:
    """Return a checkpoint's description."""
    return read_index(_checkpoint(run, checkpoint, kind))


def _checkpoint(run: str | Path, checkpoint: str, kind: Kind) -> Path:
    _, folder = _places(run)
    if not (folder / "index.json").exists():
        return _chosen(folder, checkpoint, kind)
    if checkpoint not in ("newest", folder.resolve().name):
        raise UsageError(f"--checkpoint: {run} is a checkpoint itself; for {checkpoint} give the run's folder")
    return folder


def _places(run: str | Path) -> tuple[Path, Path]:
    """Return the run's folder, and the folder of its checkpoints, or of one checkpoint if `run` is one."""
    path = Path(run)
    if (path / "index.json").exists():
        return path.resolve().parent.parent, path  # resolved, because the path may be "."
    return path, path / CHECKPOINTS


def _chosen(folder: Path, which: str, kind: Kind) -> Path:
    """Return a run's newest checkpoint, its best one, or the one with the given name."""
    if which not in ("newest", "best"):
        if not (folder / which / "index.json").exists():
            known = sorted(path.name for path in folder.glob("*") if not _is_hidden(path))
            raise UsageError(f"--checkpoint: {folder} has no {which}; there are {', '.join(known) or 'none'}")
        return folder / which
    found = newest(folder)
    if found is None:
        raise UsageError(f"there is no checkpoint in {folder}: has the run written one yet?")
    return found if which == "newest" else _best(folder, kind)


def _best(folder: Path, kind: Kind) -> Path:
    """Return the best checkpoint; among equal ones, the earliest, which `Checkpoints` keeps. NaN is never the best."""
    names = (f"val/{kind.decides}", f"eval/{kind.decides}")
    reported = {
        one.path: next((one.index.metrics[name] for name in names if name in one.index.metrics), None)
        for one in reversed(all_in(folder)[0])
    }
    if any(isinstance(value, list) for value in reported.values()):
        raise UsageError(
            f"--checkpoint: {folder} is of a population, in which each network has its own best checkpoint; give "
            "newest, or a checkpoint's name"
        )
    rated = {
        path: kind.rating(value)
        for path, value in reported.items()
        if isinstance(value, (int, float)) and not math.isnan(value)
    }
    if not rated:
        raise UsageError(
            f"--checkpoint: no checkpoint in {folder} has a number for {kind.decides}, which selects the best one; "
            "give newest, or a checkpoint's name"
        )
    return max(rated, key=lambda path: rated[path])


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")
