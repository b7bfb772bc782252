"""The command line: `python -m purecompose train`, `evaluate`, `replay`, `plan`, `check`, `algorithms` and others.

After a usage error, which prints one line to standard error, the exit status is 2. It is 1 if a package is missing, a
step of `train` raises an error, or `check` finds a law broken.
"""

import argparse
import importlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from purecompose import __version__
from purecompose._support import specs
from purecompose._support.messages import say
from purecompose.algorithms import FACTORIES, GROUPS
from purecompose.cli.analysis import COMMANDS as ANALYSIS, EXAMPLES as ANALYSIS_EXAMPLES
from purecompose.cli.completion import SHELLS, script
from purecompose.cli.experiments import COMMANDS as EXPERIMENTS, EXAMPLES as EXPERIMENT_EXAMPLES
from purecompose.cli.loading import LoadedRun, load_run, local_runs
from purecompose.cli.plan import show_plan
from purecompose.cli.processes import SHARDINGS, reporting
from purecompose.cli.settings import UsageError, add_allow_imports, add_settings, named, whole
from purecompose.cli.setup import reported_as
from purecompose.cli.train import RunError, train as run_training
from purecompose.errors import CheckpointError


__all__ = ["LoadedRun", "load_run", "main"]

_EPILOG = """\
examples:
  python -m purecompose train
  python -m purecompose train --algorithms "mixup(alpha=0.4),label_smoothing" --seed 1
  python -m purecompose train --algorithms none --model mlp --optimizer "sgd(lr=0.1, momentum=0.9)"
  python -m purecompose train --out runs/first            a folder with records, checkpoints and a report
  python -m purecompose train --out runs/first --resume   continue where it was stopped, to the same bits
  python -m purecompose train --seeds 8 --out runs/eight  eight networks at once
  python -m purecompose train --data book.txt --out runs/text
  python -m purecompose evaluate runs/first --checkpoint best
  python -m purecompose plot runs/first runs/eight --out curves.png
  python -m purecompose explain runs/first --at 1234ba
  python -m purecompose ablate --algorithms mixup,sam
  python -m purecompose plan --at 0.6dur
  python -m purecompose algorithms mixup
  python -m purecompose check my_module:my_algorithm

exit status: 0; 1 if a package is missing, a step fails, a checkpoint cannot be used, the last checkpoint or the
report cannot be written, or a law is broken; 2 after a usage error; 130 after Ctrl-C and 143 after SIGTERM, with the
run saved if it has a folder.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 0 after success; 1 if a package is missing, a step fails, a checkpoint cannot be used, the last
        checkpoint or the report cannot be written, or `check` finds a law broken; 2 after a usage error; 130 after an
        interrupt; 143 after SIGTERM.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser, commands = _make_parser()
    prog = f"{parser.prog} {words[0]}" if words and words[0] in commands else parser.prog
    try:
        options, unknown = parser.parse_known_args(words)
        if unknown:
            _refuse(unknown, commands[options.command])
        with local_runs(options):
            status = options.act(options)
        sys.stdout.flush()
    except UsageError as error:
        _report(prog, error, f"error: {error}")
        return 2
    except ImportError as error:
        if error.name is not None and error.name.startswith("purecompose"):
            raise
        _report(prog, error, f"error: {error}")
        return 1
    except (CheckpointError, FloatingPointError, RunError) as error:
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


def _report(prog: str, error: BaseException, text: str) -> None:
    """Print why a command ends; of several processes, one does so."""
    with reporting(error) as prefix:
        if prefix is not None:
            say(f"{prog}: {prefix}{text}", file=sys.stderr, flush=True)


def _ending(*said: str) -> str:
    """Return the end of a message: the actions before the process ended."""
    text = " ".join(said).replace("resume='auto'", "the same command with --resume")
    return f": {text}" if text else ""


class _Parser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line, without the whole usage that argparse prints first."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help shows the options)")


_INSTEAD = {"epochs": "--duration 3ep", "lr": "--set optimizer.lr=0.01"}
"""Options that other programs have, and what the commands that train have instead."""


def _refuse(unknown: Sequence[str], command: argparse.ArgumentParser) -> NoReturn:
    """Raise a `UsageError` that suggests an option."""
    # Compared without the dashes, which all options share.
    known = {option.lstrip("-"): option for option in command._option_string_actions}
    name = unknown[0].partition("=")[0].lstrip("-")
    is_settable = name in _INSTEAD and "duration" in known
    hint = f" write {_INSTEAD[name]}" if is_settable else specs.did_you_mean(name, known, shown=known)
    command.error(f"unrecognized arguments: {' '.join(unknown)}{';' if hint else ''}{hint}")


def _make_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and the parsers of its commands by name."""
    parser = _Parser(
        prog="python -m purecompose",
        description="Train small networks with speed-up methods that are pure functions.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"purecompose {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, help_text, act, add_options in (
        ("train", "train a network and show its accuracy, speed and checksum", _train, _add_train_options),
        ("evaluate", "show the metrics of a run's checkpoint", _of_results("show_evaluation"), _add_evaluate_options),
        (
            "predict",
            "write the classes that a run's checkpoint predicts, or continue a text",
            _of_results("show_predictions"),
            _add_predict,
        ),
        ("plot", "draw the curves of one or several runs", _of_results("show_plot"), _add_plot_options),
        *ANALYSIS,
        *EXPERIMENTS,
        ("plan", "show which algorithms would act at which events, in what order and why", _plan, _add_plan_options),
        ("algorithms", "list the algorithms, or show the card of one", _list_algorithms, _add_card_options),
        ("completion", "print a completion script for a shell", _complete, _add_shell),
        ("check", "test your own algorithm against the laws that every algorithm keeps", _check, _add_check_options),
    ):
        command = commands.add_parser(
            name,
            help=help_text,
            description=f"{help_text}.",
            epilog=_EXAMPLES.get(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(act=act)
        add_options(command)
    return parser, commands.choices


_EXAMPLES = {
    **ANALYSIS_EXAMPLES,
    **EXPERIMENT_EXAMPLES,
    "train": """\
examples:
  python -m purecompose train --duration 5ep --out runs/a
  python -m purecompose train --config runs/a/config.toml --set optimizer.lr=0.01 --set mixup.alpha=0.4
  python -m purecompose train --out runs/a --resume
""",
    "evaluate": "example:\n  python -m purecompose evaluate runs/a --checkpoint best --json\n",
    "predict": """\
examples:
  python -m purecompose predict runs/a --out predictions.csv
  python -m purecompose predict runs/text --prompt "ROMEO:" --length 500
""",
    "plot": "example:\n  python -m purecompose plot runs/a runs/b --out curves.png\n",
    "plan": """\
examples:
  python -m purecompose plan --algorithms mixup,cutmix --at 0.6dur
  python -m purecompose plan runs/a
  python -m purecompose plan --conflicts --algorithms mixup,label_smoothing
""",
    "algorithms": "example:\n  python -m purecompose algorithms mixup\n",
    "check": """\
examples:
  python -m purecompose check my_module:my_algorithm
  python -m purecompose check "mixup(0.2)" --laws draws_keyed,compiled_agrees
""",
    "completion": """\
examples:
  python -m purecompose completion bash > ~/.local/share/bash-completion/completions/purecompose
  python -m purecompose completion zsh > ~/.zfunc/_purecompose
  python -m purecompose completion fish > ~/.config/fish/completions/purecompose.fish

A shell completes the first word of a line: `purecompose train ...`, the same program as `python -m purecompose`.
These are the shells that shtab writes for and that were tried.
""",
}


def _add_train_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=named, metavar="FOLDER", help="keep records, checkpoints and a report")
    command.add_argument("--resume", action="store_true", help="with --out: continue the run there, if one exists")
    command.add_argument("--plan", action="store_true", help="print the plan and exit")
    command.add_argument("--summary", action="store_true", help="print the network's layers and exit")
    command.add_argument(
        "--fast-dev-run",
        action="store_true",
        help="train and evaluate one batch each, without writing files; methods that start later do not act",
    )
    command.add_argument("--quiet", action="store_true", help="print only the final table")
    command.add_argument(
        "--shard",
        nargs="?",
        const="step",
        choices=SHARDINGS,
        help="under torchrun: divide parameters and the optimizer's memory among the processes, and gather parameters "
        "once a step, or layer by layer (default without a value: step)",
    )
    command.add_argument(
        "--traceback", action="store_true", help="if a step fails, show the traceback and not only one line"
    )
    add_settings(command)


def _add_plan_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", nargs="?", metavar="RUN", help="the folder of a run whose settings to use")
    command.add_argument(
        "--at", default="0ba", metavar="TIME", help="the point of the run: 0.6dur, 5ep, ... (default: the start)"
    )
    command.add_argument(
        "--conflicts",
        action="store_true",
        help="show instead which pairs of --algorithms (also my_module:my_algorithm) do not commute, and what decides "
        "their order",
    )
    add_settings(command)


def _add_checkpoint_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="the folder of a run, or of one of its checkpoints")
    command.add_argument(
        "--checkpoint", default="newest", metavar="NAME", help="newest, best or a checkpoint's name (default: newest)"
    )
    command.add_argument("--data", help="other data of the same form (default: those of the run)")
    add_allow_imports(command)


def _add_evaluate_options(command: argparse.ArgumentParser) -> None:
    _add_checkpoint_options(command)
    command.add_argument("--length", type=whole, metavar="N", help="for text: window length (default: the run's)")
    command.add_argument("--json", action="store_true", help="print one line of JSON")


def _add_predict(command: argparse.ArgumentParser) -> None:
    _add_checkpoint_options(command)
    command.add_argument(
        "--out", type=named, metavar="FILE", help="a CSV file, or a text file with --prompt (default: standard output)"
    )
    command.add_argument(
        "--prompt", metavar="TEXT", help="for a language model: write a continuation of this text, not a CSV"
    )
    command.add_argument("--length", type=whole, metavar="N", help="with --prompt: characters to add (default: 200)")
    command.add_argument("--seed", type=whole, metavar="N", help="with --prompt: seed of the draws (default: 0)")


def _add_plot_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    command.add_argument(
        "--out",
        default="curves.png",
        type=named,
        metavar="FILE",
        help="the image file, *.png, *.svg or *.pdf (default: curves.png)",
    )
    command.add_argument(
        "--x",
        default="batch",
        choices=("batch", "epoch", "time/sample", "time/token", "time/seconds"),
        help="column along the horizontal axis (default: batch)",
    )


def _add_card_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", metavar="NAME", help="the algorithm to show")


def _add_shell(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _add_check_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "algorithms",
        nargs="+",
        metavar="ALGORITHM",
        help='my_module:my_algorithm, a call of a shipped one such as "mixup(0.2)", or all for all shipped ones',
    )
    add("--neutral", metavar="ALGORITHM", help="the same algorithm with settings that should change nothing")
    add("--tasks", metavar="LIST", help="names of tasks, separated by commas (default: all that the algorithm accepts)")
    add("--laws", metavar="LIST", help="names of laws, separated by commas (default: all that apply)")
    add("--max-examples", type=whole, default=25, metavar="N", help="cases for each law (default: 25)")
    add("--seed", type=whole, default=0, metavar="N", help="seed of the cases (default: 0)")
    add(
        "--json",
        metavar="PATH",
        help="write the reports to this file as JSON; - for standard output, instead of tables",
    )
    add("--quiet", action="store_true", help="print one line for each algorithm")


def _check(options: argparse.Namespace) -> int:
    return _with_hypothesis("check", "check")(options)


def _train(options: argparse.Namespace) -> None:
    run_training(options)


def _of_results(name: str) -> Callable[[argparse.Namespace], None]:
    """Return a command about existing runs; its module is imported when it runs."""
    return lambda options: getattr(importlib.import_module("purecompose.cli.results"), name)(options)


def _complete(options: argparse.Namespace) -> None:
    say(script(_make_parser()[0], options.shell))


def _plan(options: argparse.Namespace) -> None:
    if options.conflicts:
        _with_hypothesis("plan --conflicts", "show_conflicts")(options)
    else:
        show_plan(options)


def _with_hypothesis(command: str, name: str) -> Callable[[argparse.Namespace], int]:
    """Return a command that needs Hypothesis, from a module that the other commands do not import."""
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'{command} needs hypothesis; install it with `pip install "purecompose[testing]"`'
        ) from error
    return getattr(importlib.import_module("purecompose.cli.check"), name)


def _list_algorithms(options: argparse.Namespace) -> None:
    if options.name is not None:
        with reported_as("NAME"):
            specs.check_name(options.name, FACTORIES, "algorithm")
        factory = FACTORIES[options.name]
        say(textwrap.fill(specs.describe(options.name, inspect.signature(factory)), 100))
        module = sys.modules[factory.__module__]
        for text in (inspect.getdoc(factory), inspect.getdoc(module)):
            say(f"\n{re.sub(r' +# doctest: .*', '', text or '')}")
        say(f"\nMore, with an example: docs/algorithms/{options.name}.md in the repository.")
        return
    width = max(map(len, FACTORIES))
    for group, factories in GROUPS.items():
        say(group)
        for factory in factories:
            summary = (inspect.getdoc(factory) or "").partition("\n")[0].partition("; see")[0].rstrip(".")
            say(f"  {factory.__name__:<{width}}  {summary}")
        say()
    say("`python -m purecompose algorithms NAME` prints the details of one.")
