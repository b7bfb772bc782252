"""Complete surgery, on a model with its tensors, on a state with its optimizer's groups, or on a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from purecompose import random
from purecompose._support.messages import warn
from purecompose.core.state import State
from purecompose.nn.model import Model, from_module
from purecompose.optim.by_pattern import carried
from purecompose.optim.wrapping import rules_of
from purecompose.random.keys import as_rng
from purecompose.surgery.visiting import (
    Originals,
    Rules,
    Where,
    left_alone,
    replacements,
    warn_of_nothing,
    with_replacements,
    within,
)


@dataclass(frozen=True)
class Report:
    """Changes made by a surgery, by qualified names."""

    replaced: tuple[str, ...]
    """Names of the modules that were replaced."""
    kept: Mapping[str, str]
    """Map from the new names of kept parameters and buffers to their old names."""
    dropped: tuple[str, ...]
    """Old names of parameters and buffers that were dropped."""
    made: tuple[str, ...]
    """New names of parameters and buffers that were made."""

    def __str__(self) -> str:
        """Return a line for each kind of change; parameters that keep their names are not listed."""
        moved = [f"{old} -> {new}" for new, old in self.kept.items() if new != old]
        lines = {
            "replaced": [name or "the whole network" for name in self.replaced],
            "moved": moved,
            "dropped": self.dropped,
            "made": self.made,
        }
        return "\n".join(f"{kind:<9}{', '.join(names) or 'nothing'}" for kind, names in lines.items())


class Surgery(NamedTuple):
    """Result of a surgery on a network."""

    model: Model
    """The network after the surgery."""
    params: dict[str, Tensor]
    """Parameters by their new names; kept parameters are the same tensors."""
    buffers: dict[str, Tensor]
    """Buffers by their new names; kept buffers are the same tensors."""
    frozen: frozenset[str]
    """Names of frozen parameters: those frozen before, and made ones with `requires_grad=False`."""
    opt_state: Any
    """State of the optimizer: unchanged for kept parameters, and fresh for made ones."""
    report: Report
    """What was replaced, kept, dropped and made."""


def replace(
    model: Model,
    rules: Rules,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    key: Tensor | random.Rng,
    frozen: Iterable[str] | None = None,
    optimizer: Any = None,
    opt_state: Any = None,
    where: Where = None,
    skips_frozen: bool = False,
    name: str = "surgery.replace",
) -> Surgery:
    """Replace modules in a network.

    Each module is visited once, parents before children, in the order of definition. Neither the replaced module nor
    the result of a rule is searched. A module that is used in several places is replaced in all of them, except inside
    new modules into which another rule has put it; tied parameters stay tied. New modules get the training flag of the
    module that they replace. New parameters are moved to the device of the network, floating ones to the floating dtype
    of the module that they replace.

    A rule is given a copy of the module that shares its tensors. It may change settings of this module, and remove
    parameters and modules from it, if it returns the module, which then counts as replaced.

    Args:
        model: The architecture, such as `from_module(net).model` or `state.model`.
        rules: The rules by type of module, including subclasses. Each rule is called with the module, whose tensors it
            may reuse but must not write into, and its `Site`. The module is not replaced if the rule returns `None`.
        params: The parameters by name.
        buffers: The buffers by name.
        key: The key with which new parameters are drawn.
        frozen: Names of frozen parameters; by default those that were frozen when the model was created.
        optimizer: The optimizer to which `opt_state` belongs.
        opt_state: The state of the optimizer, or `None`.
        where: Pattern or patterns (`fnmatch`) of the names of modules that may be replaced, with all that they contain,
            such as "student.*"; by default all.
        skips_frozen: Leave parts without trainable parameters alone, such as a frozen teacher: modules with parameters
            of which none trains, with all that they contain. If nothing trains in the whole network, none is skipped.
        name: Name of the surgery in warnings and errors.

    Raises:
        TypeError: A rule returned something other than a module or `None`, or `opt_state` is given without `optimizer`.
        ValueError: Two rules replace the same module, a pattern matches no module, or a group of the optimizer has lost
            all its parameters.
        RuntimeError: A rule tried to write into a tensor of the network.

    Warns:
        UserWarning: No module was replaced, and the network has no module with the rule `None`; or parameters are in
            another group of the optimizer by their new names.
    """
    if opt_state is not None and optimizer is None:
        raise TypeError("surgery.replace: expected the optimizer of opt_state, got None; give both or neither")
    given = {**params, **buffers}
    frozen = None if frozen is None else frozenset(frozen)
    root = model.skeleton(train=True).filled_copy(params, buffers, is_shared=True)
    if frozen is not None:
        _set_trained(root, model.param_names, frozen)
    originals = Originals(root, given, name)
    reach = within(root, where, model.frozen_parts(frozen) if skips_frozen else ())
    found = list(replacements(root, rules, as_rng(key, name), originals, reach))
    if not found and not any(isinstance(module, left_alone(rules)) for module in root.modules()):
        warn_of_nothing(name, root, rules, reach)
    root = with_replacements(root, found, originals)
    # Tensors that are not the model's, such as a loss's, stay as they are.
    others = given.keys() - {*model.param_names, *model.buffer_names}
    kept = {**originals.found_in(root), **{name: name for name in given if name in others}}
    parts = from_module(root, is_shared=True)
    device = next((tensor.device for tensor in given.values()), torch.device("cpu"))

    def settled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Return the caller's tensors for kept ones, not other tensors on the same memory.
        return {name: given[kept[name]] if name in kept else made.to(device) for name, made in tensors.items()}

    before = params
    params = {**settled(parts.params), **{name: params[name] for name in params if name in others}}
    buffers = {**settled(parts.buffers), **{name: buffers[name] for name in buffers if name in others}}
    now_frozen = parts.frozen.union(others.intersection(frozen or ()))
    kept_params = {new: old for new, old in kept.items() if new in params}
    if optimizer is not None:
        _warn_of_moves(name, optimizer, before, params, kept_params)
    if opt_state is not None:
        try:
            opt_state = carried(optimizer, opt_state, params, kept_params, now_frozen)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; patterns have to match names before and after the surgery") from error
    stayed = set(kept.values())
    gone = tuple(name for name in given if name not in stayed)
    made = tuple(name for name in (*params, *buffers) if name not in kept)
    report = Report(tuple(site.name for site, _, _ in found), kept, gone, made)
    return Surgery(parts.model, params, buffers, now_frozen, opt_state, report)


@overload
def operate(
    target: State, rules: Rules, *, name: str, where: Where = None, skips_frozen: bool = False
) -> tuple[State, Report]: ...


@overload
def operate(
    target: nn.Module,
    rules: Rules,
    *,
    name: str,
    key: int | Tensor = 0,
    where: Where = None,
    skips_frozen: bool = False,
) -> tuple[nn.Module, Report]: ...


def operate(
    target: State | nn.Module,
    rules: Rules,
    *,
    name: str,
    key: int | Tensor | None = None,
    where: Where = None,
    skips_frozen: bool = False,
) -> tuple[State | nn.Module, Report]:
    """Apply `replace` to a state, including its optimizer and optimizer state, or to a plain `nn.Module`.

    Slots of a state are not changed: entries of a slot for single parameters keep the old names. Between two steps,
    rename them yourself by `report.kept`, or start such a method afterwards.

    A module is copied, and the copy is returned, with separate weights and in the same mode (train or eval). Create its
    optimizer from the copy.

    Args:
        target: A state, before or during a run, or a network.
        rules: See `replace`.
        name: Name of the surgery in warnings, and of its draws.
        key: For a module, the seed or key with which new parameters are drawn, 0 by default. For a state, the run's key
            is used.
        where, skips_frozen: Which parts are changed; see `replace`. By default all, also those that are frozen.

    Raises:
        TypeError, ValueError, RuntimeError: See `replace`, and `State.create` for a module.

    Warns:
        UserWarning: See `replace`.

    Example::

        def smooth(conv, site):
            return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv) if max(conv.stride) > 1 else None

        state, report = surgery.operate(state, {nn.Conv2d: smooth}, name="smooth")
    """
    if isinstance(target, nn.Module):
        return _on_module(target, rules, name, 0 if key is None else key, where=where, skips_frozen=skips_frozen)
    if key is not None:
        raise TypeError(
            "surgery.operate: key is for a module; new parameters of a state are drawn with the state's key"
        )
    after = replace(
        target.model,
        rules,
        target.params,
        target.buffers,
        key=target.rng(name),
        frozen=target.context.frozen,
        optimizer=target.optimizer,
        opt_state=target.opt_state,
        where=where,
        skips_frozen=skips_frozen,
        name=name,
    )
    fields = after._asdict()
    report, replaced, settings = fields.pop("report"), target.context.replaced, target.context.settings
    fields["replaced"] = {**replaced, name: (*replaced.get(name, ()), *report.replaced)}
    fields["settings"] = {new: settings[old] for new, old in report.kept.items() if old in settings}
    return (target.replace(**fields) if report.replaced else target), report


def _on_module(
    net: nn.Module, rules: Rules, name: str, key: int | Tensor, **parts_to_change: Any
) -> tuple[nn.Module, Report]:
    parts = from_module(net)
    root = as_rng(key if isinstance(key, Tensor) else random.key(key), name).key
    rng = random.Rng(random.fold_in(root, 0)).named(name)  # as a state draws before its first batch
    after = replace(parts.model, rules, parts.params, parts.buffers, key=rng, name=name, **parts_to_change)
    new = after.model.skeleton(train=True).filled_copy(after.params, after.buffers, is_shared=True)
    # from_module sets training mode if all of the module was in evaluation mode; restore this here.
    return (new if any(module.training for module in net.modules()) else new.eval()), after.report


def _set_trained(root: nn.Module, names: Iterable[str], frozen: frozenset[str]) -> None:
    for name in names:
        param = root.get_parameter(name)
        if param.is_floating_point() or param.is_complex():  # others cannot train
            param.requires_grad_(name not in frozen)


def _warn_of_moves(
    name: str, optimizer: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor], kept: Mapping[str, str]
) -> None:
    """Warn of parameters to which an optimizer gives other settings under their new names.

    Args:
        name: Name of the surgery.
        optimizer: An optimizer, possibly around others.
        before: The parameters by their old names.
        after: The parameters by their new names.
        kept: Map from the new names of parameters that were kept to their old names.
    """
    was, now = rules_of(optimizer, before), rules_of(optimizer, after)
    moved = [f"{old!r}, now {new!r}" for new, old in kept.items() if now[new] != was[old]]
    if moved:
        others = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
        warn(
            f"{name}: {'; '.join(moved[:3])}{others}: with their new names, the patterns in {optimizer!r} give these "
            "parameters other settings than before; write patterns that match both"
        )
