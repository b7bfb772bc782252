"""Comparison of a checkpoint with the state and the step that will continue from it."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from purecompose import tree
from purecompose._support.fingerprint import in_words
from purecompose._support.messages import warn
from purecompose.core.context import Static, memory_for
from purecompose.core.state import State, fields_where
from purecompose.errors import CheckpointWarning, MismatchError
from purecompose.optim.checks import match_or_raise, matched
from purecompose.run.saving.description import (
    KEPT,
    SETTINGS,
    describe,
    differences,
    environment,
    listed,
    missing_required,
    other_modules,
    other_tensors,
    overruled_hparams,
)
from purecompose.run.saving.index import Index
from purecompose.run.saving.leaves import Spec, leaves_of, mismatches


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
    for pattern in {*patterns} - fields:
        match_or_raise(pattern, paths, f"load: ignore: {pattern!r}", "part of a checkpoint")
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
    path: Path, index: Index, like: State, step: Any = None, *, strict: bool = True, ignore: Collection[str] = ()
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
    required = missing_required(index.description, now)
    if required or (misfits and strict):
        lines = [*required, *reported, *misfits]
        raise MismatchError(listed(f"{path} does not fit this state", lines, _HINT), lines)
    current = environment(like, step)
    moved = [
        f"{name}: {old} then, {current[name]} now"
        for name, old in index.environment.items()
        if _differs(current, name, old)
    ]
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


def _differs(now: Mapping[str, Any], name: str, old: Any) -> bool:
    return name in now and now[name] != old and name not in ("purecompose", "optree", "python")
