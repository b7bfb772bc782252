"""A walk through a network in which rules replace modules, and the names of its modules and tensors before it.

References to all of them are kept during the surgery. Python may reuse the `id` of a freed object, so a tensor that a
rule removes from its module could otherwise be confused with a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from purecompose import random
from purecompose._support.checks import shown
from purecompose._support.device import building
from purecompose._support.messages import warn
from purecompose._support.scopes import WriteGuard, memory_of
from purecompose.nn.splitting import OWN, places
from purecompose.optim.base import match_or_raise, matched


class Originals:
    """Modules and tensors of a network before rules are applied."""

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


class Found(NamedTuple):
    """A module that is to be replaced."""

    site: Site
    old: nn.Module
    new: nn.Module


def left_alone(rules: Rules) -> tuple[type[nn.Module], ...]:
    """Return the types whose modules are kept with all their children."""
    return tuple(kind for kind, rule in rules.items() if rule is None)


def within(root: nn.Module, where: Where, frozen_parts: Collection[str]) -> tuple[nn.Module, ...]:
    """Return the modules that a surgery may replace, parents before children.

    Args:
        root: The network.
        where: The modules that may be replaced with all that they contain.
        frozen_parts: Names of modules that are left alone with all that they contain.

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


def replacements(
    root: nn.Module, rules: Rules, rng: random.Rng, originals: Originals, reach: tuple[nn.Module, ...]
) -> Iterator[Found]:
    """Apply the rules to the network's modules, parents before children.

    Args:
        root: The network.
        rules: The rules by type of module.
        rng: The source of the seeds, one for each module's name.
        originals: The modules and tensors of the network before the surgery.
        reach: The modules that may be replaced.

    Raises:
        TypeError: A rule returned something other than a module or `None`.
        ValueError: Two rules replace one module.
        RuntimeError: A rule wrote into a tensor of the network.
    """
    counts, done = dict.fromkeys(rules, 0), left_alone(rules)
    seen: set[nn.Module] = set()
    is_reached = set(reach).__contains__

    def visited(module: nn.Module, name: str, parent: nn.Module | None) -> Iterator[Found]:
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
                raise ValueError(f"surgery.replace: two rules replace {name or 'the network'!r}; let one return None")
            if answer is not None:
                found = Found(site, module, answer)
        if found is not None:
            yield found
            return
        for key, child in module.named_children():
            yield from visited(child, f"{name}.{key}".lstrip("."), module)

    yield from visited(root, "", None)


def _answer(rule: Rule, module: nn.Module, site: Site, originals: Originals) -> nn.Module | None:
    """Apply a rule to a module, and give the new module its mode and dtype."""
    with originals.guard:
        new = rule(module, site)
    if new is None:
        return None
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"surgery.replace: the rule for {site.name or 'the network'!r} returned {shown(new)}, not a module"
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


def with_replacements(root: nn.Module, found: Iterable[Found], originals: Originals) -> nn.Module:
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


def warn_of_nothing(name: str, root: nn.Module, rules: Rules, reach: tuple[nn.Module, ...]) -> None:
    """Warn that there was nothing to replace."""
    kinds = tuple(kind for kind, rule in rules.items() if rule is not None)
    wanted = " or ".join(kind.__name__ for kind in kinds) or "nothing"
    there = ", ".join(sorted({type(module).__name__ for module in root.modules()}))
    count = sum(isinstance(module, kinds) for module in reach)
    others = sum(isinstance(module, kinds) for module in root.modules()) - count
    found = f"found none in a network of {there}"
    if count:
        found = f"kept all {count}: none has the kind and the sizes that its settings require"
    elif others:
        found = f"left {others} alone, in parts without trainable parameters, or out of its where=; name them by where="
    warn(f"{name} changed nothing: it looked for {wanted} to replace, and {found}")


def _seed(rng: random.Rng) -> int:
    return int(random.randint(rng, (), 0, 2**63 - 1).item())
