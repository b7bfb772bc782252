"""The public names of the package: those in `__all__` of the package and of the modules that it exports."""

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import purecompose
import purecompose.testing


class Name(NamedTuple):
    """A public name."""

    path: str
    """Its shortest dotted path, such as `purecompose.optim.sgd`."""
    value: Any


def modules() -> dict[str, ModuleType]:
    """Return the public modules by their shortest paths, in the order of those."""
    found: dict[str, ModuleType] = {}
    seen = set()
    waiting = [("purecompose", purecompose), ("purecompose.testing", purecompose.testing)]
    while waiting:
        path, module = waiting.pop(0)
        if module in seen:
            continue
        seen.add(module)
        found[path] = module
        members = ((f"{path}.{name}", getattr(module, name)) for name in module.__all__)
        waiting += [(name, member) for name, member in members if inspect.ismodule(member)]
    return dict(sorted(found.items()))


def names_in(path: str, module: ModuleType) -> Iterator[Name]:
    """Yield the public names of a module that are not modules."""
    for name in module.__all__:
        value = getattr(module, name)
        if not inspect.ismodule(value):
            yield Name(f"{path}.{name}", value)


def homes() -> dict[str, str]:
    """Return for each public path the path under which its object is documented: the shortest of its paths."""
    paths = sorted(
        (name for path, module in modules().items() for name in names_in(path, module)),
        key=lambda name: (name.path.count("."), name.path),
    )
    first: dict[tuple[str, int], str] = {}
    return {name.path: first.setdefault((name.path.rpartition(".")[2], id(name.value)), name.path) for name in paths}
