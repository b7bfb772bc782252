"""`train`: a run from its settings to the table at its end."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from purecompose.cli.kinds import TEXT, follows
from purecompose.cli.resuming import changes, check_model, check_seed, earlier_settings, told_as_settings
from purecompose.cli.settings import UsageError, chosen, command_of
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, plain_warnings, prepare, reported_as
from purecompose.cli.telling import checksum, describe, print_results
from purecompose.fit import fit
from purecompose.observers import History, NaNs, Progress, Stopwatch
from purecompose.runs import RunFolder
from purecompose.saving import CheckpointError, Checkpoints


__all__ = ["RunError", "train"]


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
    earlier = earlier_settings(out, is_asked=options.resume)
    settings, data = completed(chosen(options, earlier))
    check_seed(settings, earlier)
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        setup = prepare(settings, data)
        check_model(settings, earlier)
        if options.plan:
            print(setup.step.plan(setup.state, next(iter(setup.train_data))))
            return
        told = nullcontext() if options.traceback else _told_in_one_line(setup)
        with told, told_as_settings(settings, earlier, out):
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
            print("\n".join([*describe(setup, settings), *changes(settings, earlier)]), flush=True)
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
        length = setup.state.timestamp.run.duration
        print(f"the run in {out} was at its end already, {length}; a longer --duration goes on with it")
    print_results(setup, state, history, stopwatch, settings, out)


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
