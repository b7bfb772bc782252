"""The command line: `python -m purecompose train`, `evaluate`, `replay`, `plan`, `check`, `algorithms` and others.

Each command is a function: its signature gives the options, its docstring the help (`purecompose.cli.options`).
"""

import argparse
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from typing import Any, Literal

import torch

from purecompose import __version__
from purecompose._support.device import processor
from purecompose._support.messages import required, say
from purecompose.algorithms import FACTORIES
from purecompose.cli.analysis import ablate, bisect, compare, lr_range, replay, sweep
from purecompose.cli.options import Parser, UsageError, add_options, arguments_of, examples_of, option_of, summary_of
from purecompose.cli.parts import reporting
from purecompose.cli.reports import algorithms, check, plan, report, runs
from purecompose.cli.results import LoadedRun as LoadedRun, evaluate, export, load_run as load_run, local_copy, predict
from purecompose.cli.settings import meant_setting
from purecompose.cli.training import RunError, train
from purecompose.errors import CheckpointError


_EPILOG = """\
examples:
  python -m purecompose train
  python -m purecompose train --algorithms "mixup(alpha=0.4),label_smoothing" --seed 1
  python -m purecompose train --out runs/first            a folder with records, checkpoints and a report
  python -m purecompose train --out runs/first --resume   continue where it was stopped, to the same bits
  python -m purecompose train --help                      all settings; each command has its examples

exit status: 0; 1 if a package is missing, a step fails, a checkpoint cannot be used, the last checkpoint or the
report cannot be written, or a law is broken; 2 after a usage error; 130 after Ctrl-C and 143 after SIGTERM, with the
run saved if it has a folder.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default with the process's arguments, and return the exit status that the help describes."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser, commands = _make_parser()
    prog = f"{parser.prog} {words[0]}" if words and words[0] in commands else parser.prog
    try:
        if words and (command := commands.get(words[0])) is not None:
            command.check_options(words[1:], _meant)
        options = parser.parse_args(words)
        status = _run(_COMMANDS[options.command], vars(options))
        sys.stdout.flush()
    except UsageError as error:
        _report(prog, error, f"error: {error}")
        return 2
    except (ImportError, CheckpointError, FloatingPointError, RunError) as error:
        if isinstance(error, ImportError) and (error.name or "").startswith("purecompose"):
            raise
        _report(prog, error, f"error: {error}")
        return 1
    except KeyboardInterrupt as error:
        _report(prog, error, f"interrupted{_ending(str(error))}")
        return 130
    except SystemExit as error:
        if error.code != 143:
            raise
        _report(prog, error, f"terminated{_ending(*getattr(error, '__notes__', ()))}")
        return 143
    except BrokenPipeError:
        # The reader has closed the pipe (`... | head`). Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status or 0


def _run(command: Callable[..., int | None], given: dict[str, Any]) -> int | None:
    """Run a command with its options; runs in remote storage are read from there. A warning is one line, said once."""
    said: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in said:
            said.add(str(message))
            say(f"warning: {message}", file=sys.stderr)

    with ExitStack() as stack, warnings.catch_warnings():
        warnings.showwarning = show
        for name in ("run", "run_a", "run_b"):
            if given.get(name) is not None:
                given[name] = local_copy(given[name], stack)
        if "runs" in given:
            given["runs"] = [local_copy(run, stack) for run in given["runs"]]
        return command(**arguments_of(command, given))


def _report(prog: str, error: BaseException, text: str) -> None:
    """Print why a command ends; of several processes, one does so."""
    with reporting(error) as prefix:
        if prefix is not None:
            say(f"{prog}: {prefix}{text}", file=sys.stderr, flush=True)


def _meant(name: str) -> str:
    """Return a hint about an option that does not exist: the setting, or the argument of one, that it may mean."""
    return meant_setting(name, lambda one: f"--set {one}=..." if "." in one else option_of(one))


def _ending(*said: str) -> str:
    """Return the end of a message: the actions before the process ended."""
    text = " ".join(said).replace("resume='auto'", "the same command with --resume")
    return f": {text}" if text else ""


def _make_parser() -> tuple[argparse.ArgumentParser, Mapping[str, Parser]]:
    """Return the parser, and the parsers of its commands by name."""
    form: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    summary = "Train small networks with speed-up methods that are pure functions."
    parser = Parser(prog="python -m purecompose", description=summary, epilog=_EPILOG, **form)
    parser.add_argument("--version", action="version", version=f"purecompose {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        words = {"help": summary_of(command), "description": summary_of(command), "epilog": examples_of(command)}
        add_options(commands.add_parser(name, **words, **form), command)
    return parser, commands.choices


def completion(shell: Literal["bash", "zsh", "fish", "tcsh"]) -> None:
    """Print a completion script for a shell.

    Args:
        shell: The shell.

    Examples:
        python -m purecompose completion bash > ~/.local/share/bash-completion/completions/purecompose
        python -m purecompose completion zsh > ~/.zfunc/_purecompose
        python -m purecompose completion fish > ~/.config/fish/completions/purecompose.fish

    A shell completes the first word of a line: `purecompose train ...`, the same program as `python -m purecompose`.
    """
    shtab = required("completion", "'purecompose[cli]'", "shtab")
    if shell not in shtab.SUPPORTED_SHELLS:
        raise UsageError(f"the installed shtab does not support {shell}; try `pip install --upgrade shtab`")
    parser, commands = _make_parser()
    files = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "RUN": shtab.DIRECTORY}
    for action in (action for command in commands.values() for action in command._actions):
        names = tuple(FACTORIES) if action.metavar == "ALGORITHM" else getattr(action, "names", ())
        if action.metavar in files:
            action.complete = files[action.metavar]  # pyright: ignore
        elif names:
            action.choices = names
    parser.prog = "purecompose"
    say(shtab.complete(parser, shell=shell, root_prefix="purecompose"))


def env() -> None:
    """Print what runs depend on here, for the report of a problem.

    Examples:
        python -m purecompose env
    """
    packages = {re.split(r"[^\w.-]", one)[0] for one in metadata.requires("purecompose") or ()}
    found = {"purecompose": __version__, "python": platform.python_version()}
    for name in sorted(packages):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found |= {"system": platform.platform(), "processor": processor(), "threads": f"{torch.get_num_threads()}"}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found |= {name: one for name, one in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
    say("\n".join(f"{name}: {one}" for name, one in found.items()))


_SETTINGS = ("PURECOMPOSE_", "TORCH", "PYTORCH_", "CUDA_", "NCCL_", "OMP_", "MKL_", "MALLOC_")

_COMMANDS: dict[str, Callable[..., int | None]] = {
    command.__name__.replace("_", "-"): command
    for command in (
        train,
        evaluate,
        predict,
        export,
        runs,
        report,
        replay,
        bisect,
        compare,
        ablate,
        sweep,
        lr_range,
        plan,
        algorithms,
        completion,
        env,
        check,
    )
}
