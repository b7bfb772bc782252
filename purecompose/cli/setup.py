"""From options to a run that is ready to start; all that options can get wrong is found here."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from purecompose import _specs as specs, data as datasets, losses, models, optim, schedule
from purecompose.algorithm import Algorithm
from purecompose.algorithms import FACTORIES
from purecompose.compose import Step, compose
from purecompose.loop import loop_events
from purecompose.random import key
from purecompose.state import State
from purecompose.time import Time, TimeUnit


__all__ = ["Setup", "UsageError", "fixed_arithmetic", "prepare", "reported_as", "with_defaults"]

_OPTIMIZERS: dict[str, Callable[..., Any]] = {"adam": optim.adam, "adamw": optim.adamw, "sgd": optim.sgd}
_SCHEDULES: dict[str, Callable[..., Any]] = {
    "constant": schedule.constant,
    "cosine": schedule.cosine,
    "linear": schedule.linear,
}
_EVAL_BATCH_SIZE = 1000


class UsageError(Exception):
    """An option that cannot be; the message is one line."""


class _Defaults(NamedTuple):
    """What a run takes where the options are silent."""

    duration: str
    batch_size: int
    optimizer: str
    threads: int
    model: str = "cnn"
    schedule: str = "cosine(warmup='0.1dur')"
    algorithms: str = "mixup,label_smoothing,selective_backprop"


# With all three algorithms on two cores: about 99 % of the digits in 5 s, and of MNIST in half a minute. A
# second thread gains nothing on the digits, and on a busy machine, where two threads wait for each other at
# every operation, it made them 100 times slower.
_FOR_SMALL_SETS = _Defaults("40ep", 64, "adam(lr=5e-3)", threads=1)
_FOR_LARGE_SETS = _Defaults("2ep", 128, "adam(lr=4e-3)", threads=2)
_LARGE = 10_000


class Setup(NamedTuple):
    """A run, ready to start."""

    step: Step
    state: State
    train_data: datasets.Arrays
    test_data: datasets.Arrays


def with_defaults(options: argparse.Namespace) -> tuple[argparse.Namespace, datasets.ImageData]:
    """The options, completed by what suits the data's size, and the data.

    Raises:
        UsageError: There are no such data.
        ImportError: A package that the data need is missing.
    """
    with reported_as("--data"):
        data = datasets.load(options.data)
    defaults = _FOR_LARGE_SETS if len(data.train_targets) >= _LARGE else _FOR_SMALL_SETS
    given = {name: value for name, value in vars(options).items() if value is not None}
    return argparse.Namespace(**{**defaults._asdict(), **given}), data


def prepare(options: argparse.Namespace, data: datasets.ImageData) -> Setup:
    """The run that complete options define.

    Raises:
        UsageError: An option that cannot be.
    """
    with reported_as("--batch-size"):
        batch_size = min(options.batch_size, len(data.train_targets))
        # A smaller last batch is left out of an epoch: it might not have an example for each microbatch.
        train_data = datasets.arrays(data.train_inputs, data.train_targets, batch_size, drop_last=True)
    with reported_as("--microbatches"):
        if options.microbatches > batch_size:
            raise ValueError(f"{options.microbatches} slices of a batch of {batch_size} examples")
        compose(loop_events, microbatches=options.microbatches)
    with reported_as("--duration"):
        duration = _duration(options.duration)
    with reported_as("--seed"):
        run_key = key(options.seed)
    step, net, optimizer = _step(options), _network(options, data), _optimizer(options)
    state = State.create(
        net,
        loss=losses.cross_entropy,
        optimizer=optimizer,
        key=run_key,
        duration=duration,
        batches_per_epoch=len(train_data),
    )
    with reported_as("--schedule"):
        for curve in state.context.schedules:
            curve(state.timestamp)  # a warm-up longer than the run shows here, not at the first batch
    test_data = datasets.arrays(data.test_inputs, data.test_targets, _EVAL_BATCH_SIZE, shuffle=False)
    with reported_as("--device"):
        device = _device(options.device)
    return Setup(step, step.init(state.to(device)), train_data.to(device), test_data.to(device))


@contextmanager
def reported_as(option: str) -> Iterator[None]:
    """Turns what an option's value is refused with into one line that names the option."""
    try:
        yield
    except (TypeError, ValueError, OSError) as error:
        raise UsageError(f"{option}: {' '.join(str(error).split())}") from error


@contextmanager
def fixed_arithmetic(num_threads: int) -> Iterator[None]:
    """Fixes what the bits of a result depend on, threads and kernels, and sets it back afterwards.

    Raises:
        UsageError: Fewer than one thread.
    """
    if num_threads < 1:
        raise UsageError(f"--threads: expected a positive number, got {num_threads}")
    threads, were_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warned, benchmarked = (
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    # cuBLAS reads this when it starts; without it torch warns of matrix products in deterministic mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.set_num_threads(num_threads)
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmarked
        torch.use_deterministic_algorithms(were_deterministic, warn_only=only_warned)


def _step(options: argparse.Namespace) -> Step:
    with reported_as("--algorithms"):
        calls = specs.parse(options.algorithms)
        algorithms: list[Algorithm] = [specs.build(call, FACTORIES, "algorithm") for call in calls]
        return compose(loop_events, algorithms, microbatches=options.microbatches)


def _network(options: argparse.Namespace, data: datasets.ImageData) -> torch.nn.Module:
    with reported_as("--model"):
        call = specs.parse_one(options.model)
        if call.args:
            raise ValueError(f"{call}: expected options by name, such as cnn(width=8)")
        return models.build(
            call.name, in_shape=data.in_shape, num_classes=data.num_classes, seed=options.seed, **call.kwargs
        )


def _optimizer(options: argparse.Namespace) -> Any:
    with reported_as("--schedule"):
        curve = specs.build(specs.parse_one(options.schedule), _SCHEDULES, "schedule")
    with reported_as("--optimizer"):
        plain = specs.build(specs.parse_one(options.optimizer), _OPTIMIZERS, "optimizer")
        return dataclasses.replace(plain, lr=plain.lr * curve)


def _duration(text: str) -> Time:
    duration = Time.of(text)
    if duration.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE) or duration.value <= 0:
        raise ValueError(f"{text}: expected a number of epochs, batches or samples: 20ep, 500ba or 10000sp")
    return duration


def _device(name: str) -> torch.device:
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return torch.device(name)
