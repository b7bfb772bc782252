"""Preparation of a run from its settings; all errors in the settings are found here."""

import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from purecompose import data as datasets, optim, schedule
from purecompose._support import specs
from purecompose._support.device import PRECISIONS
from purecompose._support.messages import say
from purecompose.algorithms import FACTORIES, scale_schedule
from purecompose.algorithms.recipes import recipe
from purecompose.cli.kinds import TEXT, Data, Kind, check_model, fitting, kind_of, load
from purecompose.cli.own import OwnToo, check_imports, is_own, network_of
from purecompose.cli.processes import Processes
from purecompose.cli.settings import LOSSES, SETTINGS, UsageError
from purecompose.cli.sources import with_arguments
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step, compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
from purecompose.losses import metrics
from purecompose.nn import models
from purecompose.random import key
from purecompose.run.evaluation import Evaluator
from purecompose.run.rules import EarlyStopping, Stopper
from purecompose.time import Time, TimeUnit
from purecompose.transforms.compilation import CompiledStep, compile
from purecompose.transforms.population import population, stack_states


def _of_recipe(name: str) -> Any:
    """Return the optimizer of a recipe, with its schedule."""
    if (found := recipe(name).optimizer) is None:
        raise ValueError(f"the recipe {name!r} leaves the optimizer to you")
    return found


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adafactor": optim.adafactor,
    "adam": optim.adam,
    "adamw": optim.adamw,
    "decoupled_adamw": optim.decoupled_adamw,
    "decoupled_sgdw": optim.decoupled_sgdw,
    "lion": optim.lion,
    "recipe": _of_recipe,
    "rmsprop": optim.rmsprop,
    "sgd": optim.sgd,
}
SCHEDULES: dict[str, Callable[..., Any]] = {
    "constant": schedule.constant,
    "cosine": schedule.cosine,
    "cosine_warm_restarts": schedule.cosine_warm_restarts,
    "exponential": schedule.exponential,
    "linear": schedule.linear,
    "multi_step": schedule.multi_step,
    "polynomial": schedule.polynomial,
    "step": schedule.step,
}


_ALONE = Processes()


class _Defaults(NamedTuple):
    """Defaults of settings that depend on the kind and size of the data."""

    duration: str
    batch_size: int
    optimizer: str
    threads: int
    model: str = "cnn"
    schedule: str = 'cosine(warmup="0.1dur")'
    algorithms: str = "mixup,label_smoothing,selective_backprop"


# With all three algorithms on two cores, accuracy reaches about 99 % on the digits in 5 s, and on MNIST in half a
# minute. A second thread gains nothing on the digits; on a busy machine, where two threads wait for each other at
# every operation, it made training 100 times slower.
_FOR_SMALL_SETS = _Defaults("40ep", 64, "adam(lr=5e-3)", threads=1)
_FOR_LARGE_SETS = _Defaults("2ep", 128, "adam(lr=4e-3)", threads=2)
_LARGE = 10_000
# 818 000 weights for 65 characters: an epoch of tiny Shakespeare, 980 batches, takes two minutes on two cores. Larger
# batches learn less from the same number of characters: after an epoch the loss was 2.13 with a batch size of 8, 2.33
# with 16, and 2.50 with 32.
_FOR_TEXT = _Defaults(
    "3ep",
    8,
    "adamw(lr=3e-3, weight_decay=0.1)",
    threads=2,
    model="gpt(width=128, depth=4, num_heads=4)",
    schedule='cosine(warmup="0.05dur")',
    algorithms="none",
)


class Setup(NamedTuple):
    """A run, ready to start."""

    step: Step | CompiledStep
    state: State
    train_data: datasets.Arrays
    test_data: datasets.Arrays
    evaluators: tuple[Evaluator, ...]
    watched: str
    """Label of the evaluator whose metrics decide: "val" if validation data are set aside, otherwise "eval"."""
    data: Data
    kind: Kind
    stop: tuple[Stopper, ...]
    microbatches: str | None
    """"auto" or None."""

    @property
    def plain_step(self) -> Step:
        """The step without compiling."""
        return self.step.step if isinstance(self.step, CompiledStep) else self.step


def completed(
    found: Mapping[str, Any], data: Data | None = None, *, allowed: Collection[str] | None = ()
) -> tuple[dict[str, Any], Data]:
    """Return all settings, completed by defaults that suit the data, and the data.

    Args:
        found: The settings that were chosen.
        data: Data to use instead of those that the settings name.
        allowed: Names of the user's own code that may be imported; `None` for all.
    """
    settings = {name: setting.default for name, setting in SETTINGS.items()} | dict(found)
    check_imports(settings, allowed)
    if data is None:
        with reported_as("--data"):
            data, reported = load(settings)
        settings |= reported
    defaults = _FOR_LARGE_SETS if len(data.train_targets) >= _LARGE else _FOR_SMALL_SETS
    defaults = _FOR_TEXT if kind_of(data) is TEXT else defaults
    silent = {name: value for name, value in defaults._asdict().items() if settings[name] is None}
    factories = {"algorithms": OwnToo(FACTORIES), "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
    return with_arguments({**settings, **silent}, factories), data


def prepare(
    settings: Mapping[str, Any], data: Data, processes: Processes = _ALONE, sharding: str | None = None
) -> Setup:
    """Return the run that complete settings define.

    Args:
        settings: All settings.
        data: The data.
        processes: The processes that share its batches.
        sharding: When parameters are gathered that the processes have divided: "step", "layer"; `None` to divide none.
    """
    kind = kind_of(data)
    inputs, targets, *aside = _divided(settings, data)
    with reported_as("--batch-size"):
        batch_size = min(settings["batch_size"], len(targets))
        # A smaller last batch is left out of an epoch, because it might have fewer examples than microbatches.
        train_data = kind.batches(inputs, targets, batch_size)
    with reported_as("--duration"):
        duration = _duration(settings["duration"], kind)
    with reported_as("--device"):
        device = _device(processes.device(settings["device"]))
    step = _step(settings, batch_size)
    test_data = kind.stored(data.test_inputs, data.test_targets).to(device)
    length = _limited(settings["limit_batches"], len(train_data))
    states = [step.init(state.to(device)) for state in _states(settings, data, duration, length)]
    watched = "val" if aside else "eval"
    with reported_as("--eval-every"):
        wanted = {**kind.metrics, "loss": metrics.mean_loss()}
        # With validation data, which make all decisions, the test data are evaluated only once.
        num_batches = _limited(settings["limit_batches"], len(test_data))
        interval = "1dur" if aside else settings["eval_every"]
        evaluators = (Evaluator(test_data, wanted, every=interval, num_batches=num_batches),)
        if aside:
            held = kind.stored(aside[0], aside[1]).to(device)
            num_batches = _limited(settings["limit_batches"], len(held))
            own = Evaluator(held, wanted, every=settings["eval_every"], label="val", num_batches=num_batches)
            evaluators = (own, *evaluators)
    with reported_as("--patience"):
        stop = () if settings["patience"] is None else (EarlyStopping(f"{watched}/loss", settings["patience"]),)
        if stop and len(states) > 1:
            raise ValueError("the networks of a population would stop at different times; leave out --seeds")
    many = population(step, len(states)) if len(states) > 1 else step
    state = stack_states(states) if len(states) > 1 else states[0]
    with reported_as("--shard"):
        many, state = _shared(settings, processes, many, state, sharding)
    run = compile(many) if settings["compile"] else many
    auto = "auto" if settings["microbatches"] == "auto" else None
    return Setup(run, state, train_data.to(device), test_data, evaluators, watched, data, kind, stop, auto)


def _shared(
    settings: Mapping[str, Any], processes: Processes, step: Step, state: State, sharding: str | None
) -> tuple[Step, State]:
    """Return the step and the state as several processes share them."""
    if processes.size > 1 and settings["seeds"] > 1:
        raise UsageError("--seeds: the networks of a population train in one process; run the command without torchrun")
    if processes.size > 1 and settings["microbatches"] == "auto":
        raise UsageError("--microbatches auto: one that tries again would leave the others waiting; give a number")
    return processes.divided(step, state, sharding)


def _divided(settings: Mapping[str, Any], data: Data) -> tuple[torch.Tensor, ...]:
    """Return inputs and targets for training, followed by those for validation if a share is set aside."""
    share = settings["validation"]
    with reported_as("--validation"):
        if not 0 <= share < 1:
            raise ValueError(f"{share}: expected a share of the training data, at least 0 and below 1")
        if share == 0:
            return data.train_inputs, data.train_targets
        # The same examples for every seed of the run, so that runs are comparable.
        return tuple(datasets.split(data.train_inputs, data.train_targets, share, seed=0))


def _limited(limit: str | None, length: int) -> int:
    """Return the number of batches to use; `limit` is a number or a share of them."""
    if limit is None:
        return length
    with reported_as("--limit-batches"):
        if re.fullmatch(r"[1-9]\d*", limit):
            return min(length, int(limit))
        share = float(limit) if re.fullmatch(r"\d*\.\d+", limit) else 0.0
        if not 0 < share <= 1:
            raise ValueError(f"{limit}: expected a number of batches, such as 10, or a share of them, such as 0.1")
    return max(1, round(share * length))


def _states(settings: Mapping[str, Any], data: Data, duration: Time, length: int) -> list[State]:
    """Return the initial states, one for each seed."""
    with reported_as("--seeds"):
        if settings["seeds"] < 1:
            raise ValueError(f"{settings['seeds']}: expected at least 1")
    optimizer = _optimizer(settings)
    with reported_as("--loss"):
        if settings["loss"] not in LOSSES:
            raise ValueError(f"{settings['loss']}: expected one of {', '.join(LOSSES)}")
    with reported_as("--precision"):
        if settings["precision"] not in PRECISIONS:
            raise ValueError(f"{settings['precision']}: expected one of {', '.join(PRECISIONS)}")
    states = []
    for seed in range(settings["seed"], settings["seed"] + settings["seeds"]):
        with reported_as("--seed"):
            run_key = key(seed)
        network = _network(settings, data, seed)
        with reported_as("--optimizer"):  # that of a recipe may be for networks with other names
            state = State.create(
                network,
                loss=LOSSES[settings["loss"]],
                optimizer=optimizer,
                key=run_key,
                duration=duration,
                batches_per_epoch=length,
                precision=settings["precision"],
                **kind_of(data).state_options,
            )
        with reported_as("--scale-schedule"):
            states.append(scale_schedule(state, settings["scale_schedule"]))
    with reported_as("--schedule"):
        for curve in states[0].context.schedules:
            curve(states[0].timestamp)  # a warm-up longer than the run raises here, not at the first batch
    return states


@contextmanager
def reported_as(option: str) -> Iterator[None]:
    """Turn an error about an option's value into a `UsageError` of one line that names the option."""
    try:
        yield
    except (TypeError, ValueError, OSError) as error:
        raise UsageError(f"{option}: {' '.join(str(error).split())}") from error


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show warnings as single lines, without their place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", file=sys.stderr)
        yield


@contextmanager
def fixed_arithmetic(num_threads: int) -> Iterator[None]:
    """Fix threads and kernels, on which the bits of a result depend, and restore them afterwards."""
    if num_threads < 1:
        raise UsageError(f"--threads: expected a positive number, got {num_threads}")
    threads, were_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warned, benchmarked = (
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    # cuBLAS reads this when it starts. Without it, torch warns of matrix products in deterministic mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        stack.callback(setattr, torch.backends.cudnn, "benchmark", benchmarked)
        torch.set_num_threads(num_threads)
        torch.backends.cudnn.benchmark = False
        # The first call spends a second on imports. If Ctrl-C interrupts them, nothing is set, and the callback that
        # restores the mode would fail; it is therefore registered afterwards.
        torch.use_deterministic_algorithms(True, warn_only=True)
        stack.callback(torch.use_deterministic_algorithms, were_deterministic, warn_only=only_warned)
        yield


def _step(settings: Mapping[str, Any], batch_size: int) -> Step:
    with reported_as("--algorithms"):
        calls = specs.parse(settings["algorithms"])
        algorithms: list[Algorithm] = [specs.build(call, OwnToo(FACTORIES), "algorithm") for call in calls]
        compose(loop_events, algorithms)
    with reported_as("--microbatches"):
        text = settings["microbatches"]
        if text != "auto" and not text.isdecimal():
            raise ValueError(f"{text}: expected a number of slices, or auto")
        slices = 1 if text == "auto" else int(text)
        if slices > batch_size:
            raise ValueError(f"expected at most {batch_size} slices, one per example of a batch, got {slices}")
        return compose(loop_events, algorithms, microbatches=slices)


def _network(settings: Mapping[str, Any], data: Data, seed: int) -> torch.nn.Module:
    with reported_as("--model"):
        call = specs.parse_one(settings["model"])
        if is_own(call.name):
            return network_of(call, data, seed)
        specs.check_name(call.name, models.MODELS, "model")
        if call.args:
            raise ValueError(f"{call}: expected options by name, as in {models.describe(call.name)}")
        models.check_options(call.name, call.kwargs)  # otherwise they could collide with other arguments of build
        check_model(call.name, data)
        shape = {"in_shape": data.in_shape, "num_classes": data.num_classes}
        return fitting(call.name, models.build(call.name, **shape, seed=seed, **call.kwargs), data)


def _optimizer(settings: Mapping[str, Any]) -> Any:
    with reported_as("--schedule"):
        curve = specs.build(specs.parse_one(settings["schedule"]), SCHEDULES, "schedule")
    with reported_as("--optimizer"):
        call = specs.parse_one(settings["optimizer"])
        if call.name == "muon":
            raise ValueError(
                "muon moves only matrices; choose them, and an optimizer for the others, in Python: "
                'optim.by_pattern({"blocks.*": optim.muon(0.02)}, optim.adamw(3e-4))'
            )
        plain = specs.build(call, OPTIMIZERS, "optimizer")
        if call.name == "recipe":
            if curve != schedule.constant():
                raise ValueError(f"{call}: its optimizer has a schedule; leave out --schedule")
            return plain
        return dataclasses.replace(plain, lr=plain.lr * curve)


def _duration(text: str, kind: Kind) -> Time:
    duration = Time.of(text)
    units = [TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, *([TimeUnit.TOKEN] if kind is TEXT else [])]
    if duration.unit not in units or duration.value <= 0:
        names = "epochs, batches, samples or tokens" if kind is TEXT else "epochs, batches or samples"
        raise ValueError(f"{text}: expected a number of {names}: 20ep, 500ba or 10000sp")
    return duration


def _device(name: str) -> torch.device:
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return torch.device(name)
