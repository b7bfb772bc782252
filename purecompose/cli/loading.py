"""A run that has a folder, at one of its checkpoints."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from purecompose.cli.kinds import Data, Kind
from purecompose.cli.settings import UsageError, settings_of
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, prepare
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data import Arrays
from purecompose.run.saving import load, newest
from purecompose.run.saving.folder import CHECKPOINTS, all_in, read_index
from purecompose.run.saving.index import Index


__all__ = ["LoadedRun", "Trained", "index_of", "load_run", "settings_for", "trained"]


class LoadedRun(NamedTuple):
    """What `load_run` finds."""

    state: State
    """At the checkpoint; `to_module(state)` is its network."""
    step: Step
    """The step that trains it, with the run's algorithms; not compiled."""
    train_data: Arrays
    """The run's batches for training, an iterable for `fit`."""
    test_data: Arrays
    """Those for evaluation."""
    checkpoint: Path
    """Its folder."""


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
    """Load what `python -m purecompose train --out FOLDER` has trained.

    The command line fixes threads and kernels for a run; here they are the process's own, so training that continues
    here, and not by `--resume`, may do so to other bits.

    Args:
        run: The run's folder, or that of one of its checkpoints.
        checkpoint: "newest", "best", or a checkpoint's name; with the folder of a checkpoint nothing but that one.
        data: In place of the data that the run was trained on, as for `--data`.
        allow_imports: Whether code that the run's settings name, `my_module:name`, may be imported, and so run.

    Raises:
        UsageError: There is no such run or checkpoint, its data are gone, or its settings name code that may not be
            imported; the best one of a population, or of checkpoints that have no number to tell it by.
        CheckpointError: The checkpoint cannot be used.
        ImportError: A package that the data need is missing.

    Example::

        run = load_run("runs/first", "best")
        net = purecompose.to_module(run.state)
        outputs = run.state.forward(images)
        state = purecompose.fit(run.step, run.state, run.train_data, duration="60ep")
    """
    settings = settings_for(run, None if data is None else str(data))
    settings, found = completed(settings, allowed=None if allow_imports else ())
    with fixed_arithmetic(settings["threads"]):
        setup, state, place = trained(run, checkpoint, settings, found)
    return LoadedRun(state, setup.plain_step, setup.train_data, setup.test_data, place)


def settings_for(run: str | Path, data: str | None) -> dict[str, Any]:
    """Return the settings of a run, with the data that it is asked about."""
    folder, _ = _places(run)
    return {**settings_of(folder), **({} if data is None else {"data": data})}


def trained(run: str | Path, checkpoint: str, settings: Mapping[str, Any], data: Data) -> Trained:
    """Return a run as its complete settings say, at one of its checkpoints."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has shown the warnings of initialisation
        setup = prepare(settings, data)
    path = _checkpoint(run, checkpoint, setup.kind)
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
    """Return the run's folder, and that of its checkpoints or of the one that was named."""
    path = Path(run)
    if (path / "index.json").exists():
        return path.resolve().parent.parent, path  # "." tells nothing of its parents
    return path, path / CHECKPOINTS


def _chosen(folder: Path, which: str, kind: Kind) -> Path:
    """Return a run's newest checkpoint, its best, or the one of that name."""
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
    """Return the best checkpoint; of equal ones the earliest, which `Checkpoints` keeps. NaN is never the best."""
    names = (f"val/{kind.decides}", f"eval/{kind.decides}")
    reported = {
        one.path: next((one.index.metrics[name] for name in names if name in one.index.metrics), None)
        for one in reversed(all_in(folder)[0])
    }
    if any(isinstance(value, list) for value in reported.values()):
        raise UsageError(
            f"--checkpoint: {folder} is of a population, each network of which has a best one of its own; give newest, "
            "or a checkpoint's name"
        )
    rated = {
        path: kind.rating(value)
        for path, value in reported.items()
        if isinstance(value, (int, float)) and not math.isnan(value)
    }
    if not rated:
        raise UsageError(
            f"--checkpoint: no checkpoint in {folder} has a number for {kind.decides}, which tells the best one; give "
            "newest, or a checkpoint's name"
        )
    return max(rated, key=lambda path: rated[path])


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")
