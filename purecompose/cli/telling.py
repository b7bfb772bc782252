"""The output of `train`: the settings at the start, the results and the speed at the end."""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purecompose._support.device import bfloat16_units
from purecompose.cli.kinds import TEXT
from purecompose.cli.setup import Setup
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.data import TextData
from purecompose.observers import History, Stopwatch
from purecompose.records.layout import CHECKPOINTS, REPORT
from purecompose.run.saving.folder import all_in
from purecompose.transforms.compilation import CompiledStep


def describe(setup: Setup, settings: Mapping[str, Any]) -> list[str]:
    """Return the lines before the first batch: the numbers of examples and weights, device, duration and algorithms."""
    state, train_data = setup.state, setup.train_data
    members = settings["seeds"]
    size = sum(tensor.numel() for tensor in state.params.values()) // members
    networks = f"{members} networks of {size:,} weights" if members > 1 else f"{size:,} weights"
    length = state.timestamp.run.batches_per_epoch
    limited = [] if settings["limit_batches"] is None else [f"  {length} of {len(train_data)} batches in an epoch"]
    return [
        f"{train_data.num_examples:,} {setup.kind.noun} in batches of {train_data.batch_size}, "
        f"{networks} on {state.device}, {state.timestamp.run.duration}",
        *limited,
        *_describe_text(setup),
        *_describe_units(state),
        *(line for algorithm in setup.step.algorithms for line in _describe_method(algorithm)),
    ]


def _describe_method(algorithm: Algorithm) -> list[str]:
    """Return the lines of a method, with how long evaluation may stay at chance if that is long."""
    lines, config = [f"  {algorithm!r}"], algorithm.config
    if algorithm.name == "progressive_resizing" and config["initial_scale"] < 1:
        whole = 1 - config["finetune_fraction"]
        lines.append(f"    images are smaller for {whole:.0%} of the run; until then evaluation may stay near chance")
    elif algorithm.name == "ema" and config["half_life"] is not None:
        lines.append(
            f"    evaluation uses averages, and may stay near chance for a few half-lives of {config['half_life']}"
        )
    return lines


def _describe_units(state: State) -> list[str]:
    units = bfloat16_units() if state.device.type == "cpu" and state.context.precision == "fp32" else None
    return [f"  this CPU has {units}: --precision bf16 trains all but small networks faster"] if units else []


def _describe_text(setup: Setup) -> list[str]:
    if not isinstance(setup.data, TextData):
        return []
    length, num_tested = setup.data.in_shape[0], len(setup.data.test_targets)
    return [
        f"  a window is {length} characters, the vocabulary has {setup.data.num_classes}; the text's last "
        f"{num_tested:,} windows are for testing; {setup.data.num_dropped:,} characters fill no window"
    ]


def print_results(
    setup: Setup,
    state: State,
    history: History,
    stopwatch: Stopwatch,
    settings: Mapping[str, Any],
    out: Path | None,
    missing: Sequence[str] = (),
    named: str | None = None,
) -> None:
    """Print the table at the end.

    `missing` are the files in `out` that could not be written, and `named` is the folder as the user has given it, of
    which `out` may be a local copy.
    """
    from rich.console import Console
    from rich.table import Table

    evaluating = stopwatch.seconds - stopwatch.training_seconds
    compiling = setup.step.variants().seconds if isinstance(setup.step, CompiledStep) else 0.0
    spent = [f"evaluation {evaluating:.1f} s", *([f"compilation {compiling:.1f} s"] if compiling else [])]
    rate = stopwatch.batches / max(stopwatch.training_seconds - compiling, 1e-9)
    threads = settings["threads"]
    on = f"{threads} thread{'s' * (threads > 1)}" if state.device.type == "cpu" else str(state.device)
    table = Table(show_header=False)
    for name in ("loss", *setup.kind.metrics) if setup.kind is TEXT else setup.kind.metrics:
        table.add_row(f"test {name}", _shown(name, history.series(f"eval/{name}")[1][-1]))
    tested, all_batches = setup.evaluators[-1].num_batches, len(setup.test_data)
    if settings["limit_batches"] is not None and tested != all_batches:
        table.add_row("tested on", f"{tested} of {all_batches} batches")
    decides = setup.kind.decides
    at, values = history.series(f"{setup.watched}/{decides}")
    # NaN is never the best.
    comparable = [value for value in values if not math.isnan(value)] if settings["seeds"] == 1 else []
    best = max(comparable, key=setup.kind.rating, default=None)
    if best is not None and (setup.watched == "val" or best != values[-1]):
        name = "best validation" if setup.watched == "val" else "best"
        kept = None if out is None else _best_kept(out, setup)
        is_kept = kept is not None and setup.kind.rating(kept[0]) >= setup.kind.rating(best)
        best, batch = kept if kept is not None and is_kept else (best, at[values.index(best)])
        table.add_row(f"{name} {decides}", f"{_shown(decides, best)}, after batch {batch}")
        if out is not None:
            table.add_row("", f"evaluate {named} --checkpoint best" if is_kept else "its checkpoint was not written")
    if setup.stop and not state.timestamp.is_finished():
        table.add_row("stopped early", f"the loss has not improved for {settings['patience']}")
    table.add_row("time", f"{stopwatch.seconds:.1f} s ({', '.join(spent)})")
    table.add_row("steps", f"{stopwatch.batches:,}, {rate:.1f} per second{' after compiling' if compiling else ''}")
    table.add_row("parameters' checksum", f"{checksum(state.params)} ({on})")
    if out is not None and REPORT not in missing:
        table.add_row("report", f"{named}/{REPORT}")
    for number, name in enumerate(missing):
        table.add_row("" if number else "could not be written", name)
    Console(highlight=False).print(table)


def _best_kept(out: Path, setup: Setup) -> tuple[float, int] | None:
    """Return the metric and the batch of the best checkpoint in a run's folder; among equal ones, the earliest."""
    name = f"{setup.watched}/{setup.kind.decides}"
    kept = [(one.index.metrics.get(name), one.index.batch) for one in reversed(all_in(out / CHECKPOINTS)[0])]
    rated = [(value, batch) for value, batch in kept if isinstance(value, (int, float)) and not math.isnan(value)]
    return max(rated, key=lambda pair: setup.kind.rating(pair[0]), default=None)


def checksum(params: Mapping[str, Tensor]) -> str:
    """Return a short hash of the names, dtypes, shapes and bits of tensors, which is equal if all bits are equal.

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


def _shown(name: str, value: Any) -> str:
    """Return a metric of one network as text, or mean, standard deviation and range of a population's."""
    form = ".2%" if name == "accuracy" else ".4g"
    if not isinstance(value, list):
        return f"{value:{form}}"
    mean, spread = statistics.fmean(value), statistics.stdev(value)
    return f"{mean:{form}} on average, spread {spread:{form}} ({min(value):{form}} to {max(value):{form}})"
