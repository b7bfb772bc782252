"""Comparison of a checkpoint with the state and the step that will continue from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from purecompose import tree
from purecompose._support.warnings import warn
from purecompose.core.changes import memory_for
from purecompose.core.context import Static
from purecompose.core.state import State
from purecompose.run.saving.description import (
    describe,
    differences,
    environment,
    listed,
    missing_required,
    other_modules,
    overruled_hparams,
)
from purecompose.run.saving.errors import CheckpointWarning, MismatchError
from purecompose.run.saving.index import Index
from purecompose.run.saving.leaves import Spec, checksum, mismatches


__all__ = ["BASE", "check_fits", "param_leaf", "template"]

BASE = "base"
"""Key of an index's description for the checksum of the frozen parameters that the checkpoint leaves out."""


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
    without = frozenset(name for name in frozen if repr(name) not in keys)
    held = like.context.replace(frozen=without)
    opt_state = memory_for(held, like.params, like.opt_state, is_new=True, key=like.key)
    return like.replace(opt_state=opt_state)


_MEMORY = "opt_state"


def check_fits(
    path: Path, index: Index, like: State, step: Any = None, *, strict: bool = True, is_adaptive: bool = False
) -> None:
    """Compare a checkpoint's index with a state and a step, and raise or warn as described in `load`."""
    now = describe(like, step)
    reported = [*differences(index.description, now), *overruled_hparams(index.description, like)]
    if is_adaptive:
        reported = [line for line in reported if not line.startswith("microbatches:")]
    specs = {name: Spec.of_text(text) for name, text in index.tensors.items()}
    thawed = sorted(like.context.frozen - _unknown_params(like, specs) - {*index.description["frozen"]})
    if thawed:
        reported.append(
            f"frozen: {', '.join(thawed)} here, not in the checkpoint, whose setting is kept: load it, and "
            "replace(frozen=...)"
        )
    misfits = other_modules(index.description["model"], now["model"], "the checkpoint")
    base = index.description["frozen"] if BASE in index.description else ()
    misfits += mismatches(template(index, like), specs, index.values, elsewhere=base)
    misfits += _other_base(index.description[BASE], base, like) if base else []
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
        warn(listed(f"{path} is loaded with differences", [*reported, *misfits]), CheckpointWarning)
    if moved:
        warn(listed(f"{path} continues, perhaps not to the same bits", moved), CheckpointWarning)


_HINT = "give the state the same model, optimizer and algorithms, initialised (step.init), or load with strict=False"


def _other_base(saved: str, names: list[str], like: State) -> list[str]:
    """Return a line if the frozen parameters that a checkpoint leaves out are not those of a template."""
    gone = [name for name in names if name not in like.params]
    if gone:
        return [f"state.{param_leaf(name)}: frozen and left out of the checkpoint, not here" for name in gone]
    if checksum({name: like.params[name] for name in names}) == saved:
        return []
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return [
        f"state.params: the checkpoint leaves out {len(names)} frozen parameters ({shown}), which have other values "
        "here than where it was written: give the state the same base network"
    ]


def param_leaf(name: str) -> str:
    """Return the name of a parameter among the leaves of a state."""
    return f"params[{name!r}]"


def _unknown_params(like: State, specs: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters that a checkpoint lacks."""
    return frozenset(name for name in like.params if param_leaf(name) not in specs)


def _differs(now: Mapping[str, Any], name: str, old: Any) -> bool:
    return name in now and now[name] != old and name not in ("purecompose", "optree", "python")
