"""The network before a surgery: the names of its modules and tensors, and checks that they are unchanged.

References to all of them are kept during the surgery. Python may reuse the `id` of a freed object, so a tensor that a
rule removes from its module could otherwise be confused with a new one.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from purecompose._support.writes import WriteGuard, memory_of
from purecompose.nn.skeleton import places


class Snapshot:
    """Attributes of a module and its submodules, including the contents of dicts, lists, tuples and sets."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = {
            child: (name, {key: _contents(value) for key, value in vars(child).items()})
            for name, child in module.named_modules()
        }

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._modules

    def changes(self) -> list[tuple[str, str]]:
        """Return the name of each module that has changed since the snapshot, with one changed attribute."""
        found = []
        for module, (name, before) in self._modules.items():
            now = vars(module)
            for key in (*before, *(now.keys() - before.keys())):
                if not _is_cached(module, key) and (
                    key not in now or key not in before or not _is_same(_contents(now[key]), before[key])
                ):
                    found.append((name, key))
                    break
        return found


class Originals:
    """Modules and tensors of a network before rules are applied."""

    def __init__(self, root: nn.Module, given: Mapping[str, Tensor], name: str) -> None:
        self.modules: Snapshot = Snapshot(root)
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

    def check_settings(self, replaced: Iterable[str]) -> None:
        """Reject in-place changes to modules that were not replaced, because they might or might not be kept."""
        sites = tuple(replaced)
        for name, attribute in self.modules.changes():
            if not any(site in ("", name) or name.startswith(f"{site}.") for site in sites):
                raise RuntimeError(
                    f"{self._name}: a rule changed {attribute!r} of {name or 'the network'!r} in place without "
                    "replacing it; return the changed module as the replacement"
                )

    def _error(self, tensor: str) -> RuntimeError:
        return RuntimeError(f"{self._name}: a rule wrote into {tensor!r}; give the new module a separate tensor")


def _contents(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return (value, *value.keys(), *value.values())
    return (value, *value) if isinstance(value, (list, tuple, set)) else (value,)


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def _is_cached(module: nn.Module, key: str) -> bool:
    """Return whether an attribute is a cached property, which exists because it was read."""
    return isinstance(getattr(type(module), key, None), functools.cached_property)
