"""`train`: a run from its settings to the final table, or one that is resumed with those it began with."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from purecompose._support import specs
from purecompose._support.messages import say
from purecompose.cli.options import Folder, Shown, UsageError, option_of, reported_as
from purecompose.cli.parts import Processes, kept_of, processes_here
from purecompose.cli.results import predictions_of, ranked_in
from purecompose.cli.settings import Given, Settings, command_of, read_config
from purecompose.cli.setup import TEXT, Setup, arithmetic_of, completed, prepare
from purecompose.core.state import State
from purecompose.data import TextData
from purecompose.errors import CheckpointError
from purecompose.observers import (
    CSV,
    History,
    MLflow,
    NaNs,
    Progress,
    Recorder,
    Stopwatch,
    TensorBoard,
    WandB,
    learning_rate,
    speed,
)
from purecompose.records import RunFolder
from purecompose.records.folder import is_run
from purecompose.records.layout import CONFIG, REPORT, checked_settings, to_toml
from purecompose.records.report import number
from purecompose.run.fit import fit
from purecompose.run.saving.folder import CHECKPOINTS, name_at
from purecompose.saving import Checkpoints
from purecompose.transforms.compilation import CompiledStep
from purecompose.transforms.fully_sharded import whole


class RunError(Exception):
    """An error that has stopped a run, or files that are missing from its folder, in one line."""


def _tensorboard(out: Path | None, _: Any, folder: str | None = None, *, every: str = "1ba") -> Recorder:
    return TensorBoard(_place("tensorboard", folder, out), every=every, monitors=_monitors())


def _csv(out: Path | None, _: Any, file: str | None = None, *, every: str = "1ba") -> Recorder:
    return CSV(_place("metrics.csv", file, out), every=every, monitors=_monitors())


def _wandb(out: Path | None, config: Mapping[str, Any], *, every: str = "1ba", **settings: Any) -> Recorder:
    named = {} if out is None else {"name": out.name}
    return WandB(settings={"config": dict(config), **named, **settings}, every=every, monitors=_monitors())


def _mlflow(out: Any, _: Any, run_id: str | None = None, *, every: str = "1ba") -> Recorder:
    del out
    return MLflow(run_id, every=every, monitors=_monitors())


_TRACKERS: Mapping[str, Callable[..., Recorder]] = {
    "csv": _csv,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def train(
    given: Given,
    *,
    out: Folder | None = None,
    resume: bool = False,
    print_config: bool = False,
    quiet: bool = False,
    tracker: list[Annotated[str, Shown("TRACKER", tuple(_TRACKERS))]] | None = None,
    shard: Annotated[Literal["step", "layer"], Shown(bare="step")] | None = None,
    traceback: bool = False,
) -> None:
    """Train a network and show its accuracy, speed and checksum.

    Args:
        given: The settings of the run.
        out: Keep records, checkpoints and a report there.
        resume: With --out: continue the run there, if one exists.
        print_config: Print the complete settings as TOML, which --config reads, and do not train.
        quiet: Print only the final table.
        tracker: Also log to a tracker, tensorboard or wandb(project='digits'); may be repeated. Files are in --out,
            unless the call names a path.
        shard: Under torchrun: divide parameters and the optimizer's memory among the processes, and gather parameters
            once a step, or layer by layer (default without a value: step).
        traceback: If a step fails, show the traceback and not only one line.

    Examples:
        python -m purecompose train --duration 5ep --out runs/a
        python -m purecompose train --config runs/a/config.toml --set optimizer.lr=0.01 --set mixup.alpha=0.4
        python -m purecompose train --out runs/a --resume
        python -m purecompose train --recipe mild --print-config > mild.toml
        python -m purecompose train --out runs/b --tracker tensorboard --tracker "wandb(project='digits')"
    """
    processes = processes_here()
    with processes.folder(out, is_divided=shard is not None) as folder, ExitStack() as stack:
        if folder is not None and processes.is_first and not print_config:
            with _about_out():
                is_run(folder, resume)
        trackers_of(tracker or (), folder, {})  # raises before the data are loaded
        earlier = _earlier_settings(folder) if resume else {}
        found = given.chosen(earlier)
        settings, data = completed(found, allowed=given.allowed)
        _check_unchanged(settings, earlier)
        if print_config:
            say(to_toml(checked_settings(dataclasses.asdict(settings), "")) if processes.is_first else "", end="")
            return
        stack.enter_context(arithmetic_of(settings))
        stack.enter_context(processes.joined(settings.device))
        setup = prepare(settings, data, processes, shard)
        stack.enter_context(nullcontext() if traceback else _reported_in_one_line())
        # A text's vocabulary usually follows from its file.
        typed = settings if "vocabulary" in given.chosen() else dataclasses.replace(settings, vocabulary=None)
        place = None if folder is None else _Place(folder, str(out), command_of(typed, out), resume)
        trackers = trackers_of(tracker or (), folder, dataclasses.asdict(settings)) if processes.is_first else []
        _run(settings, setup, place, processes, None if quiet else changes(settings, earlier), trackers)


class _Place(NamedTuple):
    path: Path
    """Its folder, or the local copy of one in remote storage."""
    named: str
    """The folder as the user has given it."""
    command: str
    """The command that repeats the run."""
    resume: bool

    def opened(self, settings: Settings) -> RunFolder:
        with _about_out():
            return RunFolder(self.path, dataclasses.asdict(settings), command=self.command, resume=self.resume)


@contextmanager
def _about_out() -> Iterator[None]:
    """Turn errors about the run's folder into usage errors about --out."""
    with reported_as("--out"):
        try:
            yield
        except OSError as error:
            text = str(error).removeprefix("RunFolder: ").replace("resume=True", "--resume")
            raise ValueError(text) from error


def _run(
    settings: Settings,
    setup: Setup,
    place: _Place | None,
    processes: Processes,
    head: Sequence[str] | None,
    trackers: Sequence[Recorder],
) -> None:
    """Train, and print the results; `head` are lines to show before, `None` to show no progress."""
    history, stopwatch = History(), Stopwatch()
    # A population continues after a NaN, because its other networks are not affected.
    observers: list[Any] = [history, stopwatch, NaNs(action="raise" if settings.seeds == 1 else "warn")]
    kept: dict[str, Any] = {}
    folder = None
    with ExitStack() as stack:
        if place is not None:
            best = f"{setup.watched}/{setup.kind.decides}" if settings.seeds == 1 else None
            newest = Checkpoints(place.path / CHECKPOINTS, settings.checkpoint_every, kept_of(settings))
            with reported_as("--keep-best"):
                kept["checkpoints"] = dataclasses.replace(newest, best=best, keep_best=settings.keep_best)
            folder = place.opened(settings) if processes.is_first else None
            kept["resume"] = processes.of_first((folder and folder.resume) or "", setup.state.device) or None
        if folder is not None:
            stack.enter_context(folder)
            observers.append(folder.observer)
            folder.begin(setup.step, setup.state, next(iter(setup.train_data)))
        observers += [stack.enter_context(tracker) for tracker in trackers]
        if head is not None and processes.is_first:
            say("\n".join([*_described(setup, settings), *head]), flush=True)
            observers.append(stack.enter_context(Progress()))
        state = whole(
            fit(
                setup.step,
                setup.state,
                setup.train_data,
                evaluate=setup.evaluators,
                observers=observers,
                stop=setup.stop,
                microbatches=setup.microbatches,
                **kept,
            )
        )
        if folder is not None:
            shown = predictions_of(setup, state) if processes.size == 1 and stopwatch.batches else None
            folder.finish({"checksum": checksum(state.params)}, predictions=shown)
    missing: tuple[str, ...] = ()
    if folder is not None and place is not None:
        if folder.is_resumed and not stopwatch.batches:
            done = f"after {setup.state.timestamp.run.duration}"
            done += "" if folder.was_complete else ", and its folder is complete now"
            say(f"the run in {place.named} had already ended, {done}; continue it with a longer --duration")
        last = f"{CHECKPOINTS}/{name_at(state.timestamp)}"
        missing = folder.unwritten if (folder.path / last).is_dir() else (last, *folder.unwritten)
    print_results(setup, state, history, stopwatch, settings, place, missing)
    if missing and place is not None:
        raise RunError(
            f"the run in {place.named} is incomplete: {', '.join(missing)} could not be written (see the warnings)"
        )


@contextmanager
def _reported_in_one_line() -> Iterator[None]:
    """Turn an error of a step into a `RunError` of one line; errors that the command line reports itself pass."""
    try:
        yield
    except (UsageError, ImportError, OSError, CheckpointError, FloatingPointError, RunError):
        raise
    except Exception as error:
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
        text = f"{type(error).__name__}: {error}".partition("\n\n")[0]
        line = "; ".join(" ".join(part.split()) for part in (text, *notes))
        raise RunError(f"{line} (--traceback shows where in the code)") from error


_FIXED = ("seed", "seeds", "model")
"""Settings that a resumed run keeps: the keys of its draws cannot change, nor its network, even if the tensors fit."""


def _earlier_settings(out: Path | None) -> dict[str, Any]:
    """Return the settings of the resumed run; empty if there is none."""
    if out is None:
        raise UsageError("--resume: give the folder of the run, --out FOLDER")
    return read_config(out / CONFIG, option="") if (out / CONFIG).exists() else {}


def _check_unchanged(settings: Settings, earlier: Mapping[str, Any]) -> None:
    """Raise a `UsageError` if a run is resumed with other settings that cannot change."""
    for name in _FIXED:
        before, now = earlier.get(name), getattr(settings, name)
        is_equal = before in (None, now) or (name == "model" and specs.parse_one(str(before)) == specs.parse_one(now))
        if not is_equal:
            raise UsageError(
                f"{option_of(name)}: {before} in the run, {now} here; for another one choose another --out"
            )


def changes(settings: Settings, earlier: Mapping[str, Any]) -> list[str]:
    """Return a line with the settings that differ from the resumed run's, in a list that is empty if none do."""
    now = dataclasses.asdict(settings)
    changed = [name for name in now if earlier and earlier.get(name) != now[name]]
    reported = [f"{option_of(name)} {now[name]} ({earlier.get(name, 'not set')} before)" for name in changed]
    return [f"  continues with {', '.join(reported)}"] if reported else []


def _described(setup: Setup, settings: Settings) -> list[str]:
    """Return the lines before the first batch: the numbers of examples and weights, device, duration and algorithms."""
    state, train_data, data, members = setup.state, setup.train_data, setup.data, settings.seeds
    size = sum(tensor.numel() for tensor in state.params.values()) // members
    networks = f"{members} networks of {size:,} weights" if members > 1 else f"{size:,} weights"
    lines = [
        f"{train_data.num_examples:,} {setup.kind.noun} in batches of {train_data.batch_size}, "
        f"{networks} on {state.device}, {state.timestamp.run.duration}"
    ]
    if isinstance(data, TextData):
        lines.append(
            f"  a window is {data.in_shape[0]} characters, the vocabulary has {data.num_classes}; the text's last "
            f"{len(data.test_targets):,} windows are for testing"
        )
    return [*lines, *(f"  {algorithm!r}" for algorithm in setup.step.algorithms)]


def print_results(
    setup: Setup,
    state: State,
    history: History,
    stopwatch: Stopwatch,
    settings: Settings,
    place: _Place | None = None,
    missing: Sequence[str] = (),
) -> None:
    """Print the table at the end; `missing` are the files that could not be written."""
    from rich.console import Console
    from rich.table import Table

    kind = setup.kind
    table = Table(show_header=False)
    for name in ("loss", *kind.metrics) if kind is TEXT else kind.metrics:
        table.add_row(f"test {name}", number(history.series(f"eval/{name}")[1][-1], name))
    if place is not None and settings.seeds == 1:
        where = " on validation data" if setup.watched == "val" else ""
        best = ranked_in(place.path / CHECKPOINTS, setup.kind)[: settings.keep_best]
        rows = [f"{number(value, kind.decides)}{where}, {path.name}" for path, value in best]
        if rows:
            table.add_row(f"best checkpoint{'s' * (len(rows) > 1)}", "\n".join(rows))
    if setup.stop and not state.timestamp.is_finished():
        table.add_row("stopped early", f"the loss has not improved for {settings.patience}")
    evaluating = stopwatch.seconds - stopwatch.training_seconds
    compiling = setup.step.variants().seconds if isinstance(setup.step, CompiledStep) else 0.0
    spent = [f"evaluation {evaluating:.1f} s", *([f"compilation {compiling:.1f} s"] if compiling else [])]
    rate = stopwatch.batches / max(stopwatch.training_seconds - compiling, 1e-9)
    table.add_row("time", f"{stopwatch.seconds:.1f} s ({', '.join(spent)})")
    table.add_row("steps", f"{stopwatch.batches:,}, {rate:.1f} per second{' after compiling' if compiling else ''}")
    threads = f"{settings.threads} thread{'s' * (settings.threads != 1)}"
    on = threads if state.device.type == "cpu" else str(state.device)
    table.add_row("parameters' checksum", f"{checksum(state.params)} ({on})")
    if place is not None and REPORT not in missing:
        table.add_row("report", f"{place.named}/{REPORT}")
    for i, name in enumerate(missing):
        table.add_row("" if i else "could not be written", name)
    Console(highlight=False).print(table)


def checksum(params: Mapping[str, Tensor]) -> str:
    """Return a short hash of names, dtypes, shapes and bits of tensors, by which 0.0 and -0.0 differ."""
    digest = hashlib.sha256()
    for name, tensor in sorted(params.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def trackers_of(texts: Iterable[str], out: Path | None, settings: Mapping[str, Any]) -> list[Recorder]:
    """Return the trackers that calls name, with the folder and settings of the run."""
    made = {name: partial(factory, out, settings) for name, factory in _TRACKERS.items()}
    with reported_as("--tracker", TypeError, ValueError):
        calls = [call for text in texts for call in specs.parse(text)]
        return [specs.build(call, made, "tracker") for call in calls]


def _monitors() -> list[Any]:
    return [learning_rate(), speed()]


def _place(name: str, given: str | None, out: Path | None) -> Path:
    """Return the place that a call names, or by default one in the run's folder."""
    if given is None and out is None:
        raise ValueError(f"give a path in the call, or the run's folder, --out FOLDER, for {name} in it")
    return Path(given) if given is not None else Path(out or ".", name)
