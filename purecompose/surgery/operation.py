"""Surgery on the network of a state: a walk in which rules replace modules, and the optimizer's memory after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from purecompose import random
from purecompose._support.contexts import WriteGuard, memory_of
from purecompose._support.device import building
from purecompose._support.messages import warn
from purecompose._support.specs import shown
from purecompose.core.state import State
from purecompose.nn.model import from_module
from purecompose.nn.splitting import OWN, places
from purecompose.optim.base import match_or_raise, matched
from purecompose.optim.protocol import carried
from purecompose.optim.wrapping import rules_of


@dataclass(frozen=True)
class Site:
    """Place of a module in a network."""

    name: str
    """Qualified name of the module, the first of several; "" for the whole network."""
    index: int
    """Number of modules of the rule's type before it, in the order of definition."""
    parent: nn.Module | None
    """Module that contains it, `None` for the whole network."""
    root: nn.Module
    """Whole network, before the surgery."""
    reach: tuple[nn.Module, ...] = ()
    """Modules of the network that the surgery may replace, with those in results of an earlier surgery."""


Rule: TypeAlias = Callable[[Any, Site], nn.Module | None]
"""Function `(module, site) -> module` that returns the replacement, or `None` to keep the module."""

Rules: TypeAlias = Mapping[type[nn.Module], Rule | None]
"""Map from types of modules, including subclasses, to rules. Modules of types with `None` are kept with all their
children, because they are results of an earlier surgery of the same kind."""


Where: TypeAlias = str | Iterable[str] | None
"""Pattern or patterns (`fnmatch`) of the names of modules; `None` for all."""


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


def operate(
    state: State, rules: Rules, *, name: str, where: Where = None, skips_frozen: bool = False
) -> tuple[State, Report]:
    """Replace modules in the network of a state, and keep its weights and their optimizer memory.

    Each module is visited once, parents before children, in the order of definition. Neither the replaced module nor
    the result of a rule is searched. A module that is used in several places is replaced in all of them; tied
    parameters stay tied. New modules get the training flag of the module that they replace. New parameters are drawn
    with the state's key, and floating ones get the floating dtype of the module that they replace.

    A rule that changes and returns the module that it is given, a copy that shares its tensors, counts as replacing it.

    Slots are not changed: entries of a slot for single parameters keep the old names.

    Args:
        state: A state, before or during a run.
        rules: The rules by type of module, including subclasses. Each rule is called with the module, whose tensors it
            may reuse but must not write into, and its `Site`. The module is not replaced if the rule returns `None`.
        name: Name of the surgery in warnings and errors, and of its draws.
        where: Pattern or patterns (`fnmatch`) of the names of modules that may be replaced, with all that they contain,
            such as "student.*"; by default all, also those that are frozen.
        skips_frozen: Leave alone modules that have parameters of which none trains, with all that they contain. If
            nothing trains in the whole network, none is skipped.

    Returns:
        The new state, or the given one if nothing was replaced, and what was changed.

    Raises:
        TypeError: A rule returned something other than a module or `None`.
        ValueError: Two rules replace the same module, a pattern matches no module, or a group of the optimizer has lost
            all its parameters.
        RuntimeError: A rule tried to write into a tensor of the network.

    Warns:
        UserWarning: No module was replaced, and the network has no module with the rule `None`; or parameters are in
            another group of the optimizer by their new names.

    Example::

        state, report = surgery.operate(state, {nn.Conv2d: smooth}, name="smooth")  # see `purecompose.surgery`
    """
    model, context, given = state.model, state.context, {**state.params, **state.buffers}
    root = model.skeleton(train=True).filled_copy(state.params, state.buffers, is_shared=True)
    for param_name in model.param_names:
        param = root.get_parameter(param_name)
        if param.is_floating_point() or param.is_complex():  # others cannot train
            param.requires_grad_(param_name not in context.frozen)
    originals = _Originals(root, given, name)
    reach = _within(root, where, model.frozen_parts(context.frozen) if skips_frozen else ())
    found = list(_replacements(root, rules, state.rng(name), originals, reach))
    if not found and not any(isinstance(module, left_alone(rules)) for module in root.modules()):
        _warn_of_nothing(name, root, rules, reach)
    if not found:
        return state, Report((), {name: name for name in given}, (), ())
    root = _with_replacements(root, found, originals)
    # Tensors that are not the model's, such as a loss's, stay as they are.
    others = given.keys() - {*model.param_names, *model.buffer_names}
    kept = {**originals.found_in(root), **{name: name for name in given if name in others}}
    parts = from_module(root, is_shared=True)

    def settled(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # The state's own tensors for kept ones, not other tensors on the same memory.
        own = {key: given[kept[key]] if key in kept else made.to(state.device) for key, made in new.items()}
        return own | {key: tensor for key, tensor in old.items() if key in others}

    params, buffers = settled(parts.params, state.params), settled(parts.buffers, state.buffers)
    frozen = parts.frozen.union(others.intersection(context.frozen))
    kept_params = {new: old for new, old in kept.items() if new in params}
    _warn_of_moves(name, state.optimizer, state.params, params, kept_params)
    try:
        opt_state = carried(state.optimizer, state.opt_state, params, kept_params, frozen)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; patterns have to match names before and after the surgery") from error
    stayed = set(kept.values())
    replaced = tuple(site.name for site, _, _ in found)
    gone = tuple(key for key in given if key not in stayed)
    made = tuple(key for key in (*params, *buffers) if key not in kept)
    report = Report(replaced, kept, gone, made)
    changed = state.replace(
        model=parts.model,
        params=params,
        buffers=buffers,
        frozen=frozen,
        opt_state=opt_state,
        # Once each: a method whose results look like what it replaces acts again when INIT does.
        replaced={**context.replaced, name: tuple(dict.fromkeys((*context.replaced.get(name, ()), *replaced)))},
        settings={new: context.settings[old] for new, old in kept.items() if old in context.settings},
    )
    return changed, report


class _Originals:
    """Modules and tensors of a network before rules are applied.

    References to all of them are kept during the surgery. Python may reuse the `id` of a freed object, so a tensor that
    a rule removes from its module could otherwise be confused with a new one.
    """

    def __init__(self, root: nn.Module, given: Mapping[str, Tensor], name: str) -> None:
        self.modules: frozenset[nn.Module] = frozenset(root.modules())
        self.guard: WriteGuard = WriteGuard(given, lambda tensor, _: self._error(tensor))
        self._name = name
        self._tensors: dict[int, tuple[str, Tensor, tuple[Any, ...]]] = {}
        for place in places(root):
            self._tensors.setdefault(id(place.tensor), (place.name, place.tensor, memory_of(place.tensor)))

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._tensors

    def found_in(self, root: nn.Module) -> dict[str, str]:
        """Map the first names of tensors in another network to their names here, for tensors that are in both."""
        found: dict[int, str] = {}
        for place in places(root):
            if place.tensor in self:
                found.setdefault(id(place.tensor), place.name)
        for key in found:
            name, tensor, memory = self._tensors[key]
            if memory_of(tensor) != memory:
                raise self._error(name)
        return {new: self._tensors[key][0] for key, new in found.items()}

    def _error(self, tensor: str) -> RuntimeError:
        return RuntimeError(f"{self._name}: a rule wrote into {tensor!r}; give the new module a separate tensor")


class _Found(NamedTuple):
    """A module that is to be replaced."""

    site: Site
    old: nn.Module
    new: nn.Module


def left_alone(rules: Rules) -> tuple[type[nn.Module], ...]:
    """Return the types whose modules are kept with all their children."""
    return tuple(kind for kind, rule in rules.items() if rule is None)


def _within(root: nn.Module, where: Where, frozen_parts: Collection[str]) -> tuple[nn.Module, ...]:
    """Return the modules that a surgery may replace, parents before children.

    Raises:
        ValueError: A pattern matches no module.
    """
    patterns = (where,) if isinstance(where, str) else None if where is None else tuple(where)
    names = [name for name, _ in root.named_modules()]
    for pattern in patterns or ():
        match_or_raise(pattern, names[1:] or names, f"where={pattern!r}", "module")

    def found(module: nn.Module, name: str, is_in: bool) -> Iterator[nn.Module]:
        if name in frozen_parts:
            return
        is_in = is_in or bool(matched(patterns or (), (name,)))
        if is_in:
            yield module
        for key, child in module.named_children():
            yield from found(child, f"{name}.{key}".lstrip("."), is_in)

    return tuple(dict.fromkeys(found(root, "", patterns is None)))


def _replacements(
    root: nn.Module, rules: Rules, rng: random.Rng, originals: _Originals, reach: tuple[nn.Module, ...]
) -> Iterator[_Found]:
    """Apply the rules to the network's modules, parents before children.

    Args:
        rng: The source of the seeds, one for each module's name.

    Raises:
        TypeError: A rule returned something other than a module or `None`.
        ValueError: Two rules replace one module.
        RuntimeError: A rule wrote into a tensor of the network.
    """
    counts, done = dict.fromkeys(rules, 0), left_alone(rules)
    seen: set[nn.Module] = set()
    is_reached = set(reach).__contains__

    def visited(module: nn.Module, name: str, parent: nn.Module | None) -> Iterator[_Found]:
        if module in seen or isinstance(module, done):
            return
        seen.add(module)
        found = None
        for kind, rule in rules.items():
            if rule is None or not isinstance(module, kind) or not is_reached(module):
                continue
            site = Site(name, counts[kind], parent, root, reach)
            counts[kind] += 1
            with building(_seed(rng.named(name))):
                answer = _answer(rule, module, site, originals)
            if answer is not None and found is not None:
                raise ValueError(f"surgery.operate: two rules replace {name or 'the network'!r}; let one return None")
            if answer is not None:
                found = _Found(site, module, answer)
        if found is not None:
            yield found
            return
        for key, child in module.named_children():
            yield from visited(child, f"{name}.{key}".lstrip("."), module)

    yield from visited(root, "", None)


def _answer(rule: Rule, module: nn.Module, site: Site, originals: _Originals) -> nn.Module | None:
    """Apply a rule to a module, and give the new module its mode and dtype."""
    with originals.guard:
        new = rule(module, site)
    if new is None:
        return None
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"surgery.operate: the rule for {site.name or 'the network'!r} returned {shown(new)}, not a module"
        )
    for child in new.modules():
        if child not in originals.modules:  # old modules keep their flags, such as a batch norm in evaluation mode
            child.training = module.training
    floats = [tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()]
    if floats:
        # Not module.to(), which would also convert the tensors that were kept, and break ties of parameters.
        for tensor in (*new.parameters(), *new.buffers()):
            if tensor not in originals and tensor.is_floating_point() and tensor.dtype != floats[0]:
                tensor.data = tensor.data.to(floats[0])
    return new


def _with_replacements(root: nn.Module, found: Iterable[_Found], originals: _Originals) -> nn.Module:
    """Return the network with the modules replaced; it is a private copy, and is changed in place."""
    news = {old: new for _, old, new in found}
    seen: set[int] = set()

    def put(value: Any) -> Any:
        """Return the value with new modules, also inside lists, dicts and tuples that a forward may use."""
        if isinstance(value, nn.Module):
            return news.get(value, value)
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

    for parent in [module for module in root.modules() if module in originals.modules]:
        parent._modules.update({key: put(child) for key, child in parent._modules.items()})
        attributes = vars(parent)
        attributes.update({key: put(attributes[key]) for key in attributes.keys() - OWN})
    return put(root)


def _warn_of_nothing(name: str, root: nn.Module, rules: Rules, reach: tuple[nn.Module, ...]) -> None:
    kinds = tuple(kind for kind, rule in rules.items() if rule is not None)
    wanted = " or ".join(kind.__name__ for kind in kinds) or "nothing"
    there = ", ".join(sorted({type(module).__name__ for module in root.modules()}))
    count = sum(isinstance(module, kinds) for module in reach)
    others = sum(isinstance(module, kinds) for module in root.modules()) - count
    found = []
    if count:
        found.append(f"kept all {count}: none has the kind and the sizes that its settings require")
    if others:
        found.append(
            f"left {others} alone, in parts without trainable parameters or that where= does not name; name them by "
            "where="
        )
    said = ", and ".join(found) or f"found none in a network of {there}"
    warn(f"{name} changed nothing: it looked for {wanted} to replace, and {said}")


def _seed(rng: random.Rng) -> int:
    return int(random.randint(rng, (), 0, 2**63 - 1).item())


def _warn_of_moves(
    name: str, optimizer: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor], kept: Mapping[str, str]
) -> None:
    """Warn of parameters to which an optimizer gives other settings under their new names."""
    was, now = rules_of(optimizer, before), rules_of(optimizer, after)
    moved = [f"{old!r}, now {new!r}" for new, old in kept.items() if now[new] != was[old]]
    if moved:
        others = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
        warn(
            f"{name}: {'; '.join(moved[:3])}{others}: with their new names, the patterns in {optimizer!r} give these "
            "parameters other settings than before; write patterns that match both"
        )
