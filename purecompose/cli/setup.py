"""Preparation of a run from its settings: data, network, step and state; all errors in the settings are found here."""

import copy
import dataclasses
import inspect
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from purecompose import data as datasets, metrics, schedule
from purecompose._support import specs
from purecompose._support.device import PRECISIONS, building
from purecompose.algorithms import scale_schedule
from purecompose.cli.options import UsageError, reported_as
from purecompose.cli.processes import Processes
from purecompose.cli.settings import (
    ALGORITHMS,
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    Settings,
    check_imports,
    imported,
    is_own,
    with_arguments,
)
from purecompose.core.compose import Step, compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
from purecompose.data import Arrays, CharacterVocabulary, ImageData, TextData
from purecompose.nn import layers, models
from purecompose.random import key
from purecompose.run.evaluation import Evaluator
from purecompose.run.rules import EarlyStopping, Stopper
from purecompose.time import Time, TimeUnit
from purecompose.transforms.compilation import CompiledStep, compile
from purecompose.transforms.population import population, stack_states


Data: TypeAlias = ImageData | TextData

_LENGTH = 128
_EVAL_IMAGES, _EVAL_TOKENS = 1000, 2**14


class Kind(NamedTuple):
    """The properties of a kind of data that the command line uses."""

    noun: str
    """Plural noun for the examples."""
    names: tuple[str, str] | None
    """Names of inputs and targets in a batch; `None` for pairs."""
    metrics: Mapping[str, Any]
    """Metrics that are evaluated in addition to the loss."""
    decides: str
    """Name of the metric that selects the best checkpoint."""

    def batches(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Arrays:
        """Return batches for training; a smaller last one is left out."""
        return datasets.arrays(inputs, targets, batch_size, drop_last=True, names=self.names)

    def stored(self, inputs: Tensor, targets: Tensor) -> Arrays:
        """Return batches for evaluation, in the stored order."""
        size = _EVAL_IMAGES if self.names is None else max(1, _EVAL_TOKENS // inputs.shape[1])
        return datasets.arrays(inputs, targets, size, shuffle=False, names=self.names)

    @property
    def state_options(self) -> dict[str, Any]:
        """Arguments of `State.create` that name the fields of inputs and targets."""
        return {} if self.names is None else {"input_field": self.names[0], "target_field": self.names[1]}


IMAGES = Kind("images", None, {"accuracy": metrics.accuracy}, decides="accuracy")
TEXT = Kind(
    "windows",
    ("input_ids", "labels"),
    {"perplexity": metrics.perplexity(), "accuracy": metrics.accuracy},
    decides="loss",
)
_TEXT_MODELS = ("gpt",)


def kind_of(data: Data) -> Kind:
    """Return the kind of the data."""
    return TEXT if isinstance(data, TextData) else IMAGES


def load_data(settings: Settings) -> tuple[Data, dict[str, Any]]:
    """Return the data that the settings name, and the settings that follow from the data.

    Raises:
        UsageError: There are no such data, or a setting for text is given with images.
        ImportError: A package that the data need is missing.
    """
    # The settings get an absolute path, because the run's folder may later be used from another working directory.
    with reported_as("--data"):
        if is_own(settings.data):
            return _own_data(settings.data), {}
        if settings.data.lower().endswith(".txt"):
            path = Path(settings.data).expanduser()
            data = datasets.load_text(path, _length(settings), vocabulary=_vocabulary(settings))
            length, characters = data.train_inputs.shape[1], data.vocabulary.characters
            return data, {"data": str(path.resolve()), "length": length, "vocabulary": characters}
        name = str(Path(settings.data).resolve()) if Path(settings.data).exists() else settings.data
        images = datasets.load(name)
    for setting in ("length", "vocabulary"):
        if getattr(settings, setting) is not None:
            raise UsageError(f"--{setting}: {settings.data} holds images; --{setting} is for text")
    return images, {"data": name}


def _own_data(name: str) -> Data:
    """Return the data from a function of the user's own code.

    It returns `data.ImageData`, `data.TextData`, or four tensors: inputs and classes for training, then for testing.
    """
    found = imported(name)
    given = found() if callable(found) else found
    if isinstance(given, ImageData | TextData):
        return given
    if not isinstance(given, tuple | list) or len(given) != 4 or not all(isinstance(part, Tensor) for part in given):
        raise ValueError(
            f"{name} returned a {type(given).__name__}, expected data.ImageData, data.TextData or four tensors: inputs "
            "and classes for training, then for testing"
        )
    targets = [given[1], given[3]]
    if any(part.is_floating_point() or part.ndim != 1 for part in targets) or len(given[0]) != len(given[1]):
        raise ValueError(f"{name}: expected classes as whole numbers (N,), one for each input")
    return ImageData(*given, num_classes=1 + int(max(part.max().item() for part in targets)))


def _length(settings: Settings) -> int:
    length = _LENGTH if settings.length is None else settings.length
    if length < 1:
        raise UsageError(f"--length: {length}: expected a number of characters, at least 1")
    return length


def _vocabulary(settings: Settings) -> CharacterVocabulary | None:
    with reported_as("--vocabulary"):
        return None if settings.vocabulary is None else CharacterVocabulary(settings.vocabulary)


def make_network(text: str, data: Data, seed: int) -> nn.Module:
    """Return the network that a call names, with weights drawn from a seed; its outputs have the classes in dim 1.

    Functions and classes of the user's own code are called with `in_shape` and `num_classes` if they have such
    parameters.
    """
    call, is_text = specs.parse_one(text), isinstance(data, TextData)
    shape = {"in_shape": data.in_shape, "num_classes": data.num_classes}
    if is_own(call.name):
        with building(seed):
            made = _own_network(call, shape)
        if not isinstance(made, nn.Module):
            raise ValueError(f"{call.name} returned a {type(made).__name__}, expected a torch.nn.Module")
        return layers.ClassesSecond(made) if is_text else made
    specs.check_name(call.name, models.MODELS, "model")
    if call.args:
        raise ValueError(f"{call}: expected options by name, as in {models.describe(call.name)}")
    models.check_options(call.name, call.kwargs)  # otherwise they could collide with other arguments of build
    if is_text and call.name not in _TEXT_MODELS:
        raise ValueError(f"{call.name} is a network for images; for text there is {', '.join(_TEXT_MODELS)}")
    if not is_text and call.name in _TEXT_MODELS:
        raise ValueError(f"{call.name} is a network for text, but the data are images")
    net = models.build(call.name, **shape, seed=seed, **call.kwargs)
    return layers.ClassesSecond(net) if is_text else net


def _own_network(call: specs.Call, shape: Mapping[str, Any]) -> Any:
    factory = imported(call.name)
    if isinstance(factory, nn.Module):
        return copy.deepcopy(factory)
    known = inspect.signature(factory).parameters if callable(factory) else {}
    given = {key: value for key, value in shape.items() if key in known and key not in call.kwargs}
    return specs.build(specs.Call(call.name, call.args, {**given, **call.kwargs}), {call.name: factory}, "model")


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


def completed(found: Mapping[str, Any], *, allowed: Collection[str] | None = ()) -> tuple[Settings, Data]:
    """Return all settings, completed by defaults that suit the data, and the data.

    Args:
        found: The settings that were chosen.
        allowed: Names of the user's own code that may be imported; `None` for all.
    """
    check_imports(found, allowed)
    settings = {**dataclasses.asdict(Settings()), **found}
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
    states = [step.init(state.to(device)) for state in _states(settings, data, len(train_data))]
    wanted = {**kind.metrics, "loss": metrics.mean_loss()}
    watched = "val" if aside else "eval"
    with reported_as("--eval-every"):
        # With validation data, which make all decisions, the test data are evaluated only once.
        evaluators = (Evaluator(test_data, wanted, every="1dur" if aside else settings.eval_every),)
        if aside:
            held = kind.stored(aside[0], aside[1]).to(device)
            evaluators = (Evaluator(held, wanted, every=settings.eval_every, label="val"), *evaluators)
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
