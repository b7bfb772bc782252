"""The command line: `python -m purecompose train`, `plan`, `check` and `algorithms`.

A usage error prints one line to standard error and gives the exit status 2; a missing package gives 1, and so does a
law that `check` finds broken.
"""

import argparse
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import NoReturn

from purecompose import __version__, _specs as specs
from purecompose.algorithms import FACTORIES
from purecompose.cli.setup import UsageError
from purecompose.cli.train import show_plan, train as run_training
from purecompose.models import MODELS


__all__ = ["main"]

_EPILOG = """\
examples:
  python -m purecompose train
  python -m purecompose train --algorithms "mixup(alpha=0.4),label_smoothing" --seed 1
  python -m purecompose train --algorithms none --model mlp --optimizer "sgd(lr=0.1, momentum=0.9)"
  python -m purecompose train --data mnist.npz
  python -m purecompose plan --at 0.6dur
  python -m purecompose check my_module:my_algorithm
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 0, 1 where a package is missing or `check` finds a law broken, 2 after a usage error, 130
        after an interrupt.
    """
    parser = _make_parser()
    prog = parser.prog
    try:
        options = parser.parse_args(argv)
        prog = f"{prog} {options.command}"
        status = options.run(options)
        sys.stdout.flush()
    except UsageError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        if error.name is not None and error.name.startswith("purecompose"):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone (`... | head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status or 0


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, where argparse prints the whole usage first."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help shows the options)")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m purecompose",
        description="Trains small networks with speed-up methods that are pure functions.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"purecompose {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, help_text, run in (
        ("train", "train a network and show its accuracy, speed and checksum", run_training),
        ("plan", "show which algorithms would act at which events, in what order and why", _plan),
        ("algorithms", "list the algorithms with their parameters", _list_algorithms),
    ):
        command = commands.add_parser(name, help=help_text, description=f"{help_text}.", allow_abbrev=False)
        command.set_defaults(run=run)
        if name != "algorithms":
            _add_run_options(command)
        if name == "train":
            command.add_argument("--plan", action="store_true", help="print the plan and exit")
            command.add_argument("--quiet", action="store_true", help="print the final table alone")
        if name == "plan":
            command.add_argument(
                "--at",
                default="0ba",
                metavar="TIME",
                help="the point of the run: 0.6dur, 5ep, ... (the start)",
            )
            command.add_argument(
                "--conflicts",
                action="store_true",
                help="show instead which pairs of --algorithms do not commute, and what decides their order; "
                "my_module:my_algorithm may be among them",
            )
    help_text = "try the laws that every algorithm keeps on one of your own"
    command = commands.add_parser("check", help=help_text, description=f"{help_text}.", allow_abbrev=False)
    command.set_defaults(run=_check)
    _add_check_options(command)
    return parser


def _add_run_options(command: argparse.ArgumentParser) -> None:
    """What defines a run, and so the bits of its result."""
    add = command.add_argument
    add("--data", default="digits", help="digits, an MNIST-like .npz file, or a folder of IDX files (digits)")
    add("--model", help=f"{', '.join(MODELS)}; with options: cnn(width=8) (cnn)")
    add(
        "--algorithms",
        metavar="LIST",
        help="names with or without arguments, separated by commas, or none (mixup,label_smoothing,selective_backprop)",
    )
    add("--optimizer", metavar="CALL", help="sgd, adam or adamw: sgd(lr=0.1, momentum=0.9) (by data size)")
    add("--schedule", metavar="CALL", help="of the learning rate: cosine, linear or constant (by data size)")
    add("--duration", metavar="TIME", help="the run's length: 20ep, 500ba or 10000sp (by data size)")
    add("--batch-size", type=int, metavar="N", help="examples in a batch (by data size)")
    add("--microbatches", type=int, default=1, metavar="N", help="slices of a batch, to save memory (1)")
    add("--seed", type=int, default=0, metavar="N", help="of weights, data order and all draws (0)")
    add("--device", default="cpu", help="cpu, cuda, mps, ... (cpu)")
    add("--threads", type=int, metavar="N", help="CPU threads; other numbers give other bits (by data size)")


def _add_check_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "algorithms",
        nargs="+",
        metavar="ALGORITHM",
        help='my_module:my_algorithm, a shipped one as a call such as "mixup(0.2)", or all for all shipped ones',
    )
    add("--neutral", metavar="ALGORITHM", help="the same with settings that should change nothing")
    add("--tasks", metavar="LIST", help="names of tasks, separated by commas (all that the algorithm accepts)")
    add("--laws", metavar="LIST", help="names of laws, separated by commas (all that apply)")
    add("--examples", type=int, default=25, metavar="N", help="cases for each law (25)")
    add("--seed", type=int, default=0, metavar="N", help="of the cases (0)")
    add("--json", metavar="PATH", help="write the reports there as JSON; - for standard output, instead of tables")
    add("--quiet", action="store_true", help="print one line for each algorithm")


def _check(options: argparse.Namespace) -> int:
    return _with_hypothesis("check", "check:check")(options)


def _plan(options: argparse.Namespace) -> None:
    if options.conflicts:
        _with_hypothesis("plan --conflicts", "conflicts:show_conflicts")(options)
    else:
        show_plan(options)


def _with_hypothesis(command: str, place: str) -> Callable[[argparse.Namespace], int]:
    """A command from a file of its own, which imports what the other commands run without.

    Raises:
        ImportError: hypothesis is missing.
    """
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'{command} needs hypothesis; install it with `pip install "purecompose[testing]"`'
        ) from error
    file, _, name = place.partition(":")
    return getattr(importlib.import_module(f"purecompose.cli.{file}"), name)


def _list_algorithms(options: argparse.Namespace) -> None:
    del options
    for name, factory in sorted(FACTORIES.items()):
        call = specs.describe(name, inspect.signature(factory))
        print(textwrap.fill(call, 100, subsequent_indent=" " * (len(name) + 1)))
        summary = (inspect.getdoc(factory) or "").partition("\n\n")[0]
        print(textwrap.fill(" ".join(summary.split()), 100, initial_indent="    ", subsequent_indent="    "))
