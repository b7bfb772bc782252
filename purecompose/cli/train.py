"""`train` and `plan`: what the command line does with a run."""

import argparse
import hashlib
import inspect
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purecompose import _specs as specs
from purecompose.cli.kinds import TEXT, follows
from purecompose.cli.settings import SETTINGS, UsageError, chosen, command_of, read_config, settings_of
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, plain_warnings, prepare, reported_as
from purecompose.data import TextData
from purecompose.fit import fit
from purecompose.models import MODELS
from purecompose.observers import History, NaNs, Progress, Stopwatch
from purecompose.runs import RunFolder
from purecompose.saving import CheckpointError, Checkpoints, MismatchError
from purecompose.state import State
from purecompose.time import Time, TimeUnit
from purecompose.time.units import snapped


__all__ = ["RunError", "checksum", "show_plan", "train"]


class RunError(Exception):
    """What has stopped a run, in one line."""


def train(options: argparse.Namespace) -> None:
    """Trains as the options say, shows how it goes and ends with a table.

    Raises:
        UsageError: An option that cannot be.
        ImportError: A package that the data or the display needs is missing.
        RunError: A step has failed; with `--traceback` what it raised itself.
    """
    out = None if options.out is None else Path(options.out)
    earlier = _earlier(out, is_asked=options.resume)
    settings, data = completed(chosen(options, earlier))
    _check_seed(settings, earlier)
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        setup = prepare(settings, data)
        _check_model(settings, earlier)
        if options.plan:
            print(setup.step.plan(setup.state, next(iter(setup.train_data))))
            return
        told = nullcontext() if options.traceback else _told_in_one_line(setup)
        with told, _told_as_settings(settings, earlier, out):
            _run(options, settings, setup, out, earlier)


def _run(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    setup: Setup,
    out: Path | None,
    earlier: Mapping[str, Any],
) -> None:
    history, stopwatch = History(), Stopwatch()
    # A population goes on with those of its networks that are well.
    observers: list[Any] = [history, stopwatch, NaNs(action="raise" if settings["seeds"] == 1 else "warn")]
    kept: dict[str, Any] = {} if out is None else {"checkpoints": _checkpoints(out, settings, setup)}
    with ExitStack() as stack:
        folder = None if out is None else _folder(out, settings, setup, is_resumed=options.resume)
        if folder is not None:
            stack.enter_context(folder)
            observers.append(folder.observer)
            kept["resume"] = folder.resume
            folder.begin(setup.step, setup.state, next(iter(setup.train_data)))
        if not options.quiet:
            print("\n".join([*_describe(setup, settings), *_changes(settings, earlier)]), flush=True)
            observers.append(stack.enter_context(Progress()))
        state = fit(
            setup.step,
            setup.state,
            setup.train_data,
            evaluate=setup.evaluators,
            observers=observers,
            stop=setup.stop,
            microbatches=setup.microbatches,
            **kept,
        )
        if folder is not None:
            folder.finish({"checksum": checksum(state.params)})
    if folder is not None and folder.goes_on and not stopwatch.batches:
        print(f"the run in {out} was at its end already, {settings['duration']}; a longer --duration goes on with it")
    _print_results(setup, state, history, stopwatch, settings, out)


def show_plan(options: argparse.Namespace) -> None:
    """Prints which algorithms act at which events at a point of the run, one that has a folder or one to come.

    Raises:
        UsageError: An option that cannot be, or a folder that is no run's.
        ImportError: A package that the data need is missing.
    """
    settings, data = completed(chosen(options, {} if options.run is None else settings_of(Path(options.run))))
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        setup = prepare(settings, data)
        with reported_as("--at"):
            state = _moved(setup, options.at)
        print(setup.step.plan(state, next(iter(setup.train_data))))


def checksum(params: Mapping[str, Tensor]) -> str:
    """A short hash over the names, dtypes, shapes and bits of tensors: equal where all bits are equal.

    Example:
        >>> zero, negative_zero = torch.tensor([0.0]), torch.tensor([-0.0])
        >>> checksum({"w": zero}) == checksum({"w": negative_zero})
        False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(params.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _earlier(out: Path | None, *, is_asked: bool) -> dict[str, Any]:
    """The settings of the run that goes on, if there is one."""
    if not is_asked:
        return {}
    if out is None:
        raise UsageError("--resume: say which run, --out FOLDER")
    config = out / "config.toml"
    return read_config(config, option="") if config.exists() else {}


def _check_seed(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Raises where a run is to go on with what it began with, and cannot change: the key of all its draws."""
    for name in ("seed", "seeds"):
        if name in earlier and earlier[name] != settings[name]:
            raise UsageError(
                f"--{name}: the run goes on with {earlier[name]}, as it began; another one needs another --out"
            )


def _check_model(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Raises where a run is to go on with another network, also with one that its tensors would fit."""
    if "model" in earlier and _options(earlier["model"]) != _options(settings["model"]):
        raise UsageError(
            f"--model: {earlier['model']} in the run, {settings['model']} here; another network needs another --out"
        )


def _options(model: str) -> tuple[str, dict[str, Any]]:
    """A network's name and all its options, those that nobody gave included."""
    call = specs.parse_one(model)
    parameters = inspect.signature(MODELS[call.name]).parameters.values() if call.name in MODELS else ()
    return call.name, {**{one.name: one.default for one in parameters}, **call.kwargs}


def _changes(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[str]:
    """One line on the settings that differ from those of the run that goes on."""
    changed = [name for name in SETTINGS if earlier and earlier.get(name) != settings[name]]
    told = [f"{SETTINGS[name].option} {settings[name]} ({earlier.get(name, 'not set')} before)" for name in changed]
    return [f"  goes on with {', '.join(told)}"] if told else []


def _checkpoints(out: Path, settings: Mapping[str, Any], setup: Setup) -> Checkpoints:
    with reported_as("--keep"):
        if settings["keep"] < 1:
            raise ValueError(f"{settings['keep']}: expected at least 1")
    with reported_as("--checkpoint-every"):
        best = f"{setup.watched}/{setup.kind.decides}" if settings["seeds"] == 1 else None
        return Checkpoints(out / "checkpoints", settings["checkpoint_every"], settings["keep"], best)


def _folder(out: Path, settings: Mapping[str, Any], setup: Setup, *, is_resumed: bool) -> RunFolder:
    typed = {**settings, "vocabulary": None} if follows(setup.data) else settings
    with reported_as("--out"):
        try:
            return RunFolder(out, settings, command=command_of(typed, out), resume=is_resumed)
        except FileExistsError as error:
            raise ValueError(str(error).removeprefix("RunFolder: ").replace("resume=True", "--resume")) from error
        except OSError as error:
            raise ValueError(str(error).removeprefix("RunFolder: ")) from error


_CAUSES = {"duration": ("duration",), "batches_per_epoch": ("data", "length", "batch_size", "validation")}
"""The settings that a difference may come from; another one comes from those of the network and its training."""
_OF_STATE = ("data", "length", "vocabulary", "algorithms", "optimizer", "precision")
_MOST_LINES = 12


@contextmanager
def _told_as_settings(settings: Mapping[str, Any], earlier: Mapping[str, Any], out: Path | None) -> Iterator[None]:
    """Says which settings make a checkpoint unfit, before what that does to its tensors."""
    try:
        yield
    except MismatchError as error:
        blamed = {name for line in error.differences for name in _CAUSES.get(line.partition(":")[0], _OF_STATE)}
        changed = [name for name in SETTINGS if name in blamed and earlier.get(name) != settings[name]]
        if not changed:
            raise
        lines = [f"{SETTINGS[name].option}: {earlier.get(name)} in the run, {settings[name]} here" for name in changed]
        found = error.differences[:_MOST_LINES]
        raise MismatchError(
            "\n  ".join([f"{out} cannot go on with other settings:", *lines])
            + "\nleave them out, or choose another --out; "
            + "\n  ".join([f"what does not fit, of {len(error.differences)}:", *found]),
            error.differences,
        ) from error


@contextmanager
def _told_in_one_line(setup: Setup) -> Iterator[None]:
    """Says what was raised and in which algorithm or stage; what the command line reports by itself passes."""
    try:
        yield
    except (UsageError, ImportError, OSError, CheckpointError, FloatingPointError):
        raise
    except Exception as error:
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
        if any(note.startswith("in the stage forward") and _was_changed(note, setup) for note in notes):
            kind = "int64" if setup.kind is TEXT else ""
            shape = list(setup.data.in_shape)
            notes.append(f"the network was made for inputs {kind}{shape}, which a method has changed")
        text = f"{type(error).__name__}: {error}".partition("\n\n")[0]
        parts = [" ".join(part.split()) for part in (text, *notes)]
        raise RunError(f"{'; '.join(parts)} (--traceback shows where in the code)") from error


def _was_changed(note: str, setup: Setup) -> bool:
    """Whether a note about a stage, "... (int64[32, 128], ...)", shows other inputs than the data are."""
    dtype, _, sizes = note.partition("(")[2].partition("]")[0].partition("[")
    is_other = setup.kind is TEXT and dtype != "int64"
    return is_other or sizes.split(", ")[1:] != [str(size) for size in setup.data.in_shape]


def _moved(setup: Setup, at: str) -> State:
    """The state as if it stood at a point of its run; the counters alone move."""
    state = setup.state
    batches, length = _in_batches(setup, Time.of(at)), _in_batches(setup, state.timestamp.run.duration)
    if batches is None or batches < 0:
        raise ValueError(f"{at}: expected a point of the run, such as 0.6dur, 5ep or 100ba")
    if length is not None and batches > length:
        raise ValueError(f"{at}: the run ends before, after {length:g} batches")
    samples = setup.train_data.batch_size
    return state.replace(timestamp=state.timestamp.advance_by(int(batches), samples, samples * _tokens(setup)))


def _in_batches(setup: Setup, time: Time | None) -> float | None:
    """A time as a number of batches, each as large as the loader's."""
    run, samples = setup.state.timestamp.run, setup.train_data.batch_size
    if time is None or (time.unit is TimeUnit.TOKEN and not _tokens(setup)):
        return None
    if time.unit is TimeUnit.DURATION:
        length = _in_batches(setup, run.duration)
        return None if length is None else snapped(time.value * length)
    sizes = {TimeUnit.SAMPLE: samples, TimeUnit.TOKEN: samples * _tokens(setup)}
    return time.value / sizes[time.unit] if time.unit in sizes else run.in_batches(time)


def _tokens(setup: Setup) -> int:
    """How many tokens an example has; images have none."""
    return setup.data.in_shape[0] if setup.kind is TEXT else 0


def _describe(setup: Setup, settings: Mapping[str, Any]) -> list[str]:
    state, train_data = setup.state, setup.train_data
    members = settings["seeds"]
    size = sum(tensor.numel() for tensor in state.params.values()) // members
    networks = f"{members} networks of {size:,} weights" if members > 1 else f"{size:,} weights"
    return [
        f"{train_data.num_examples:,} {setup.kind.noun} in batches of {train_data.batch_size}, "
        f"{networks} on {state.device}, {state.timestamp.run.duration}",
        *_describe_text(setup),
        *(f"  {algorithm!r}" for algorithm in setup.step.algorithms),
    ]


def _describe_text(setup: Setup) -> list[str]:
    if not isinstance(setup.data, TextData):
        return []
    length, num_tested = setup.data.in_shape[0], len(setup.data.test_targets)
    return [
        f"  a window is {length} characters out of {setup.data.num_classes}; the text's last {num_tested:,} windows "
        f"are for testing; {setup.data.num_dropped:,} characters fill no window"
    ]


def _print_results(
    setup: Setup, state: State, history: History, stopwatch: Stopwatch, settings: Mapping[str, Any], out: Path | None
) -> None:
    from rich.console import Console
    from rich.table import Table

    evaluating = stopwatch.seconds - stopwatch.training_seconds
    threads = settings["threads"]
    on = f"{threads} thread{'s' * (threads > 1)}" if state.device.type == "cpu" else str(state.device)
    table = Table(show_header=False)
    for name in ("loss", *setup.kind.metrics) if setup.kind is TEXT else setup.kind.metrics:
        table.add_row(f"test {name}", _shown(name, history.series(f"eval/{name}")[1][-1]))
    decides = setup.kind.decides
    at, values = history.series(f"{setup.watched}/{decides}")
    best = max(values, key=setup.kind.rating) if settings["seeds"] == 1 else None
    if best is not None and (setup.watched == "val" or best != values[-1]):
        name = "best validation" if setup.watched == "val" else "best"
        table.add_row(f"{name} {decides}", f"{_shown(decides, best)}, after batch {at[values.index(best)]}")
        if out is not None:
            table.add_row("", f"evaluate {out} --checkpoint best")
    if setup.stop and not state.timestamp.is_finished():
        table.add_row("stopped early", f"the loss has not become better for {settings['patience']}")
    table.add_row("time", f"{stopwatch.seconds:.1f} s, {evaluating:.1f} s of it for evaluation")
    table.add_row("steps", f"{stopwatch.batches:,}, {stopwatch.batches_per_second:.1f} a second")
    table.add_row("parameters' checksum", f"{checksum(state.params)} ({on})")
    if out is not None:
        table.add_row("report", str(out / "report.html"))
    Console(highlight=False).print(table)


def _shown(name: str, value: Any) -> str:
    """A metric of one network, or what a population's have in common."""
    form = ".2%" if name == "accuracy" else ".4g"
    if not isinstance(value, list):
        return f"{value:{form}}"
    mean, spread = statistics.fmean(value), statistics.stdev(value)
    return f"{mean:{form}} on average, spread {spread:{form}} ({min(value):{form}} to {max(value):{form}})"
