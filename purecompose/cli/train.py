"""`train` and `plan`: what the command line does with a run."""

import argparse
import hashlib
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from purecompose import metrics
from purecompose.cli.setup import Setup, fixed_arithmetic, prepare, reported_as, with_defaults
from purecompose.evaluation import Evaluator
from purecompose.fit import fit
from purecompose.observers import History, Progress, Stopwatch
from purecompose.state import State
from purecompose.time import Time, TimeUnit


__all__ = ["checksum", "show_plan", "train"]


def train(options: argparse.Namespace) -> None:
    """Trains as the options say, shows how it goes and ends with a table.

    Raises:
        UsageError: An option that cannot be.
        ImportError: A package that the data or the display needs is missing.
    """
    options, data = with_defaults(options)
    with fixed_arithmetic(options.threads):
        setup = prepare(options, data)
        if options.plan:
            print(setup.step.plan(setup.state, next(iter(setup.train_data))))
            return
        if not options.quiet:
            print(_describe(setup), flush=True)
        history, stopwatch = History(), Stopwatch()
        test = Evaluator(setup.test_data, {"accuracy": metrics.accuracy, "loss": setup.state.context.loss})
        with nullcontext() if options.quiet else Progress() as progress:
            observers = [history, stopwatch, *([progress] if progress is not None else [])]
            state = fit(setup.step, setup.state, setup.train_data, evaluate=test, observers=observers)
        _print_results(state, history, stopwatch, options.threads)


def show_plan(options: argparse.Namespace) -> None:
    """Prints which algorithms act at which events at a point of the run.

    Raises:
        UsageError: An option that cannot be.
        ImportError: A package that the data need is missing.
    """
    options, data = with_defaults(options)
    with fixed_arithmetic(options.threads):
        setup = prepare(options, data)
        with reported_as("--at"):
            state = _moved(setup.state, options.at, setup.train_data.batch_size)
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


def _moved(state: State, at: str, batch_size: int) -> State:
    """The state as if it stood at a point of its run; the counters alone move."""
    run = state.timestamp.run
    time = Time.of(at)
    batches = time.value / batch_size if time.unit is TimeUnit.SAMPLE else run.in_batches(time)
    if batches is None or batches < 0 or run.batches_per_epoch is None:
        raise ValueError(f"{at}: expected a point of the run, such as 0.6dur, 5ep or 100ba")
    return state.replace(timestamp=state.timestamp.advance_by(int(batches), batch_size))


def _describe(setup: Setup) -> str:
    state, train_data = setup.state, setup.train_data
    size = sum(tensor.numel() for tensor in state.params.values())
    lines = [
        f"{train_data.num_examples:,} images in batches of {train_data.batch_size}, "
        f"{size:,} weights on {state.device}, {state.timestamp.run.duration}",
        *(f"  {algorithm!r}" for algorithm in setup.step.algorithms),
    ]
    return "\n".join(lines)


def _print_results(state: State, history: History, stopwatch: Stopwatch, num_threads: int) -> None:
    from rich.console import Console
    from rich.table import Table

    _, accuracies = history.series("eval/accuracy")
    evaluating = stopwatch.seconds - stopwatch.training_seconds
    on = f"{num_threads} thread{'s' * (num_threads > 1)}" if state.device.type == "cpu" else str(state.device)
    table = Table(show_header=False)
    table.add_row("test accuracy", f"{accuracies[-1]:.2%}")
    table.add_row("time", f"{stopwatch.seconds:.1f} s, {evaluating:.1f} s of it for evaluation")
    table.add_row("steps", f"{stopwatch.batches:,}, {stopwatch.batches_per_second:.1f} a second")
    table.add_row("parameters' checksum", f"{checksum(state.params)} ({on})")
    Console(highlight=False).print(table)
