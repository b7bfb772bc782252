"""`train`: a run from its settings to the final table, or one that is resumed with those it began with."""

import argparse
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from purecompose._support import specs
from purecompose._support.messages import say
from purecompose.cli.kinds import TEXT, follows
from purecompose.cli.own import allowed_by
from purecompose.cli.processes import Processes, processes_here
from purecompose.cli.settings import SETTINGS, UsageError
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, plain_warnings, prepare, reported_as
from purecompose.cli.sources import chosen, command_of, read_config
from purecompose.cli.telling import checksum, describe, print_results
from purecompose.core.state import State
from purecompose.errors import CheckpointError, MismatchError
from purecompose.nn.models import MODELS
from purecompose.observers import History, NaNs, Progress, Stopwatch
from purecompose.records import RunFolder
from purecompose.run.fit import fit
from purecompose.run.saving import Checkpoints
from purecompose.run.saving.folder import CHECKPOINTS, name_at
from purecompose.surgery.summary import summary
from purecompose.transforms.population import unstack_states
from purecompose.transforms.sharding.placing import whole


class RunError(Exception):
    """An error that has stopped a run, or files that are missing from its folder, in one line."""


def train(options: argparse.Namespace) -> None:
    """Train with the given options, show the progress, and print a table at the end."""
    processes = processes_here()
    if options.fast_dev_run and (options.out is not None or options.resume):
        raise UsageError("--fast-dev-run: it trains one batch and keeps nothing; leave out --out and --resume")
    with processes.folder(options.out, is_divided=options.shard is not None) as out:
        _train(options, out, processes)


def _train(options: argparse.Namespace, out: Path | None, processes: Processes) -> None:
    earlier = earlier_settings(out, is_asked=options.resume)
    settings, data = completed(chosen(options, earlier), allowed=allowed_by(options))
    check_seed(settings, earlier)
    if options.fast_dev_run:
        settings |= {"duration": "1ba", "limit_batches": "1"}
    with fixed_arithmetic(settings["threads"]), plain_warnings(), processes.joined(settings["device"]):
        setup = prepare(settings, data, processes, options.shard)
        check_model(settings, earlier)
        if options.plan or options.summary:
            batch = next(iter(setup.train_data))
            first = setup.state if settings["seeds"] == 1 else unstack_states(setup.state)[0]
            say(setup.step.plan(setup.state, batch) if options.plan else summary(first, batch))
            return
        if options.recipe is not None and not options.traceback:
            _check_recipe(options.recipe, settings, setup)
        reported = nullcontext() if options.traceback else _reported_in_one_line(setup)
        with reported, reported_as_settings(settings, earlier, out):
            _run(options, settings, setup, out, earlier, processes)


def _run(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    setup: Setup,
    out: Path | None,
    earlier: Mapping[str, Any],
    processes: Processes,
) -> None:
    history, stopwatch = History(), Stopwatch()
    # A population continues after a NaN, because its other networks are not affected.
    observers: list[Any] = [history, stopwatch, NaNs(action="raise" if settings["seeds"] == 1 else "warn")]
    kept: dict[str, Any] = {} if out is None else {"checkpoints": _checkpoints(out, settings, setup)}
    with ExitStack() as stack:
        folder = None
        if out is not None:
            if processes.is_first:
                folder = _folder(out, options, settings, setup)
            kept["resume"] = processes.of_first((folder and folder.resume) or "", setup.state.device) or None
        if folder is not None:
            stack.enter_context(folder)
            observers.append(folder.observer)
            folder.begin(setup.step, setup.state, next(iter(setup.train_data)))
        if not options.quiet and processes.is_first:
            say("\n".join([*describe(setup, settings), *changes(settings, earlier)]), flush=True)
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
        state = whole(state)
        if folder is not None:
            folder.finish({"checksum": checksum(state.params)})
    if folder is not None and folder.goes_on and not stopwatch.batches:
        length = setup.state.timestamp.run.duration
        done = "" if folder.was_complete else ", and its folder is complete now"
        say(f"the run in {options.out} had already ended, after {length}{done}; continue it with a longer --duration")
    missing = () if folder is None else _missing(folder, state)
    print_results(setup, state, history, stopwatch, settings, out, missing, options.out)
    if missing:
        raise RunError(
            f"the run in {options.out} is incomplete: {', '.join(missing)} could not be written (see the warnings)"
        )


def _missing(folder: RunFolder, state: State) -> tuple[str, ...]:
    """Return the files of a finished run that could not be written, including the last checkpoint."""
    last = f"{CHECKPOINTS}/{name_at(state.timestamp)}"
    return folder.unwritten if (folder.path / last).is_dir() else (last, *folder.unwritten)


def _checkpoints(out: Path, settings: Mapping[str, Any], setup: Setup) -> Checkpoints:
    with reported_as("--keep"):
        keep = settings["keep"] if settings["keep"] == "log" else _positive(settings["keep"])
    with reported_as("--checkpoint-every"):
        best = f"{setup.watched}/{setup.kind.decides}" if settings["seeds"] == 1 else None
        return Checkpoints(out / CHECKPOINTS, settings["checkpoint_every"], keep, best)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text}: expected a number of checkpoints, at least 1, or log")
    return int(text)


def _folder(out: Path, options: argparse.Namespace, settings: Mapping[str, Any], setup: Setup) -> RunFolder:
    typed = {**settings, "vocabulary": None} if follows(setup.data) else settings
    with reported_as("--out"):
        try:
            return RunFolder(out, settings, command=command_of(typed, options.out), resume=options.resume)
        except FileExistsError as error:
            raise ValueError(str(error).removeprefix("RunFolder: ").replace("resume=True", "--resume")) from error
        except OSError as error:
            raise ValueError(str(error).removeprefix("RunFolder: ")) from error


@contextmanager
def _reported_in_one_line(setup: Setup) -> Iterator[None]:
    """Turn an error of a step into a `RunError` of one line; errors that the command line reports itself pass."""
    try:
        yield
    except (UsageError, ImportError, OSError, CheckpointError, FloatingPointError, RunError):
        raise
    except Exception as error:
        raise RunError(f"{_in_one_line(error, setup)} (--traceback shows where in the code)") from error


def _in_one_line(error: Exception, setup: Setup) -> str:
    """Return an error of a step as text, with its algorithm or stage, and whether a method had changed the inputs."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
    if _changed_inputs(error, setup) is not None:
        kind = "int64" if setup.kind is TEXT else ""
        shape = list(setup.data.in_shape)
        notes.append(f"the network was made for inputs {kind}{shape}, which a method has changed")
    text = f"{type(error).__name__}: {error}".partition("\n\n")[0]
    return "; ".join(" ".join(part.split()) for part in (text, *notes))


def _changed_inputs(error: Exception, setup: Setup) -> list[str] | None:
    """Return the sizes of an example that the forward pass failed on, if they or the dtype differ from the data's.

    They are read from the note about the stage, "... (int64[32, 128], ...)".
    """
    for note in getattr(error, "__notes__", ()):
        if note.startswith("in the stage forward"):
            dtype, _, sizes = note.partition("(")[2].partition("]")[0].partition("[")
            found = sizes.split(", ")[1:]
            if (setup.kind is TEXT and dtype != "int64") or found != [str(size) for size in setup.data.in_shape]:
                return found
    return None


def _check_recipe(name: str, settings: Mapping[str, Any], setup: Setup) -> None:
    """Try one step with a recipe and discard its state; the images are smallest in the first step."""
    try:
        setup.plain_step(setup.state, next(iter(setup.train_data)))
    except torch.OutOfMemoryError:
        return  # the run may slice the batch
    except (RuntimeError, TypeError, ValueError) as error:
        found, model = _changed_inputs(error, setup), specs.parse_one(settings["model"]).name
        hint = "" if model.startswith("resnet") else "; try --model resnet20"
        if setup.kind is TEXT:
            why = f"{name} is a recipe for images, but the data are a text; give methods with --algorithms"
        elif found is not None:
            sizes = ("x".join(sizes) for sizes in (found[1:], map(str, setup.data.in_shape[1:])))
            why = f"{name} begins with images of {' instead of '.join(sizes)}, which {model} does not accept{hint}"
        else:
            why = f"{name} does not fit {model} and these data{hint}"
        raise UsageError(
            f"--recipe: {why} ({_in_one_line(error, setup).partition('; in the stage forward')[0]})"
        ) from error


_CAUSES = {
    "duration": ("duration", "scale_schedule"),
    "batches_per_epoch": ("data", "length", "batch_size", "limit_batches", "validation"),
}
"""Settings that can cause a difference of a checkpoint, by the name of the difference; `_OF_STATE` for all others."""
_OF_STATE = ("data", "length", "vocabulary", "algorithms", "optimizer", "precision")
_MOST_LINES = 12


def earlier_settings(out: Path | None, *, is_asked: bool) -> dict[str, Any]:
    """Return the settings of the resumed run; empty if there is none."""
    if not is_asked:
        return {}
    if out is None:
        raise UsageError("--resume: give the folder of the run, --out FOLDER")
    config = out / "config.toml"
    return read_config(config, option="") if config.exists() else {}


def check_seed(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Raise a `UsageError` if a run is resumed with other seeds, because the keys of its draws cannot change."""
    for name in ("seed", "seeds"):
        if name in earlier and earlier[name] != settings[name]:
            raise UsageError(
                f"--{name}: the run continues with {earlier[name]}, as it began; for another one choose another --out"
            )


def check_model(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Raise a `UsageError` if a run is resumed with another network, even one that its tensors fit."""
    if "model" in earlier and _options(earlier["model"]) != _options(settings["model"]):
        raise UsageError(
            f"--model: {earlier['model']} in the run, {settings['model']} here; for another one choose another --out"
        )


def _options(model: str) -> tuple[str, dict[str, Any]]:
    """Return a network's name and all its options, including defaults."""
    call = specs.parse_one(model)
    parameters = inspect.signature(MODELS[call.name]).parameters.values() if call.name in MODELS else ()
    return call.name, {**{one.name: one.default for one in parameters}, **call.kwargs}


def changes(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[str]:
    """Return a line with the settings that differ from the resumed run's, in a list that is empty if none do."""
    changed = [name for name in SETTINGS if earlier and earlier.get(name) != settings[name]]
    reported = [f"{SETTINGS[name].option} {settings[name]} ({earlier.get(name, 'not set')} before)" for name in changed]
    return [f"  continues with {', '.join(reported)}"] if reported else []


@contextmanager
def reported_as_settings(settings: Mapping[str, Any], earlier: Mapping[str, Any], out: Path | None) -> Iterator[None]:
    """Name the settings that make a checkpoint unfit in the error, before the resulting differences of tensors."""
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
            "\n  ".join([f"{out} cannot continue with other settings:", *lines])
            + "\nleave these options out, or choose another --out; "
            + "\n  ".join([f"differences, of {len(error.differences)} in all:", *found]),
            error.differences,
        ) from error
