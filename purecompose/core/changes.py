"""Translation of changes under convenient names to changes of a state's fields."""

import dataclasses
import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.checks import shown
from purecompose.core.context import Context, Static
from purecompose.optim.carried import carried
from purecompose.optim.checks import match_or_raise, matched
from purecompose.schedule import Schedule, collect


_CONTEXT_FIELDS = frozenset(field.name for field in dataclasses.fields(Context) if field.init)


def translated(state: Any, changes: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Translate changes under convenient names to changes of fields.

    Args:
        state: The state to be changed.
        changes: New values by name: fields, names of `Context`, `inputs`, `targets`, `timestamp`.
        fields: The names of the state's fields.
    """
    found = {name: value for name, value in changes.items() if name in fields}
    new_batch, new_static = found.get("batch", state.batch), found.get("static", state.static)
    context = new_static.context
    # The model comes first, because names of parameters refer to the new model.
    for name, value in sorted(changes.items(), key=lambda change: change[0] != "model"):
        if name in fields:
            continue
        if name in ("inputs", "targets"):
            new_batch = batches.put(new_batch, context.input_field if name == "inputs" else context.target_field, value)
        elif name == "timestamp":
            new_static = Static(new_static.context, value)
        elif name in _CONTEXT_FIELDS:
            new_static = Static(_with(new_static.context, name, value), new_static.timestamp)
        else:
            known = sorted({*fields, *_CONTEXT_FIELDS, "inputs", "targets", "timestamp"})
            raise TypeError(f"a state has no field {name!r}; it has {', '.join(known)}")
    if "model" in changes:
        buffers = found.get("buffers", state.buffers)
        before = buffers if "settings" in changes else state.buffers
        new_static = Static(new_static.context.with_settings(buffers, before), new_static.timestamp)
    if new_batch is not state.batch:
        found["batch"] = new_batch
    if new_static is not state.static:
        found["static"] = new_static
    if "frozen" in changes:
        context, params = new_static.context, found.get("params", state.params)
        _check_trainable(context.trainable, params)
        if "opt_state" not in found:
            is_new = state.clock is None and state.timestamp.batch == 0
            found["opt_state"] = memory_for(context, params, state.opt_state, is_new=is_new, key=state.key)
    return found


def as_hparams(values: Mapping[str, Any], key: Tensor, device: torch.device) -> Mapping[str, Any]:
    """Return named scalars as tensors on a device: numbers become 0-d float32."""
    num_dims = key.ndim - 1  # a population has a key for each member
    if all(_is_scalar(value, num_dims) and value.device == device for value in values.values()):
        return values
    return {name: _scalar(name, value, num_dims, device) for name, value in values.items()}


def memory_for(
    context: Context, params: Mapping[str, Tensor], opt_state: Any, *, is_new: bool, key: Tensor | None = None
) -> Any:
    """Return the optimizer's state after other parameters have been frozen, with memory for all that train now.

    Args:
        context: The context, with the optimizer and the parameters that are frozen now.
        params: The parameters.
        opt_state: The optimizer's state before.
        is_new: True if frozen parameters need not keep their memory, because there was no step yet.
        key: The state's key, from which a population is known by its members.
    """
    if key is not None and key.ndim > 1:
        members = [tree.map(lambda leaf, i=i: leaf[i], (dict(params), opt_state)) for i in range(len(key))]
        return tree.map(
            lambda *leaves: torch.stack(leaves), *[memory_for(context, *member, is_new=is_new) for member in members]
        )
    kept = {name: name for name in params if not (is_new and name in context.frozen)}
    return carried(context.optimizer, opt_state, params, kept, context.frozen)


def check_params(given: Any, own: Mapping[str, Tensor], *, is_other_model: bool) -> None:
    """Raise if parameters are not a mapping, or have other names than the model's."""
    if not isinstance(given, Mapping):
        raise TypeError(f"replace(params=...): expected tensors by name, got {shown(given)}")
    if is_other_model or given.keys() == own.keys():
        return
    lacks, strange = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    parts = [f"missing {', '.join(lacks)}"] * bool(lacks) + [f"unknown {', '.join(strange)}"] * bool(strange)
    raise ValueError(
        f"replace(params=...): {' and '.join(parts)}. Pass all parameters, params={{**state.params, name: value}}; to "
        "change which there are, replace the model too, replace(model=..., params=...)"
    )


def _check_trainable(names: Iterable[str], params: Mapping[str, Tensor]) -> None:
    """Raise a `ValueError` if a parameter that is not floating point is not frozen."""
    whole = [name for name in names if not (params[name].is_floating_point() or params[name].is_complex())]
    if whole:
        raise ValueError(
            f"replace(frozen=...) leaves out {', '.join(whole)}, of {params[whole[0]].dtype}: only floating numbers "
            "have a gradient, so freeze it too"
        )


def _is_scalar(value: Any, num_dims: int) -> bool:
    return isinstance(value, Tensor) and value.ndim <= num_dims


def _scalar(name: str, value: Any, num_dims: int, device: torch.device) -> Tensor:
    if _is_scalar(value, num_dims):
        return value.to(device)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return torch.full((), float(value), dtype=torch.float32, device=device)
    raise TypeError(
        f"hparams[{name!r}]: expected a number or a 0-d tensor, got {shown(value)}; a population's has a row for each "
        "member, torch.tensor([0.1, 0.2]). For one of each parameter, name several in the optimizer's groups, as in "
        "sgd(0.1, groups={'0.weight': {'lr': hparam('lr.0.weight', 0.1)}})"
    )


def _with(context: Context, name: str, value: Any) -> Context:
    if name in ("frozen", "paused"):
        value = _parameter_names(name, value, context.param_names)
    context = context.replace(**{name: value})
    if name != "optimizer":
        return context
    return context.replace(schedules=tuple(dict.fromkeys([*context.schedules, *collect(value, Schedule)])))


def _parameter_names(which: str, given: Any, known: tuple[str, ...]) -> frozenset[str]:
    """Return the parameters that match the given names and patterns (as in `fnmatch`)."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{which}: expected a collection of names or patterns, as in ['0.*'], got {shown(given)}")
    given = frozenset(given)
    patterns = given.difference(known)
    for pattern in patterns:
        match_or_raise(pattern, known, f"{which}: {pattern!r}")
    return given - patterns | matched(tuple(patterns), known)
