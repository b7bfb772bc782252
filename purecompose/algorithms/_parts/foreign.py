"""Layers of packages that may not be installed: stand-ins for their classes, and changed copies of their modules."""

import copy
import functools
from collections.abc import Container
from typing import Any

from torch import nn


class _ByName(type):
    """Metaclass for classes whose instances are the objects with a class of a certain name in their MRO."""

    def __instancecheck__(cls, thing: Any) -> bool:
        wanted = cls.__dict__["of"]
        return any((kind.__module__, kind.__qualname__) == wanted for kind in type(thing).__mro__)


class _ByIdentity(type):
    """Metaclass for classes whose instances are the members of a container."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return thing in cls.__dict__["members"]


def one_of(members: Container[Any], shown: str) -> type[nn.Module]:
    """Return a class, for `isinstance` and the rules of a surgery, whose instances are certain modules.

    Example:
        >>> first = nn.Linear(2, 2)
        >>> isinstance(first, one_of([first], "first")), isinstance(nn.Linear(2, 2), one_of([first], "first"))
        (True, False)
    """
    return _ByIdentity(shown, (nn.Module,), {"members": members})


def stand_in(module: str, name: str) -> type[nn.Module]:
    """Return a class, for `isinstance` and the rules of a surgery, that stands in for a class given by name.

    Nothing is imported, now or later.

    Args:
        module: Name of the module in which the class is defined.
        name: Name of the class in this module.

    Example:
        >>> isinstance(nn.Linear(2, 2), stand_in("torch.nn.modules.linear", "Linear"))
        True
    """
    return _ByName(name, (nn.Module,), {"of": (module, name)})


class Derived(nn.Module):
    """Base of mixins that `changed` adds to a foreign class; their methods override those of the class."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is created at run time, so pickle cannot find it by its name.
        mixin, kind = type(self).__bases__
        return _blank, (mixin, kind), self.__dict__


def changed(module: nn.Module, mixin: type[Derived] | None = None, **children: nn.Module) -> nn.Module:
    """Return a copy of a module with some methods and children replaced, and the same parameters and attributes.

    Args:
        module: The module; it is not modified.
        mixin: A class whose methods override the module's.
        children: Modules that replace the children or attributes of these names.
    """
    twin = copy.copy(module)
    if mixin is not None:
        twin.__class__ = _derived(mixin, type(module))
    vars(twin)["_modules"] = {**module._modules, **children}
    for name in children:
        vars(twin).pop(name, None)  # a plain attribute, such as a function, would hide the child
    return twin


@functools.cache  # one class for each pair, because architectures are compared by their classes
def _derived(mixin: type[Derived], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {"__module__": __name__, "__doc__": mixin.__doc__})


def _blank(mixin: type[Derived], kind: type[nn.Module]) -> nn.Module:
    made = _derived(mixin, kind)
    return made.__new__(made)
