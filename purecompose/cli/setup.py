"""Preparation of a run from its settings; all errors in the settings are found here."""

import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from purecompose import data as datasets, schedule
from purecompose._support import specs
from purecompose._support.device import PRECISIONS
from purecompose.algorithms import scale_schedule
from purecompose.cli.data import TEXT, Data, Kind, kind_of, load_data, make_network
from purecompose.cli.options import UsageError, reported_as
from purecompose.cli.own import ALGORITHMS, check_imports
from purecompose.cli.processes import Processes
from purecompose.cli.settings import LOSSES, OPTIMIZERS, SCHEDULES, Settings, with_arguments
from purecompose.core.compose import Step, compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
from purecompose.losses import metrics
from purecompose.random import key
from purecompose.run.evaluation import Evaluator
from purecompose.run.rules import EarlyStopping, Stopper
from purecompose.time import Time, TimeUnit
from purecompose.transforms.compilation import CompiledStep, compile
from purecompose.transforms.population import population, stack_states


_IMAGE_DEFAULTS = {
    "model": "cnn",
    "algorithms": "mixup,label_smoothing,selective_backprop",
    "schedule": 'cosine(warmup="0.1dur")',
}
# With all three algorithms on two cores, accuracy reaches about 99 % on the digits in 5 s, and on MNIST in half a
# minute. A second thread gains nothing on the digits; on a busy machine, where two threads wait for each other at
# every operation, it made training 100 times slower.
_FOR_SMALL_SETS = {"duration": "40ep", "batch_size": 64, "optimizer": "adam(lr=5e-3)", "threads": 1, **_IMAGE_DEFAULTS}
_FOR_LARGE_SETS = {"duration": "2ep", "batch_size": 128, "optimizer": "adam(lr=4e-3)", "threads": 2, **_IMAGE_DEFAULTS}
_LARGE = 10_000
# 818 000 weights for 65 characters: an epoch of tiny Shakespeare, 980 batches, takes two minutes on two cores. Larger
# batches learn less from the same number of characters: after an epoch the loss was 2.13 with a batch size of 8, 2.33
# with 16, and 2.50 with 32.
_FOR_TEXT = {
    "duration": "3ep",
    "batch_size": 8,
    "optimizer": "adamw(lr=3e-3, weight_decay=0.1)",
    "threads": 2,
    "model": "gpt(width=128, depth=4, num_heads=4)",
    "algorithms": "none",
    "schedule": 'cosine(warmup="0.05dur")',
}


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
) -> tuple[Settings, Data]:
    """Return all settings, completed by defaults that suit the data, and the data.

    Args:
        found: The settings that were chosen.
        data: Data to use instead of those that the settings name.
        allowed: Names of the user's own code that may be imported; `None` for all.
    """
    check_imports(found, allowed)
    settings = {**dataclasses.asdict(Settings()), **found}
    if data is None:
        named = {name: value for name, value in settings.items() if name != "within"}
        data, reported = load_data(Settings(**named))
        settings |= reported
    defaults = _FOR_LARGE_SETS if len(data.train_targets) >= _LARGE else _FOR_SMALL_SETS
    defaults = _FOR_TEXT if kind_of(data) is TEXT else defaults
    settings |= {name: value for name, value in defaults.items() if settings[name] is None}
    return Settings(**with_arguments(settings, ALGORITHMS)), data


def prepare(settings: Settings, data: Data, processes: Processes | None = None, sharding: str | None = None) -> Setup:
    """Return the run that complete settings define.

    Args:
        settings: All settings.
        data: The data.
        processes: The processes that share its batches; by default this one.
        sharding: When parameters are gathered that the processes have divided: "step", "layer"; `None` to divide none.
    """
    kind, processes = kind_of(data), processes or Processes()
    inputs, targets, *aside = _divided(settings, data)
    with reported_as("--batch-size"):
        assert settings.batch_size is not None
        batch_size = min(settings.batch_size, len(targets))
        # A smaller last batch is left out of an epoch, because it might have fewer examples than microbatches.
        train_data = kind.batches(inputs, targets, batch_size)
    with reported_as("--device"):
        device = _device(processes.device(settings.device))
    step = _step(settings, batch_size)
    test_data = kind.stored(data.test_inputs, data.test_targets).to(device)
    length = _limited(settings, len(train_data))
    states = [step.init(state.to(device)) for state in _states(settings, data, length)]
    wanted = {**kind.metrics, "loss": metrics.mean_loss()}

    def evaluator(stored: datasets.Arrays, every: str, label: str) -> Evaluator:
        return Evaluator(stored, wanted, every=every, label=label, num_batches=_limited(settings, len(stored)))

    watched = "val" if aside else "eval"
    with reported_as("--eval-every"):
        # With validation data, which make all decisions, the test data are evaluated only once.
        evaluators = (evaluator(test_data, "1dur" if aside else settings.eval_every, "eval"),)
        if aside:
            held = kind.stored(aside[0], aside[1]).to(device)
            evaluators = (evaluator(held, settings.eval_every, "val"), *evaluators)
    with reported_as("--patience"):
        stop = () if settings.patience is None else (EarlyStopping(f"{watched}/loss", settings.patience),)
        if stop and len(states) > 1:
            raise ValueError("the networks of a population would stop at different times; leave out --seeds")
    many, state = step, states[0]
    if len(states) > 1:
        many, state = population(step, len(states)), stack_states(states)
    if processes.size > 1 and len(states) > 1:
        raise UsageError("--seeds: the networks of a population train in one process; run the command without torchrun")
    if processes.size > 1 and settings.microbatches == "auto":
        raise UsageError("--microbatches auto: one that tries again would leave the others waiting; give a number")
    with reported_as("--shard"):
        many, state = processes.divided(many, state, sharding)
    auto = "auto" if settings.microbatches == "auto" else None
    run = compile(many) if settings.compile else many
    return Setup(run, state, train_data.to(device), test_data, evaluators, watched, data, kind, stop, auto)


def _divided(settings: Settings, data: Data) -> tuple[torch.Tensor, ...]:
    """Return inputs and targets for training, followed by those for validation if a share is set aside."""
    share = settings.validation
    with reported_as("--validation"):
        if not 0 <= share < 1:
            raise ValueError(f"{share}: expected a share of the training data, at least 0 and below 1")
        if share == 0:
            return data.train_inputs, data.train_targets
        # The same examples for every seed of the run, so that runs are comparable.
        return tuple(datasets.split(data.train_inputs, data.train_targets, share, seed=0))


def _limited(settings: Settings, length: int) -> int:
    """Return the number of batches to use of so many; the limit is a number or a share of them."""
    limit = settings.limit_batches
    if limit is None:
        return length
    if re.fullmatch(r"[1-9]\d*", limit):
        return min(length, int(limit))
    share = float(limit) if re.fullmatch(r"\d*\.\d+", limit) else 0.0
    if not 0 < share <= 1:
        raise UsageError(
            f"--limit-batches: {limit}: expected a number of batches, such as 10, or a share of them, such as 0.1"
        )
    return max(1, round(share * length))


def _device(name: str) -> torch.device:
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return torch.device(name)


def _step(settings: Settings, batch_size: int) -> Step:
    with reported_as("--algorithms"):
        calls = specs.parse(settings.algorithms or "")
        step = compose(loop_events, [specs.build(call, ALGORITHMS, "algorithm") for call in calls])
    with reported_as("--microbatches"):
        text = settings.microbatches
        if text != "auto" and not text.isdecimal():
            raise ValueError(f"{text}: expected a number of slices, or auto")
        slices = 1 if text == "auto" else int(text)
        if slices > batch_size:
            raise ValueError(f"expected at most {batch_size} slices, one per example of a batch, got {slices}")
        return step if slices == 1 else compose(loop_events, list(step.algorithms), microbatches=slices)


def _states(settings: Settings, data: Data, length: int) -> list[State]:
    """Return the initial states, one for each seed."""
    if settings.seeds < 1:
        raise UsageError(f"--seeds: {settings.seeds}: expected at least 1")
    for name, known in (("loss", LOSSES), ("precision", PRECISIONS)):
        if getattr(settings, name) not in known:
            raise UsageError(f"--{name}: {getattr(settings, name)}: expected one of {', '.join(known)}")
    with reported_as("--duration"):
        duration = _duration(settings.duration or "", kind_of(data))
    optimizer = _optimizer(settings)
    states = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        with reported_as("--seed"):
            run_key = key(seed)
        with reported_as("--model"):
            network = make_network(settings.model or "", data, seed)
        with reported_as("--optimizer"):  # that of a recipe may be for networks with other names
            state = State.create(
                network,
                loss=LOSSES[settings.loss],
                optimizer=optimizer,
                key=run_key,
                duration=duration,
                batches_per_epoch=length,
                precision=settings.precision,
                **kind_of(data).state_options,
            )
        with reported_as("--scale-schedule"):
            states.append(scale_schedule(state, settings.scale_schedule))
    with reported_as("--schedule"):
        for curve in states[0].context.schedules:
            curve(states[0].timestamp)  # a warm-up longer than the run raises here, not at the first batch
    return states


def _optimizer(settings: Settings) -> Any:
    with reported_as("--schedule"):
        curve = specs.build(specs.parse_one(settings.schedule or ""), SCHEDULES, "schedule")
    with reported_as("--optimizer"):
        call = specs.parse_one(settings.optimizer or "")
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


@contextmanager
def arithmetic_of(settings: Settings) -> Iterator[None]:
    """Fix threads and kernels, on which the bits of a result depend, and restore them afterwards."""
    num_threads = settings.threads or 0
    if num_threads < 1:
        raise UsageError(f"--threads: expected a positive number, got {num_threads}")
    threads, were_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warned, benchmarked = (torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark)
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
