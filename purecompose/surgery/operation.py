"""A whole surgery: on architecture and tensors, and on a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from purecompose import random
from purecompose.core.state import State
from purecompose.nn.model import Model, from_module
from purecompose.random.keys import as_rng
from purecompose.surgery.memory import carried, fitted
from purecompose.surgery.originals import Originals
from purecompose.surgery.visiting import Rules, left_alone, replacements, warn_of_nothing, with_replacements


__all__ = ["Report", "Surgery", "operate", "replace"]


@dataclass(frozen=True)
class Report:
    """What a surgery did, by qualified names."""

    replaced: tuple[str, ...]
    """Modules that have another one in their place."""
    kept: Mapping[str, str]
    """New names of the parameters and buffers that stayed, with their old names."""
    dropped: tuple[str, ...]
    """Old names of those that are gone."""
    made: tuple[str, ...]
    """New names of those that were not there."""

    def __str__(self) -> str:
        """Return a line for each kind; parameters that only stayed where they were are not named."""
        moved = [f"{old} -> {new}" for new, old in self.kept.items() if new != old]
        lines = {
            "replaced": [name or "the whole network" for name in self.replaced],
            "moved": moved,
            "dropped": self.dropped,
            "made": self.made,
        }
        return "\n".join(f"{kind:<9}{', '.join(names) or 'nothing'}" for kind, names in lines.items())


class Surgery(NamedTuple):
    """A network after a surgery."""

    model: Model
    params: dict[str, Tensor]
    """The parameters by their new names; those that were kept are the same tensors."""
    buffers: dict[str, Tensor]
    frozen: frozenset[str]
    """The parameters that do not train: those of before, and made ones with `requires_grad=False`."""
    optimizer: Any
    """The optimizer, without groups that have lost all their parameters."""
    opt_state: Any
    """Its state: as it was for parameters that were kept, and fresh for those that were made."""
    report: Report


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
    name: str = "surgery.replace",
) -> Surgery:
    """Put other modules into a network.

    Modules are visited once each, parents before children, in the order in which they are defined. What a rule
    returned is not searched, nor is what it took out. A module that stands in several places is replaced in all of
    them, but for those to which another rule has brought it, in a module of that rule's own; tied parameters stay tied.
    New modules get the training flag of the one that they replace. Parameters that are made are moved to the device of
    the network, floating ones to the floating dtype of the module that they replace.

    A rule is given a copy on the same tensors. It may change settings, and take parameters and modules out: with the
    module itself returned, the changed one counts as replaced. Changes to what is not replaced are an error.

    Args:
        model: The architecture, as of `from_module(net).model` or `state.model`.
        rules: By the type of module, subclasses included. Each gets the module with its values, which it may take over
            and must not write into, and its `Site`. `None` leaves the module, and so does the module as it was.
        params: The parameters by name.
        buffers: The buffers by name.
        key: What new parameters are drawn with.
        frozen: Names of the parameters that do not train; by default those that did not when the model was made.
        optimizer: The optimizer whose state is given.
        opt_state: Its state; `None` where there is none yet.
        name: What warnings and errors call it.

    Raises:
        TypeError: A rule returned something other than a module or `None`; no optimizer for a state.
        ValueError: Two rules replace one module.
        RuntimeError: A rule wrote into a tensor of the network, which was stopped, or changed settings of a module
            that was not replaced.

    Warns:
        UserWarning: No module was replaced, and there is none of the types to be left alone. Parameters are in
            another group of the optimizer by their new names. A group of the optimizer has no parameter any more.
    """
    if opt_state is not None and optimizer is None:
        raise TypeError("surgery.replace: expected the optimizer of opt_state, got None; give both or neither")
    given = {**params, **buffers}
    root = model.skeleton(train=True).filled_copy(params, buffers, is_shared=True)
    if frozen is not None:
        _set_trained(root, params, frozenset(frozen))
    originals = Originals(root, given, name)
    found = list(replacements(root, rules, as_rng(key, name), originals))
    originals.check_settings(site.name for site, _, _ in found)
    if not found and not any(isinstance(module, left_alone(rules)) for module in root.modules()):
        warn_of_nothing(name, root, rules)
    root = with_replacements(root, found, originals)
    kept = originals.found_in(root)
    parts = from_module(root, is_shared=True)
    device = next((tensor.device for tensor in given.values()), torch.device("cpu"))

    def settled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # The very tensors that were kept, not others on the same memory.
        return {name: given[kept[name]] if name in kept else made.to(device) for name, made in tensors.items()}

    before, params, buffers = params, settled(parts.params), settled(parts.buffers)
    kept_params = {new: old for new, old in kept.items() if new in params}
    if optimizer is not None:
        optimizer = fitted(name, optimizer, before, params, kept_params)
    if opt_state is not None:
        opt_state = carried(optimizer, opt_state, params, kept_params)
    stayed = set(kept.values())
    gone = tuple(name for name in given if name not in stayed)
    made = tuple(name for name in (*params, *buffers) if name not in kept)
    report = Report(tuple(site.name for site, _, _ in found), kept, gone, made)
    return Surgery(parts.model, params, buffers, parts.frozen, optimizer, opt_state, report)


@overload
def operate(target: State, rules: Rules, *, name: str) -> tuple[State, Report]: ...


@overload
def operate(target: nn.Module, rules: Rules, *, name: str, key: int | Tensor = 0) -> tuple[nn.Module, Report]: ...


def operate(
    target: State | nn.Module, rules: Rules, *, name: str, key: int | Tensor | None = None
) -> tuple[State | nn.Module, Report]:
    """`replace` on a state's network, with its optimizer and its state, or on a plain `nn.Module`.

    Slots of a state stay as they are: what a method remembers of each parameter has the names of before. Between two
    steps, put it under the new ones, by `report.kept`, or let such a method begin afterwards.

    A module is copied, and the copy is returned: with weights of its own, in the mode (train or eval) that it was in.
    Make its optimizer afterwards.

    Args:
        target: A state, of a run that has begun or not; or a network.
        rules: As in `replace`.
        name: Names the draws, and it in warnings.
        key: For a module: the seed, or the key, that new parameters are drawn with, 0 by default. Those of a state are
            drawn with the run's.

    Raises:
        TypeError, ValueError, RuntimeError: As `replace`, and as `State.create` for a module.

    Warns:
        UserWarning: As `replace`.
    """
    if isinstance(target, nn.Module):
        return _on_module(target, rules, name, 0 if key is None else key)
    if key is not None:
        raise TypeError("surgery.operate: key is for a module; new parameters of a state are drawn with its own key")
    after = replace(
        target.model,
        rules,
        target.params,
        target.buffers,
        key=target.rng(name),
        frozen=target.context.frozen,
        optimizer=target.optimizer,
        opt_state=target.opt_state,
        name=name,
    )
    fields = after._asdict()
    report = fields.pop("report")
    return (target.replace(**fields) if report.replaced else target), report


def _on_module(net: nn.Module, rules: Rules, name: str, key: int | Tensor) -> tuple[nn.Module, Report]:
    parts = from_module(net)
    rng = as_rng(key if isinstance(key, Tensor) else random.key(key), name).named(name)
    after = replace(parts.model, rules, parts.params, parts.buffers, key=rng, name=name)
    new = after.model.skeleton(train=True).filled_copy(after.params, after.buffers, is_shared=True)
    # A model is in training mode where its module as a whole was in evaluation mode.
    return (new if any(module.training for module in net.modules()) else new.eval()), after.report


def _set_trained(root: nn.Module, names: Iterable[str], frozen: frozenset[str]) -> None:
    for name in names:
        param = root.get_parameter(name)
        if param.is_floating_point() or param.is_complex():  # others cannot train
            param.requires_grad_(name not in frozen)
