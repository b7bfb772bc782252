"""Parts of a run that its settings alone define, and the check of all settings that need no data.

Loading data may take long, so that wrong settings are reported first.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from purecompose import schedule
from purecompose._support import specs
from purecompose._support.device import PRECISIONS
from purecompose._support.specs import check_number, check_whole
from purecompose.cli.options import ALGORITHMS, imported, is_own, option_of, reported_as
from purecompose.cli.settings import LOSSES, OPTIMIZERS, SCHEDULES, Settings, with_arguments
from purecompose.core.algorithm import Algorithm
from purecompose.nn import models
from purecompose.random import key
from purecompose.time import Time, TimeUnit
from purecompose.time.timestamp import checked_interval


_TEXT_MODELS = ("gpt",)
_MOST_THREADS = 1024

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


def is_text_file(data: str) -> bool:
    """Return whether `--data` names a text."""
    return not is_own(data) and data.lower().endswith(".txt")


def defaults_for(is_text: bool, num_examples: int) -> Mapping[str, Any]:
    """Return the settings that suit some data."""
    return _FOR_TEXT if is_text else _FOR_LARGE_SETS if num_examples >= _LARGE else _FOR_SMALL_SETS


def with_defaults(found: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings: those that were chosen, and defaults for the others."""
    settings = {**dataclasses.asdict(Settings()), **found}
    return settings | {name: value for name, value in defaults.items() if settings[name] is None}


def check(found: Mapping[str, Any], option: str = "--set") -> None:
    """Check settings without the data; those that suit the data count as given, except for data of the user's own code.

    `option` has given the arguments under "within".
    """
    data = found.get("data", Settings.data)
    settings = with_defaults(found, {} if is_own(data) else defaults_for(is_text_file(data), num_examples=0))
    unknown = [name for name in found.get("within", {}) if settings.get(name, settings["algorithms"]) is None]
    settings["within"] = {name: one for name, one in found.get("within", {}).items() if name not in unknown}
    complete = Settings(**with_arguments(settings, ALGORITHMS, option))
    for name, part_of in _CHECKED.items():
        if getattr(complete, name) is not None:
            with reported_as(option_of(name)):
                part_of(complete)


def algorithms_of(settings: Settings) -> list[Algorithm]:
    """Return the methods."""
    return [specs.build(call, ALGORITHMS, "algorithm") for call in specs.parse(settings.algorithms or "")]


def schedule_of(settings: Settings) -> Any:
    """Return the factor of the learning rate."""
    return specs.build(specs.parse_one(settings.schedule or ""), SCHEDULES, "schedule")


def optimizer_of(settings: Settings) -> Any:
    """Return the optimizer, with its schedule."""
    call = specs.parse_one(settings.optimizer or "")
    if call.name == "muon":
        raise ValueError(
            "muon moves only matrices; choose them, and an optimizer for the others, in Python: "
            'optim.by_pattern({"blocks.*": optim.muon(0.02)}, optim.adamw(3e-4))'
        )
    plain = specs.build(call, OPTIMIZERS, "optimizer")
    curve = schedule.constant() if settings.schedule is None else schedule_of(settings)
    if call.name == "recipe":
        if curve != schedule.constant():
            raise ValueError(f"{call}: its optimizer has a schedule; leave out --schedule")
        return plain
    return dataclasses.replace(plain, lr=plain.lr * curve)


def network_of(text: str, is_text: bool | None) -> tuple[specs.Call, Any]:
    """Return the call that makes a network, and what it names in own code; `is_text` is `None` for unknown data."""
    call = specs.parse_one(text)
    if is_own(call.name):
        return call, imported(call.name)
    specs.check_name(call.name, models.MODELS, "model")
    if call.args:
        raise ValueError(f"{call}: expected options by name, as in {models.describe(call.name)}")
    models.check_options(call.name, call.kwargs)  # otherwise they could collide with other arguments of build
    if is_text and call.name not in _TEXT_MODELS:
        raise ValueError(f"{call.name} is a network for images; for text there is {', '.join(_TEXT_MODELS)}")
    if is_text is False and call.name in _TEXT_MODELS:
        raise ValueError(f"{call.name} is a network for text, but the data are images")
    return call, None


def duration_of(settings: Settings, is_text: bool | None) -> Time:
    """Return the length of the run; for images it cannot be in tokens."""
    text = settings.duration or ""
    duration = Time.of(text)
    units = [
        TimeUnit.EPOCH,
        TimeUnit.BATCH,
        TimeUnit.UPDATE,
        TimeUnit.SAMPLE,
        *([] if is_text is False else [TimeUnit.TOKEN]),
    ]
    if duration.unit not in units or duration.value <= 0:
        last = "updates or samples" if is_text is False else "updates, samples or tokens"
        names = f"epochs, batches, {last}"
        raise ValueError(f"{text}: expected a number of {names}: 20ep, 500ba or 10000sp")
    return duration


def microbatches_of(settings: Settings) -> int | None:
    """Return the number of slices of a batch, `None` for auto."""
    return _number_unless("auto", settings.microbatches, "slices")


def kept_of(settings: Settings) -> Any:
    """Return the number of checkpoints to keep, or "log"."""
    return _number_unless("log", settings.keep, "checkpoints") or "log"


def _number_unless(word: str, text: str, things: str) -> int | None:
    if text != word and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{text}: expected a number of {things}, at least 1, or {word}")
    return None if text == word else int(text)


def device_of(name: str) -> torch.device:
    """Return a device that can be used here."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = ", ".join(["cpu", *(one for one in ("cuda", "mps") if getattr(torch, one).is_available())])
        reason = str(error).splitlines()[0].partition("Expected one of")[0]  # what follows are all devices of torch
        raise ValueError(f"{name!r} cannot be used here; there is {known}{reason and f': {reason}'}") from error
    return torch.device(name)


def _check_device(settings: Settings) -> None:
    if not settings.device.startswith("cuda") or not torch.cuda.is_available():
        device_of(settings.device)  # a GPU is tried when each process knows which one is its own


def _check_loss(settings: Settings) -> None:
    try:
        specs.check_name(settings.loss, LOSSES, "loss")
    except specs.SpecError as error:
        raise ValueError(f"{error}; others need a program: pc.train(..., loss=...)") from error


def _check_patience(settings: Settings) -> None:
    checked_interval(settings.patience, "patience")
    if settings.seeds > 1:
        raise ValueError("the networks of a population would stop at different times; leave out --seeds")


def _is_whole(name: str, high: float = float("inf")) -> Callable[[Settings], int]:
    return lambda settings: check_whole(getattr(settings, name), name, 1, high)


def _is_interval(name: str, *, seconds: bool = False) -> Callable[[Settings], Time]:
    return lambda settings: checked_interval(getattr(settings, name), name, seconds=seconds)


_CHECKED: Mapping[str, Callable[[Settings], Any]] = {
    "model": lambda settings: network_of(settings.model or "", is_text_file(settings.data) or None),
    "algorithms": algorithms_of,
    "loss": _check_loss,
    "schedule": schedule_of,
    "optimizer": optimizer_of,
    "duration": lambda settings: duration_of(settings, None if is_own(settings.data) else is_text_file(settings.data)),
    "scale_schedule": lambda settings: check_number(settings.scale_schedule, "ratio", 0, above=True),
    "batch_size": _is_whole("batch_size"),
    "microbatches": microbatches_of,
    "seeds": _is_whole("seeds"),
    "seed": lambda settings: (key(settings.seed), key(settings.seed + settings.seeds - 1)),
    "precision": lambda settings: specs.check_name(settings.precision, dict.fromkeys(PRECISIONS), "precision"),
    "device": _check_device,
    "threads": _is_whole("threads", _MOST_THREADS),
    "eval_every": _is_interval("eval_every"),
    "validation": lambda settings: check_number(settings.validation, "share of the training data", 0, 1, below=True),
    "patience": _check_patience,
    "checkpoint_every": _is_interval("checkpoint_every", seconds=True),
    "keep": kept_of,
    "keep_best": _is_whole("keep_best"),
}
"""What to check of each setting; the functions raise a `ValueError` or a `TypeError`."""
