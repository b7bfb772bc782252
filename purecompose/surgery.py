"""Surgery: other modules in a network, which keep its weights, and an optimizer's memory that fits them.

`replace` goes through a network and hands each module to the rule for its type; what a rule returns takes its place. A
rule is written as for any `nn.Module`:

    def smooth(conv, site):
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv) if max(conv.stride) > 1 else None

    state, report = surgery.operate(state, {nn.Conv2d: smooth}, name="smooth")

A parameter that is found again is kept, under its new name: the very tensor, and what the optimizer remembers of it.
One that is not is dropped, one that was not there is made. Modules that a rule builds draw their first weights from a
seed that the run's key and their place decide, whatever was drawn elsewhere. Nothing is changed in place: the old
model, its tensors and its state are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from purecompose import random
from purecompose._checks import shown
from purecompose._device import building
from purecompose._skeleton import OWN, places
from purecompose._warnings import warn
from purecompose.model import Model, from_module
from purecompose.optim.base import ByGroup, cells
from purecompose.random.keys import as_rng
from purecompose.state import State


__all__ = ["Report", "Rule", "Rules", "Site", "Surgery", "operate", "replace"]


@dataclass(frozen=True)
class Site:
    """Where a module stands."""

    name: str
    """Its qualified name, the first of several; "" for the whole network."""
    index: int
    """How many modules of the rule's type came before it, in the order in which they are defined."""
    parent: nn.Module | None
    """The module that holds it, `None` for the whole network."""
    root: nn.Module
    """The whole network, as it was."""


Rule: TypeAlias = Callable[[Any, Site], nn.Module | None]
"""`(module, site) -> the module in its place`, or `None` to leave it."""

Rules: TypeAlias = Mapping[type[nn.Module], Rule | None]
"""A rule by the type of module, subclasses included. `None` for types whose modules are left alone, with all that they
hold, as results of an earlier surgery of the same kind."""


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
        """A line for each kind; parameters that only stayed where they were are not named."""
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
    opt_state: Any
    """The optimizer's state: as it was for parameters that were kept, and fresh for those that were made."""
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
    """Puts other modules into a network.

    Modules are visited once each, parents before children, in the order in which they are defined. What a rule
    returned is not searched, nor is what it took out; a module that stands in several places is replaced in all of
    them, and tied parameters stay tied. The new module gets the training flag of the old one. Parameters that it makes
    are moved to the device of the network, floating ones to the floating dtype of the module that they replace.

    Args:
        model: The architecture, as of `from_module(net).model` or `state.model`.
        rules: By the type of module, subclasses included. Each gets the module with its values, which it may take over
            and must not write into, and its `Site`.
        params: The parameters by name.
        buffers: The buffers by name.
        key: What new parameters are drawn with.
        frozen: Names of the parameters that do not train; by default those that did not when the model was made.
        optimizer: The optimizer whose state is given.
        opt_state: Its state; `None` where there is none yet.
        name: What warnings call it.

    Raises:
        TypeError: A rule returned something other than a module or `None`; no optimizer for a state.
        ValueError: Two rules replace one module.
        RuntimeError: A rule wrote into a tensor of the network.

    Warns:
        UserWarning: No module was replaced, and there is none of the types to be left alone. Parameters are in
            another group of the optimizer by their new names.
    """
    if opt_state is not None and optimizer is None:
        raise TypeError("surgery.replace: expected the optimizer of opt_state, got None; give both or neither")
    given = {**params, **buffers}
    versions = {name: tensor._version for name, tensor in given.items() if not tensor.is_inference()}
    root = model.skeleton(train=True).filled_copy(params, buffers, is_shared=True)
    if frozen is not None:
        _set_trained(root, params, frozenset(frozen))
    old_names = _names(root)
    found = list(_replacements(root, rules, as_rng(key, name)))
    for tensor, version in versions.items():
        if given[tensor]._version != version:
            raise RuntimeError(f"{name}: a rule wrote into {tensor!r}; give the new module a tensor of its own")
    if not found and not any(isinstance(module, _left_alone(rules)) for module in root.modules()):
        _warn_of_nothing(name, root, rules)
    root = _with_replacements(root, found)
    kept = {new: old_names[key] for key, new in _names(root).items() if key in old_names}
    parts = from_module(root, is_shared=True)
    device = next((tensor.device for tensor in given.values()), torch.device("cpu"))

    def settled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # The very tensors that were kept, not others on the same memory.
        return {name: given[kept[name]] if name in kept else made.to(device) for name, made in tensors.items()}

    params, buffers = settled(parts.params), settled(parts.buffers)
    if optimizer is not None:
        _warn_of_groups(name, optimizer, {new: old for new, old in kept.items() if new in params})
    if opt_state is not None:
        opt_state = _carried(optimizer, opt_state, params, kept)
    stayed = set(kept.values())
    gone = tuple(name for name in given if name not in stayed)
    made = tuple(name for name in (*params, *buffers) if name not in kept)
    report = Report(tuple(site.name for site, _, _ in found), kept, gone, made)
    return Surgery(parts.model, params, buffers, parts.frozen, opt_state, report)


def operate(state: State, rules: Rules, *, name: str) -> tuple[State, Report]:
    """`replace` on a state's network, with its optimizer's state; new parameters are drawn with the run's key.

    Args:
        state: A state, of a run that has begun or not.
        rules: As in `replace`.
        name: Names the draws, and it in warnings.

    Raises:
        TypeError, ValueError, RuntimeError: As `replace`.

    Warns:
        UserWarning: As `replace`.
    """
    after = replace(
        state.model,
        rules,
        state.params,
        state.buffers,
        key=state.rng(name),
        frozen=state.context.frozen,
        optimizer=state.optimizer,
        opt_state=state.opt_state,
        name=name,
    )
    fields = after._asdict()
    report = fields.pop("report")
    return (state.replace(**fields) if report.replaced else state), report


_Found: TypeAlias = tuple[Site, nn.Module, nn.Module]  # where, what was there, what comes


def _left_alone(rules: Rules) -> tuple[type[nn.Module], ...]:
    return tuple(kind for kind, rule in rules.items() if rule is None)


def _replacements(root: nn.Module, rules: Rules, rng: random.Rng) -> Iterator[_Found]:
    counts, done = dict.fromkeys(rules, 0), _left_alone(rules)
    seen: set[int] = set()

    def visited(module: nn.Module, name: str, parent: nn.Module | None) -> Iterator[_Found]:
        if id(module) in seen or isinstance(module, done):
            return
        seen.add(id(module))
        new = None
        for kind, rule in rules.items():
            if rule is None or not isinstance(module, kind):
                continue
            site = Site(name, counts[kind], parent, root)
            counts[kind] += 1
            with building(_seed(rng.named(name))):
                answer = _answer(rule, module, site)
            if answer is not None and new is not None:
                raise ValueError(f"surgery.replace: two rules replace {name or 'the network'!r}; let one return None")
            if answer is not None:
                new = site, module, answer
        if new is not None:
            yield new
            return
        for key, child in module.named_children():
            yield from visited(child, f"{name}.{key}".lstrip("."), module)

    yield from visited(root, "", None)


def _answer(rule: Rule, module: nn.Module, site: Site) -> nn.Module | None:
    """What a rule puts in a module's place, with its mode, device and dtype."""
    new = rule(module, site)
    if new is None or new is module:
        return None
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"surgery.replace: the rule for {site.name or 'the network'!r} returned {shown(new)}, not a module"
        )
    taken = set(module.modules())  # which keep their flags: a batch norm in evaluation mode stays so
    for child in new.modules():
        if child not in taken:
            child.training = module.training
    olds = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    floats = [tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()]
    if floats:
        # Not module.to(): it would move what was taken over, and tie parameters of it no longer.
        for tensor in (*new.parameters(), *new.buffers()):
            if id(tensor) not in olds and tensor.is_floating_point() and tensor.dtype != floats[0]:
                tensor.data = tensor.data.to(floats[0])
    return new


def _with_replacements(root: nn.Module, found: Iterable[_Found]) -> nn.Module:
    """The network with modules in new places; it is a copy of our own, and changed."""
    news = {id(old): new for _, old, new in found}
    seen: set[int] = set()

    def put(value: Any) -> Any:
        """The value with new modules, in lists and their like as well: a forward may go through them by those."""
        if isinstance(value, nn.Module):
            return news.get(id(value), value)
        if id(value) in seen:
            return value
        if type(value) in (list, dict):
            seen.add(id(value))
        if type(value) is list:
            value[:] = map(put, value)
        elif type(value) is dict:
            value.update({key: put(member) for key, member in value.items()})
        elif type(value) is tuple:
            return tuple(map(put, value))
        return value

    for parent in list(root.modules()):
        parent._modules.update({key: put(child) for key, child in parent._modules.items()})
        attributes = vars(parent)
        attributes.update({key: put(attributes[key]) for key in attributes.keys() - OWN})
    return put(root)


def _set_trained(root: nn.Module, names: Iterable[str], frozen: frozenset[str]) -> None:
    for name in names:
        param = root.get_parameter(name)
        if param.is_floating_point() or param.is_complex():  # others cannot train
            param.requires_grad_(name not in frozen)


def _names(root: nn.Module) -> dict[int, str]:
    """The first name of each tensor, by its `id`."""
    names: dict[int, str] = {}
    for place in places(root):
        names.setdefault(id(place.tensor), place.name)
    return names


def _seed(rng: random.Rng) -> int:
    return int(random.randint(rng, (), 0, 2**63 - 1).item())


def _carried(optimizer: Any, opt_state: Any, params: Mapping[str, Tensor], kept: Mapping[str, str]) -> Any:
    """An optimizer's state for other parameters: what it remembers of those that were kept, the rest fresh."""
    lost: set[str] = set()

    def fresh() -> Any:
        # Of kept parameters only names and shapes: what is made for them is put aside, and need not be allocated.
        return optimizer.init(
            {
                name: param.detach().to("meta") if name in kept and name not in lost else param
                for name, param in params.items()
            }
        )

    def carried(new: Any, old: Any) -> Any:
        if isinstance(new, Mapping) and new and set(new) <= set(params):
            lost.update(name for name in new if name in kept and kept[name] not in old)
            return {name: old[kept[name]] if name in kept and kept[name] in old else new[name] for name in new}
        if isinstance(new, Mapping):
            return {key: carried(value, old[key]) if key in old else value for key, value in new.items()}
        if isinstance(new, tuple | list):
            members = [carried(mine, theirs) for mine, theirs in zip(new, old, strict=True)]
            return type(new)(*members) if hasattr(new, "_fields") else type(new)(members)
        return old

    result = carried(fresh(), opt_state)
    # In another group the optimizer may remember what it did not before.
    return carried(fresh(), opt_state) if lost else result


def _warn_of_groups(name: str, optimizer: Any, kept: Mapping[str, str]) -> None:
    """Warns of parameters that are in another group under their new names."""
    if not isinstance(optimizer, ByGroup) or not optimizer.groups:
        return
    rules: dict[str, Any] = {}
    for names in (tuple(kept), tuple(kept.values())):
        rules |= {name: cell.rule for cell in cells(optimizer, names) for name in cell.names}
    moved = [f"{old!r}, now {new!r}" for new, old in kept.items() if rules[new] != rules[old]]
    if moved:
        more = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
        patterns = ", ".join(repr(pattern) for pattern, _ in optimizer.groups)
        warn(
            f"{name}: {'; '.join(moved[:3])}{more}: the optimizer's groups ({patterns}) see new names, and "
            "give these parameters other settings than before; write patterns that match both"
        )


def _warn_of_nothing(name: str, root: nn.Module, rules: Rules) -> None:
    kinds = tuple(kind for kind, rule in rules.items() if rule is not None)
    wanted = " or ".join(kind.__name__ for kind in kinds) or "nothing"
    there = ", ".join(sorted({type(module).__name__ for module in root.modules()}))
    count = sum(isinstance(module, kinds) for module in root.modules())
    found = f"found none in a network of {there}"
    if count:
        found = f"left all {count} that there are: none is of the sizes, or of the kind, that its settings ask for"
    warn(f"{name} changed nothing: it looked for {wanted} to replace, and {found}")
