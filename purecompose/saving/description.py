"""The static part of a run in words: what a checkpoint says it is of, and how that differs from what is there."""

import difflib
import re
import sys
from collections.abc import Mapping
from typing import Any

import optree
import torch

from purecompose._version import __version__
from purecompose.algorithm import Trait
from purecompose.schedule import Hparam, collect
from purecompose.state import State


__all__ = ["describe", "differences", "environment", "missing_required", "overruled_hparams"]

_EVENT = re.compile(r"<Event\.(\w+): '\w+'>")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SETTINGS = ("optimizer", "loss", "precision", "input_key", "target_key", "program", "microbatches")


def describe(state: State, step: Any = None) -> dict[str, Any]:
    """The static part of a state, and of the step that trains it, in plain values."""
    context = state.context
    loss = context.loss
    words = {
        "model": _words(context.model.module).splitlines(),
        "optimizer": _words(context.optimizer),
        "loss": getattr(loss, "__name__", None) or _words(loss),
        "precision": context.precision,
        "input_key": _words(context.input_key),
        "target_key": _words(context.target_key),
        "frozen": sorted(context.frozen),
        "initialised": list(context.initialised),
        "hparams": {hparam.name: hparam.default for hparam in collect((context.optimizer, _settings(step)), Hparam)},
    }
    if step is None:
        return words
    return {
        **words,
        "program": _EVENT.sub(r"\1", _words(step.program)),
        "microbatches": _cut(step),
        "algorithms": {algorithm.name: _words(algorithm) for algorithm in step.algorithms},
        "required": [a.name for a in step.algorithms if Trait.REQUIRED_ON_LOAD in a.traits],
    }


def environment(state: State, step: Any = None) -> dict[str, Any]:
    """What the bits of a run depend on beside the state: versions, device, threads, and how the step is run."""
    device = state.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    told = {
        "purecompose": __version__,
        "torch": torch.__version__,
        "optree": optree.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "device": name,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    options = getattr(step, "options", None)
    return told if step is None else {**told, "compiled": str(options.backend) if options is not None else "no"}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where two descriptions differ, one line for each thing; what only one of them tells is left out."""
    lines = []
    if saved["model"] != now["model"]:
        changes = [line for line in difflib.ndiff(saved["model"], now["model"]) if line[:1] in "+-"]
        there = "; ".join(line[2:].strip() for line in changes if line[0] == "-") or "nothing more"
        here = "; ".join(line[2:].strip() for line in changes if line[0] == "+") or "nothing more"
        lines.append(f"model: {_short(there)} in the checkpoint, {_short(here)} here")
    for name in _SETTINGS:
        if name in saved and name in now and saved[name] != now[name]:
            lines.append(f"{name}: {_short(saved[name])} in the checkpoint, {_short(now[name])} here")
    if "algorithms" in saved and "algorithms" in now:
        lines += _of_algorithms(saved["algorithms"], now["algorithms"])
    else:
        lines += _of_algorithms(dict.fromkeys(saved["initialised"], ""), dict.fromkeys(now["initialised"], ""))
    return lines


def overruled_hparams(saved: Mapping[str, Any], like: State) -> list[str]:
    """Where the template wants another value of a named scalar than the run began with; one line for each."""
    lines = []
    for name, value in like.hparams.items():
        began = saved.get("hparams", {}).get(name)
        if began is not None and value.ndim == 0 and value != torch.tensor(began, dtype=value.dtype):
            lines.append(
                f"hparam {name!r}: {value.item():g} here is not taken over, the checkpoint's value holds: it is a part "
                "of the state; load it, and replace its hparams"
            )
    return lines


def missing_required(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The algorithms that must be there to load a checkpoint, and are not."""
    present = now.get("algorithms", now["initialised"])
    return [f"{name}: changed the model of the checkpoint" for name in saved.get("required", ()) if name not in present]


def _settings(step: Any) -> list[dict[str, Any]]:
    return [] if step is None else [dict(algorithm.config) for algorithm in step.algorithms]


def _cut(step: Any) -> str:
    size = step.microbatch_size
    return str(step.microbatches or 1) if size is None else f"of at most {size} examples"


def _of_algorithms(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    lines = [
        f"algorithm {told or name}: in the checkpoint, not here" for name, told in saved.items() if name not in now
    ]
    lines += [
        f"algorithm {told or name}: here, not in the checkpoint" for name, told in now.items() if name not in saved
    ]
    both = [name for name in saved if name in now and saved[name] != now[name]]
    lines += [f"algorithm {name}: {saved[name]} in the checkpoint, {now[name]} here" for name in both]
    if not lines and list(saved) != list(now):
        lines.append(f"order of algorithms: {', '.join(saved)} in the checkpoint, {', '.join(now)} here")
    return lines


def _words(thing: Any) -> str:
    """What prints, without addresses in memory, which differ from process to process."""
    return _ADDRESS.sub("", repr(thing))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
