"""Preparation of a run from its settings: data, network, step and state; all errors in the settings are found here."""

import copy
import inspect
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from purecompose import data as datasets, metrics
from purecompose._support import specs
from purecompose._support.device import building
from purecompose.algorithms import scale_schedule
from purecompose.cli.options import ALGORITHMS, UsageError, check_imports, imported, is_own, reported_as
from purecompose.cli.parts import (
    Processes,
    algorithms_of,
    check,
    defaults_for,
    device_of,
    duration_of,
    is_text_file,
    microbatches_of,
    network_of,
    optimizer_of,
    with_defaults,
)
from purecompose.cli.settings import LOSSES, Settings, with_arguments
from purecompose.core.compose import Step, compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
from purecompose.data import Arrays, CharacterVocabulary, ImageData, TextData
from purecompose.nn import layers, models
from purecompose.random import key
from purecompose.run.evaluation import Evaluator
from purecompose.run.rules import EarlyStopping, Stopper
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


def kind_of(data: Data) -> Kind:
    return TEXT if isinstance(data, TextData) else IMAGES


def load_data(settings: Settings) -> tuple[Data, dict[str, Any]]:
    """Return the data that the settings name, and the settings that follow from the data."""
    # The settings get an absolute path, because the run's folder may later be used from another working directory.
    with reported_as("--data"):
        if is_own(settings.data):
            return _own_data(settings.data), {}
        if is_text_file(settings.data):
            path = Path(settings.data).expanduser()
            length = _LENGTH if settings.length is None else settings.length
            if length < 1:
                raise UsageError(f"--length: {length}: expected a number of characters, at least 1")
            with reported_as("--vocabulary"):
                known = None if settings.vocabulary is None else CharacterVocabulary(settings.vocabulary)
            data = datasets.load_text(path, length, vocabulary=known)
            return data, {"data": str(path.resolve()), "length": length, "vocabulary": data.vocabulary.characters}
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
    targets = given[1], given[3]
    if any(part.is_floating_point() or part.ndim != 1 for part in targets) or len(given[0]) != len(given[1]):
        raise ValueError(f"{name}: expected classes as whole numbers (N,), one for each input")
    return ImageData(*given, num_classes=1 + int(max(part.max().item() for part in targets)))


def make_network(text: str, data: Data, seed: int) -> nn.Module:
    """Return the network that a call names, with weights drawn from a seed; its outputs have the classes in dim 1.

    Functions and classes of the user's own code are called with `in_shape` and `num_classes` if they have such
    parameters.
    """
    is_text = isinstance(data, TextData)
    call, factory = network_of(text, is_text)
    shape = {"in_shape": data.in_shape, "num_classes": data.num_classes}
    if not is_own(call.name):
        net = models.build(call.name, **shape, seed=seed, **call.kwargs)
        return layers.ClassesSecond(net) if is_text else net
    if isinstance(factory, nn.Module):
        made = copy.deepcopy(factory)
    else:
        known = inspect.signature(factory).parameters if callable(factory) else {}
        given = {key: value for key, value in shape.items() if key in known and key not in call.kwargs}
        own = specs.Call(call.name, call.args, {**given, **call.kwargs})
        with building(seed):
            made = specs.build(own, {call.name: factory}, "model")
    if not isinstance(made, nn.Module):
        raise ValueError(f"{call.name} returned a {type(made).__name__}, expected a torch.nn.Module")
    return layers.ClassesSecond(made) if is_text else made


class Setup(NamedTuple):
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
    """Return all settings, with defaults that suit the data, and the data; `allowed` as for `check_imports`."""
    check_imports(found, allowed)
    check(found)
    named = {name: value for name, value in with_defaults(found, {}).items() if name != "within"}
    data, reported = load_data(Settings(**named))
    suited = defaults_for(kind_of(data) is TEXT, len(data.train_targets))
    return Settings(**with_arguments(with_defaults({**found, **reported}, suited), ALGORITHMS)), data


def prepare(settings: Settings, data: Data, processes: Processes | None = None, sharding: str | None = None) -> Setup:
    """Return the run that complete settings define, in one of several processes; for `sharding` see `train`."""
    kind, processes = kind_of(data), processes or Processes()
    inputs, targets, *aside = _divided(settings, data)
    with reported_as("--batch-size"):
        assert settings.batch_size is not None
        batch_size = min(settings.batch_size, len(targets))
        # A smaller last batch is left out of an epoch, because it might have fewer examples than microbatches.
        train_data = kind.batches(inputs, targets, batch_size)
    with reported_as("--device"):
        device = device_of(processes.device(settings.device))
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
    if settings.validation == 0:
        return data.train_inputs, data.train_targets
    with reported_as("--validation"):
        # The same examples for every seed of the run, so that runs are comparable.
        return tuple(datasets.split(data.train_inputs, data.train_targets, settings.validation, seed=0))


def _step(settings: Settings, batch_size: int) -> Step:
    with reported_as("--algorithms"):
        step = compose(loop_events, algorithms_of(settings))
    with reported_as("--microbatches"):
        slices = microbatches_of(settings) or 1
        if slices > batch_size:
            raise ValueError(f"expected at most {batch_size} slices, one per example of a batch, got {slices}")
        return step if slices == 1 else compose(loop_events, list(step.algorithms), microbatches=slices)


def _states(settings: Settings, data: Data, length: int) -> list[State]:
    """Return the initial states, one for each seed."""
    with reported_as("--duration"):
        duration = duration_of(settings, kind_of(data) is TEXT)
    with reported_as("--optimizer"):
        optimizer = optimizer_of(settings)
    states = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        with reported_as("--model"):
            network = make_network(settings.model or "", data, seed)
        with reported_as("--optimizer"):  # that of a recipe may be for networks with other names
            state = State.create(
                network,
                loss=LOSSES[settings.loss],
                optimizer=optimizer,
                key=key(seed),
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


@contextmanager
def arithmetic_of(settings: Settings) -> Iterator[None]:
    """Fix threads and kernels, on which the bits of a result depend, and restore them afterwards."""
    threads, were_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    only_warned, benchmarked = (torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark)
    # cuBLAS reads this when it starts. Without it, torch warns of matrix products in deterministic mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        stack.callback(setattr, torch.backends.cudnn, "benchmark", benchmarked)
        torch.set_num_threads(settings.threads or 1)
        torch.backends.cudnn.benchmark = False
        # The first call spends a second on imports. If Ctrl-C interrupts them, nothing is set, and the callback that
        # restores the mode would fail; it is therefore registered afterwards.
        torch.use_deterministic_algorithms(True, warn_only=True)
        stack.callback(torch.use_deterministic_algorithms, were_deterministic, warn_only=only_warned)
        yield
