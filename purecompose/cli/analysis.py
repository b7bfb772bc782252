"""`replay`, `explain`, `bisect` and `compare`: commands that analyse recorded runs."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from purecompose import analysis
from purecompose._support import specs
from purecompose._support.messages import say
from purecompose.analysis import RecordedRun, predicates
from purecompose.cli.loading import settings_for
from purecompose.cli.own import allowed_by, imported, is_own
from purecompose.cli.settings import UsageError, check_target, named
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, plain_warnings, prepare, reported_as
from purecompose.data import TextData
from purecompose.errors import CheckpointError, MismatchError
from purecompose.run.saving import save


def _add_replay_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `replay`."""
    _add_run_options(command)
    _add_at(command)
    command.add_argument("--out", type=named, metavar="FOLDER", help="save the state there, as a checkpoint")
    command.add_argument(
        "--dtype", choices=("float32", "float64"), help="replay in this precision, and show how much the state differs"
    )


def _add_explain_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `explain`."""
    _add_run_options(command)
    _add_at(command)
    _add_report(command)


def _add_bisect_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `bisect`."""
    _add_run_options(command)
    command.add_argument(
        "--until",
        required=True,
        metavar="PREDICATE",
        help="loss_above(5.0), not_finite, weight_norm_above(100.0), accuracy_below(0.5), dead_unit('0'), or "
        "my_module:my_predicate, a function of a state",
    )
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--stays", action="store_true", help="once true, it stays true: search by halving")
    which.add_argument("--passes", action="store_true", help="it may become false again: search from the start")
    _add_report(command)


def _add_compare_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `compare`."""
    command.add_argument("runs", nargs=2, metavar="RUN", help="the folder of a run")
    command.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="fraction of a tensor's largest magnitude by which it may differ (default: 0, compare bits)",
    )
    command.add_argument("--allow-imports", action="store_true", help="import code that the settings of a run name")


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="the folder of a run")
    command.add_argument("--data", help="where the run's data are now (default: as in its settings)")
    command.add_argument("--allow-imports", action="store_true", help="import code that the settings of the run name")
    command.add_argument(
        "--not-strict",
        action="store_true",
        help="warn instead of stopping if the code, the data or versions are not those of the run",
    )


def _add_at(command: argparse.ArgumentParser) -> None:
    command.add_argument("--at", required=True, metavar="TIME", help="the point of the run: 1234ba, 3ep, 0.5dur")


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("--report", type=named, metavar="FILE", help="also write the report as a page, *.html")


def _show_replay(options: argparse.Namespace) -> None:
    """Print the state of a run at a batch."""
    with opened(options, options.run) as (run, _):
        found = analysis.replay(run, options.at, dtype=options.dtype and getattr(torch, options.dtype))
        say(found)
        loss = found.state.loss
        say(f"loss {'none' if loss is None else loss.tolist()}")
        if options.out is not None:
            with reported_as("--out"):
                say(f"saved in {save(found.state, options.out, step=run.step)}")


def _show_explanation(options: argparse.Namespace) -> None:
    """Print the report of a batch."""
    with opened(options, options.run) as (run, _):
        _report(analysis.explain(run, options.at), options)


def _show_bisection(options: argparse.Namespace) -> None:
    """Print the first batch at which a predicate holds, with its report."""
    with opened(options, options.run) as (run, setup):
        with reported_as("--until"):
            predicate = _predicate(options.until, setup)
        try:
            found = analysis.bisect(run, predicate, stays=options.stays)
        except RuntimeError as error:
            if not str(error).startswith("bisect: the predicate"):
                raise
            raise UsageError(" ".join(str(error).split())) from error
        say(found)
        if options.report is not None and found.explanation is not None:
            say(f"\nthe report is in {found.explanation.write(options.report)}")


def _show_comparison(options: argparse.Namespace) -> None:
    """Print where two runs differ."""
    options.data, options.not_strict = None, False
    with ExitStack() as stack:
        try:
            runs: list[Any] = [stack.enter_context(opened(options, run))[0] for run in options.runs]
        except (UsageError, CheckpointError):
            runs = [Path(run) for run in options.runs]  # their folders are enough for a coarser answer
        with usage_errors(ValueError, FileNotFoundError):
            try:
                say(analysis.compare(*runs, tolerance=options.tolerance))
            except MismatchError as error:  # other versions, threads, ...: differences that are asked for
                say(analysis.compare(*map(Path, options.runs), tolerance=options.tolerance))
                say(f"\nthe runs are not replayed: {' '.join(str(error).split())}")


@contextmanager
def opened(options: argparse.Namespace, folder: str) -> Iterator[tuple[RecordedRun, Setup]]:
    """Open a run of the command line with the arithmetic of its training."""
    report = getattr(options, "report", None)
    if report is not None:
        check_target("--report", report)
    settings, data = completed(settings_for(folder, options.data), allowed=allowed_by(options))
    with fixed_arithmetic(settings["threads"]), plain_warnings(), usage_errors(ValueError, FileNotFoundError):
        setup = prepare(settings, data)
        yield (
            RecordedRun(
                folder,
                setup.step,
                setup.state,
                setup.train_data,
                evaluate=setup.evaluators,
                stop=setup.stop,
                microbatches=setup.microbatches,
                decode=data.vocabulary.decode if isinstance(data, TextData) else None,
                strict=not options.not_strict,
            ),
            setup,
        )


@contextmanager
def usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, about arguments and folders, into usage errors of one line."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        raise UsageError(" ".join(str(error).split())) from error


def _report(explanation: analysis.Explanation, options: argparse.Namespace) -> None:
    say(explanation)
    if options.report is not None:
        say(f"\nthe report is in {explanation.write(options.report)}")


def _predicate(text: str, setup: Setup) -> Any:
    """Return the predicate that a text names; those on examples are measured on the first batch of the test data."""
    call = specs.parse_one(text)
    if is_own(call.name) and not call.args and not call.kwargs:
        return imported(call.name)

    def accuracy_below(share: float) -> Any:
        return predicates.accuracy_below(share, next(iter(setup.test_data)))

    def dead_unit(module: str) -> Any:
        inputs, _ = next(iter(setup.test_data))
        return predicates.dead_unit(module, inputs)

    known = {
        "accuracy_below": accuracy_below,
        "dead_unit": dead_unit,
        "loss_above": predicates.loss_above,
        "not_finite": predicates.not_finite,
        "weight_norm_above": predicates.weight_norm_above,
    }
    return specs.build(call, known, "predicate")


COMMANDS = (
    ("replay", "compute the state of a run at any batch, from its checkpoints", _show_replay, _add_replay_options),
    (
        "explain",
        "show what a run did at a batch: methods, losses of examples, gradients of layers",
        _show_explanation,
        _add_explain_options,
    ),
    (
        "bisect",
        "find the first batch of a run at which something is true, and explain it",
        _show_bisection,
        _add_bisect_options,
    ),
    ("compare", "show where two runs begin to differ, and why", _show_comparison, _add_compare_options),
)
"""Name, help text, function and function that adds the options."""
EXAMPLES = {
    "replay": """\
examples:
  python -m purecompose train --out runs/a --keep log
  python -m purecompose replay runs/a --at 1234ba --out state
  python -m purecompose replay runs/a --at 0.5dur --dtype float64
""",
    "explain": "example:\n  python -m purecompose explain runs/a --at 1234ba --report batch.html\n",
    "bisect": """\
examples:
  python -m purecompose bisect runs/a --until not_finite --stays
  python -m purecompose bisect runs/a --until "loss_above(5.0)" --passes --report batch.html
""",
    "compare": "example:\n  python -m purecompose compare runs/a runs/b --tolerance 1e-5\n",
}
