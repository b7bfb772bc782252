"""Descriptions of the static part of a run, for a checkpoint's index and for comparison."""

import re
import sys
from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import nn

from purecompose._support import __version__
from purecompose.core.state import State
from purecompose.nn.model import Model
from purecompose.schedule import Hparam, collect
from purecompose.transforms.data_parallel import undivided


_EVENT = re.compile(r"<Event\.(\w+): '\w+'>")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_LINES = 12
_ROOT = "(root)"
SETTINGS = ("eval_mode", "optimizer", "loss", "precision", "input_field", "target_field", "program", "microbatches")


def describe(state: State, step: Any = None) -> dict[str, Any]:
    """Return the static part of a state, and of the step that trains it, as plain values."""
    context = state.context
    loss = context.loss
    words = {
        "model": architecture(context.model),
        "eval_mode": list(context.model.evaluated_parts),
        "optimizer": _words(context.optimizer),
        "loss": getattr(loss, "__name__", None) or _words(loss),
        "precision": context.precision,
        "input_field": _words(context.input_field),
        "target_field": _words(context.target_field),
        "frozen": sorted(context.frozen),
        "initialised": list(context.initialised),
        "required": list(context.required),
        "settings": dict(context.settings),
        "hparams": {hparam.name: hparam.default for hparam in collect((context.optimizer, _settings(step)), Hparam)},
    }
    if step is None:
        return words
    return {
        **words,
        "program": _EVENT.sub(r"\1", _words(undivided(step.program))),
        "microbatches": _cut(step),
        "algorithms": {algorithm.name: _words(algorithm) for algorithm in step.algorithms},
    }


def architecture(model: Model) -> list[str]:
    """Return the modules of a network, one line each: qualified name, type and settings.

    Example:
        >>> from torch import nn
        >>> from purecompose.nn.model import from_module
        >>> architecture(from_module(nn.Sequential(nn.ReLU(), nn.Dropout(0.1))).model)
        ['(root): Sequential()', '0: ReLU()', '1: Dropout(p=0.1, inplace=False)']
    """
    modules = model.module.named_modules(remove_duplicate=False)
    return [f"{name or _ROOT}: {_ADDRESS.sub('', _in_words(module))}" for name, module in modules]


def other_modules(saved: list[str], now: list[str], place: str) -> list[str]:
    """Return a line for each module whose type differs in two networks; modules inside a listed one are left out.

    The same weights define another function in such a module, even if names and shapes agree.

    Args:
        saved: One network, as `architecture` describes it.
        now: The other one.
        place: Source of the first one, such as "the file".
    """
    there, here = _by_name(saved), _by_name(now)
    found: list[str] = []
    for name in dict.fromkeys([*there, *here]):
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inside and _type(there.get(name)) != _type(here.get(name)):
            found.append(name)
    return [_difference(name, there, here, place) for name in found]


def other_settings(saved: list[str], now: list[str], place: str) -> list[str]:
    """Return a line for each module whose settings differ; see `other_modules` for the arguments."""
    there, here = _by_name(saved), _by_name(now)
    both = [name for name in there if name in here and _type(there[name]) == _type(here[name])]
    return [_difference(name, there, here, place) for name in both if there[name] != here[name]]


def other_tensors(saved: Mapping[str, str], now: Mapping[str, str], place: str) -> list[str]:
    """Return a line for each tensor among the settings of the user's code that differs; see `Context.settings`."""
    both = [name for name in saved if name in now and saved[name] != now[name]]
    return [f"{name}: {saved[name]} in {place}, {now[name]} here" for name in both]


KEPT = "settings that are tensors stay those here: build them with the values to use, or make them persistent buffers"
"""Hint for differences of such settings."""


def environment(state: State, step: Any = None) -> dict[str, Any]:
    """Return all but the state that a run's bits depend on: versions, device, threads, processes, compilation."""
    device = state.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    reported = {
        "purecompose": __version__,
        "torch": torch.__version__,
        "optree": optree.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "device": name,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if step is None:
        return reported
    options = getattr(step, "options", None)
    processes = 1 if step.ranks is None else step.ranks.size
    return {**reported, "processes": processes, "compiled": str(options.backend) if options is not None else "no"}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference of two descriptions; settings that only one has are left out."""
    lines = other_settings(saved["model"], now["model"], "the checkpoint")
    lines += other_tensors(saved.get("settings", {}), now.get("settings", {}), "the checkpoint")
    for name in SETTINGS:
        if name in saved and name in now and saved[name] != now[name]:
            lines.append(f"{name}: {_short(saved[name])} in the checkpoint, {_short(now[name])} here")
    if "algorithms" in saved and "algorithms" in now:
        lines += _of_algorithms(saved["algorithms"], now["algorithms"])
    else:
        lines += _of_algorithms(dict.fromkeys(saved["initialised"], ""), dict.fromkeys(now["initialised"], ""))
    return lines


def overruled_hparams(saved: Mapping[str, Any], like: State) -> list[str]:
    """Return a line for each hparam whose value in the template differs from its initial value in the run."""
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
    """Return a line for each algorithm that is required to load a checkpoint, but missing."""
    absent = [name for name in saved.get("required", ()) if name not in now["initialised"]]
    return [f"{name}: changed the model of the checkpoint" for name in absent]


def _by_name(lines: list[str]) -> dict[str, str]:
    return {name: words for name, _, words in (line.partition(": ") for line in lines)}


def _type(words: str | None) -> str | None:
    return None if words is None else words.partition("(")[0]


def _difference(name: str, there: Mapping[str, str], here: Mapping[str, str], place: str) -> str:
    one, other = (_short(words.get(name, "nothing")) for words in (there, here))
    return f"model: {name}: {one} in {place}, {other} here"


def _in_words(module: nn.Module) -> str:
    """Return the type and settings of a module, without its children, on one line."""
    return f"{type(module).__name__}({' '.join(module.extra_repr().split())})"


def listed(text: str, lines: list[str], hint: str = "") -> str:
    """Return a message with lines below it, the first dozen of them, and a hint at the end."""
    shown = [f"\n  {line}" for line in lines[:_MOST_LINES]]
    more = [f"\n  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "".join([f"{text}:", *shown, *more, f"\n{hint}" if hint else ""])


def _settings(step: Any) -> list[dict[str, Any]]:
    return [] if step is None else [dict(algorithm.config) for algorithm in step.algorithms]


def _cut(step: Any) -> str:
    size = step.microbatch_size
    return str(step.microbatches or 1) if size is None else f"of at most {size} examples"


def _of_algorithms(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    lines = [
        f"algorithm {text or name}: in the checkpoint, not here" for name, text in saved.items() if name not in now
    ]
    lines += [
        f"algorithm {text or name}: here, not in the checkpoint" for name, text in now.items() if name not in saved
    ]
    both = [name for name in saved if name in now and saved[name] != now[name]]
    lines += [f"algorithm {name}: {saved[name]} in the checkpoint, {now[name]} here" for name in both]
    if not lines and list(saved) != list(now):
        lines.append(f"order of algorithms: {', '.join(saved)} in the checkpoint, {', '.join(now)} here")
    return lines


def _words(thing: Any) -> str:
    """Return a repr without memory addresses, which differ between processes."""
    return _ADDRESS.sub("", repr(thing))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
