"""Layers of packages that need not be installed: stand-ins for their classes, and changed copies of their modules."""

import copy
import functools
from collections.abc import Container
from typing import Any

from torch import nn


__all__ = ["Derived", "changed", "one_of", "stand_in"]


class _ByName(type):
    """Classes of which those instances are whose class, or one that it comes from, has a certain name."""

    def __instancecheck__(cls, thing: Any) -> bool:
        wanted = cls.__dict__["of"]
        return any((kind.__module__, kind.__qualname__) == wanted for kind in type(thing).__mro__)


class _ByIdentity(type):
    """Classes whose instances are the members of a container."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return thing in cls.__dict__["members"]


def one_of(members: Container[Any], shown: str) -> type[nn.Module]:
    """Return a class for `isinstance` and the rules of a surgery, in place of certain modules.

    Args:
        members: The modules, which may be found later.
        shown: What messages call it.

    Example:
        >>> first = nn.Linear(2, 2)
        >>> isinstance(first, one_of([first], "first")), isinstance(nn.Linear(2, 2), one_of([first], "first"))
        (True, False)
    """
    return _ByIdentity(shown, (nn.Module,), {"members": members})


def stand_in(module: str, name: str) -> type[nn.Module]:
    """Return a class for `isinstance` and the rules of a surgery, in place of one that is known by name only.

    Nothing is imported, now or later.

    Args:
        module: Where the class is defined.
        name: Its name there.

    Example:
        >>> isinstance(nn.Linear(2, 2), stand_in("torch.nn.modules.linear", "Linear"))
        True
    """
    return _ByName(name, (nn.Module,), {"of": (module, name)})


class Derived(nn.Module):
    """What is mixed into a foreign class by `changed`; its methods come before that class's own."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made on the spot, and cannot be found by its name.
        mixin, kind = type(self).__bases__
        return _blank, (mixin, kind), self.__dict__


def changed(module: nn.Module, mixin: type[Derived] | None = None, **children: nn.Module) -> nn.Module:
    """Return a copy of a module with the same parameters, attributes and names, some of its own methods and children
    aside.

    Args:
        module: The module; it stays as it was.
        mixin: Whose methods come first.
        children: Modules in place of what has these names, modules or others.
    """
    twin = copy.copy(module)
    if mixin is not None:
        twin.__class__ = _derived(mixin, type(module))
    vars(twin)["_modules"] = {**module._modules, **children}
    for name in children:
        vars(twin).pop(name, None)  # a plain attribute, such as a function, which would be found first
    return twin


@functools.cache  # one class for one pair: architectures are compared by their classes
def _derived(mixin: type[Derived], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {"__module__": __name__, "__doc__": mixin.__doc__})


def _blank(mixin: type[Derived], kind: type[nn.Module]) -> nn.Module:
    made = _derived(mixin, kind)
    return made.__new__(made)
