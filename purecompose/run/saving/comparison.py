"""Comparison of a checkpoint with the state and the step that will continue from it."""

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from purecompose import tree
from purecompose._support import __version__
from purecompose._support.messages import warn
from purecompose._support.objects import in_words
from purecompose.core.compose import Step
from purecompose.core.context import Static
from purecompose.core.state import State
from purecompose.core.values import fields_where, memory_for
from purecompose.errors import CheckpointWarning, MismatchError
from purecompose.nn.model import Model
from purecompose.optim.base import matched, matched_or_raise
from purecompose.run.saving.files import Index
from purecompose.run.saving.leaves import Spec, leaves_of, mismatches
from purecompose.schedule import Hparam, collect
from purecompose.transforms.data_parallel import undivided


_EVENT = re.compile(r"<Event\.(\w+): '\w+'>")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_LINES = 12
_ROOT = "(root)"
SETTINGS = ("eval_mode", "optimizer", "loss", "precision", "input_field", "target_field", "program", "microbatches")


def describe(state: State, step: Step | None = None) -> dict[str, Any]:
    """Return the static part of a state, and of the step that trains it, as plain values."""
    context = state.context
    loss = context.loss
    scalars = [context.optimizer, *(dict(algorithm.config) for algorithm in (() if step is None else step.algorithms))]
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
        "hparams": {hparam.name: hparam.default for hparam in collect(scalars, Hparam)},
    }
    if step is None:
        return words
    size = step.microbatch_size
    return {
        **words,
        "program": _EVENT.sub(r"\1", _words(undivided(step.program))),
        "microbatches": str(step.microbatches or 1) if size is None else f"of at most {size} examples",
        "algorithms": {algorithm.name: _words(algorithm) for algorithm in step.algorithms},
    }


def architecture(model: Model) -> list[str]:
    """Return the modules of a network, one line each, such as '1: Dropout(p=0.1, inplace=False)'."""
    lines = []
    for name, module in model.module.named_modules(remove_duplicate=False):
        settings = " ".join(module.extra_repr().split())
        lines.append(f"{name or _ROOT}: {_ADDRESS.sub('', f'{type(module).__name__}({settings})')}")
    return lines


def other_modules(saved: list[str], now: list[str], place: str) -> list[str]:
    """Return a line for each module whose type differs in two networks, as `architecture` describes them.

    Modules inside a listed one are left out. `place` is the source of the first network, such as "the file".
    """
    there, here = _by_name(saved), _by_name(now)
    found: list[str] = []
    for name in dict.fromkeys([*there, *here]):
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inside and _type(there, name) != _type(here, name):
            found.append(name)
    return unequal(there, here, "model: ", place, among=found)


def other_settings(saved: list[str], now: list[str], place: str) -> list[str]:
    """Return a line for each module whose settings differ; see `other_modules` for the arguments."""
    there, here = _by_name(saved), _by_name(now)
    alike = [name for name in there if _type(there, name) == _type(here, name)]
    return unequal(there, here, "model: ", place, among=alike)


def other_tensors(saved: Mapping[str, str], now: Mapping[str, str], place: str) -> list[str]:
    """Return a line for each tensor among the settings of the user's code that differs; see `Context.settings`."""
    return unequal(saved, now, "", place, among=[name for name in saved if name in now])


def unequal(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    what: str = "",
    place: str = "the checkpoint",
    among: Iterable[str] | None = None,
) -> list[str]:
    """Return a line for each name, by default of all, whose value differs in two mappings, or that only one has."""
    return [
        f"{what}{name}: {_short(saved.get(name, 'nothing'))} in {place}, {_short(now.get(name, 'nothing'))} here"
        for name in (dict.fromkeys((*saved, *now)) if among is None else among)
        if name not in saved or name not in now or saved[name] != now[name]
    ]


KEPT = "settings that are tensors stay those here: build them with the values to use, or make them persistent buffers"
"""Hint for differences of such settings."""


def environment(state: State, step: Step | None = None) -> dict[str, Any]:
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
    lines += unequal(saved, now, among=[name for name in SETTINGS if name in saved and name in now])
    have_words = "algorithms" in saved and "algorithms" in now
    theirs, ours = (one["algorithms"] if have_words else {n: n for n in one["initialised"]} for one in (saved, now))
    found = unequal(theirs, ours, "algorithm ")
    if not found and list(theirs) != list(ours):
        found.append(f"order of algorithms: {', '.join(theirs)} in the checkpoint, {', '.join(ours)} here")
    return lines + found


def overruled_hparams(saved: Mapping[str, Any], like: State) -> list[str]:
    """Return a line for each hparam whose value in the template differs from its initial value in the run."""
    lines = []
    for name, value in like.hparams.items():
        began = saved.get("hparams", {}).get(name)
        if began is not None and value.ndim == 0 and value != torch.tensor(began, dtype=value.dtype):
            lines.append(
                f"hparam {name!r}: {value.item():g} here is not taken over, since it is a part of the state: load it, "
                "and replace its hparams"
            )
    return lines


def _by_name(lines: list[str]) -> dict[str, str]:
    return {name: words for name, _, words in (line.partition(": ") for line in lines)}


def _type(modules: Mapping[str, str], name: str) -> str | None:
    return modules[name].partition("(")[0] if name in modules else None


def listed(text: str, lines: list[str], hint: str = "") -> str:
    """Return a message with lines below it, the first dozen of them, and a hint at the end."""
    shown = [f"\n  {line}" for line in lines[:_MOST_LINES]]
    more = [f"\n  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "".join([f"{text}:", *shown, *more, f"\n{hint}" if hint else ""])


def _words(thing: Any) -> str:
    """Return a repr without memory addresses, which differ between processes."""
    return _ADDRESS.sub("", repr(thing))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


BASE = "base"
"""Key of an index's description for descriptions of the frozen parameters that the checkpoint leaves out."""
TIME = "timestamp"


def unwritten(index: Index, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the settings of a description that no training has written into; see `Context.settings`."""
    settings, is_stacked = index.description["settings"], tensors["key"].ndim > 1  # with a row for each member
    held = {name: tensors[leaf] for name in settings if (leaf := _BUFFER.format(name)) in tensors}
    words = {name: set(map(in_words, value if is_stacked else [value])) for name, value in held.items()}
    return {name: settings[name] for name in words if words[name] == {settings[name]}}


def without(index: Index, like: State, ignore: Collection[str] = ()) -> tuple[Index, set[str]]:
    """Return an index without the leaves that keep their values in a template, and the names of these leaves.

    They are leaves whose paths match a pattern, and settings of the user's code that are others in the template.
    """
    own, description, now = leaves_of(like), index.description, like.context.settings
    leaves = (*index.tensors, *index.values, *own.tensors, *own.values, TIME, *SETTINGS)
    paths = {re.sub(r"\['?([^]]*?)'?]", r".\1", leaf): leaf for leaf in leaves}  # opt_state.exp_avg.0.weight
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    fields = {f"{name}.*" for name in fields_where(persists=True)}  # which may be empty, as an optimizer's memory
    matched_or_raise({*patterns} - fields, paths, "load: ignore", "part of a checkpoint")
    left_out = {paths[path] for path in matched(patterns, tuple(paths))}

    def rest(found: Mapping[str, Any], leaf: str = "{}") -> dict[str, Any]:
        return {name: value for name, value in found.items() if leaf.format(name) not in left_out}

    saved, hparams = (description.get(key, {}) for key in ("settings", "hparams"))
    changes = {
        "frozen": [*rest(dict.fromkeys(description["frozen"]), _PARAM)],
        "hparams": rest(hparams, _HPARAM),
        "settings": rest(saved, _BUFFER),
    }
    left_out.update(_BUFFER.format(name) for name, words in saved.items() if now.get(name, words) != words)
    description = rest({**description, **changes})
    return replace(index, tensors=rest(index.tensors), values=rest(index.values), description=description), left_out


def template(index: Index, like: State) -> State:
    """Return the state with the checkpoint's frozen parameters, and optimizer memory for those that have it there."""
    # Parameters that a method has frozen during the run remain frozen.
    context = like.context
    frozen = frozenset(index.description["frozen"]) & like.params.keys()
    frozen |= _unknown_params(like, index.tensors) & context.frozen
    if frozen != context.frozen:
        like = like.replace(static=Static(context.replace(frozen=frozen), like.timestamp))
    saved = {name for name in index.tensors if name.startswith(_MEMORY)}
    if saved == {f"{_MEMORY}{path}" for path in tree.leaves_with_paths(like.opt_state)}:
        return like
    keys = {key for name in saved for key in name[len(_MEMORY) + 1 : -1].split("][")}
    held = like.context.replace(frozen=frozenset(name for name in frozen if repr(name) not in keys))
    opt_state = memory_for(held, like.params, like.opt_state, is_new=True, key=like.key)
    return like.replace(opt_state=opt_state)


_MEMORY = "opt_state"


def check_fits(
    path: Path,
    index: Index,
    like: State,
    step: Step | None = None,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
) -> None:
    """Compare a checkpoint's index with a state and a step, and raise or warn as described in `load`."""
    now, base = describe(like, step), index.description.get(BASE, {})
    index, left_out = without(index, like, ignore)
    reported = [*differences(index.description, now), *overruled_hparams(index.description, like)]
    hint = KEPT * bool(other_tensors(index.description["settings"], now["settings"], ""))
    specs = {name: Spec.of_text(text) for name, text in index.tensors.items()}
    thawed = sorted(like.context.frozen - _unknown_params(like, specs) - {*index.description["frozen"]})
    if thawed:
        reported.append(
            f"frozen: {', '.join(thawed)} here, not in the checkpoint, whose setting is kept: load it, and "
            "replace(frozen=...)"
        )
    misfits = other_modules(index.description["model"], now["model"], "the checkpoint")
    misfits += mismatches(template(index, like), specs, index.values, {*left_out, *base})
    here = {leaf: in_words(param) for name, param in like.params.items() if (leaf := param_leaf(name)) in base}
    misfits += [
        f"state.{leaf}: {words}, frozen and left out of the checkpoint, {here.get(leaf, 'nothing')} here: give the "
        "state the same base network"
        for leaf, words in base.items()
        if here.get(leaf) != words and leaf not in left_out
    ]
    absent = [name for name in index.description.get("required", ()) if name not in now["initialised"]]
    required = [f"{name}: changed the model of the checkpoint" for name in absent]
    if required or (misfits and strict):
        lines = [*required, *reported, *misfits]
        raise MismatchError(listed(f"{path} does not fit this state", lines, _HINT), lines)
    current = environment(like, step)
    both = [name for name in index.environment if name in current and name not in _NO_BITS]
    moved = unequal(index.environment, current, among=both)
    if reported or misfits:
        warn(listed(f"{path} is loaded with differences", [*reported, *misfits], hint), CheckpointWarning)
    if moved:
        warn(listed(f"{path} continues, perhaps not to the same bits", moved), CheckpointWarning)


_HINT = (
    "give the state the same model, optimizer and algorithms, initialised (step.init), leave parts out by "
    "ignore=[...], or load with strict=False"
)


def param_leaf(name: str) -> str:
    """Return the name of a parameter among the leaves of a state."""
    return _PARAM.format(name)


_PARAM, _BUFFER, _HPARAM = "params[{!r}]", "buffers[{!r}]", "hparams[{!r}]"


def _unknown_params(like: State, specs: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters that a checkpoint lacks."""
    return frozenset(name for name in like.params if param_leaf(name) not in specs)


_NO_BITS = ("purecompose", "optree", "python")
"""Versions that do not affect bits."""
