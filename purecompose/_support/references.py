"""The Python values that a function or object may read when it is called.

References are followed through the arguments of partial functions, the closures, defaults and globals of functions, the
members of modules and containers, and all attributes of objects that can be called. Of other objects, such as settings
or the owner of a method, many attributes may have nothing to do with the call: those are followed whose names occur in
code. So are the members of a mapping whose keys occur in code; if none do, all of them. Code is read only where it
belongs to the Python module of the function, or of the object's class.
"""

import contextlib
import dis
import functools
import io
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """A value that is reached."""

    where: str
    """Description for errors; empty for the value from which the search starts."""
    value: Any
    read: Callable[[], Any] | None = None
    """Function that returns the present value; `None` where it cannot be replaced."""


def reached(start: Any, leaves: tuple[type, ...] = ()) -> list[Place]:
    """Return all places that are reached, each before those inside of its value.

    Args:
        start: A function, method, module or object that can be called.
        leaves: Types whose members do not matter, besides numbers, strings and tensors.

    Example:
        >>> weights = {"kl": 0.1}
        >>> [place.where for place in reached(functools.partial(max, weights))]
        ['', 'its argument 1', '', "its argument 1['kl']"]
    """
    innermost = start
    while isinstance(innermost, (functools.partial, types.MethodType)):
        innermost = innermost.func if isinstance(innermost, functools.partial) else innermost.__func__
    home, leaves = getattr(innermost, "__module__", None), (Number, str, bytes, Tensor, *leaves)
    names: set[str] = set()
    while True:  # names in the code of a function lead to attributes, which may be functions with other names
        found, seen, rest = list[Place](), set[int](), deque([Place("", start)])
        while rest:
            place = rest.popleft()
            found.append(place)
            if id(place.value) not in seen and (place.value is start or not isinstance(place.value, leaves)):
                seen.add(id(place.value))
                rest.extend(_inside(place, names, home))
        codes = [code for place in found if _is_read(place.value, home) for code in _codes(place.value.__code__)]
        if names.issuperset(used := {word for code in codes for word in _words(code)}):
            return found
        names |= used


def check_hidden(start: Any, what: str, leaves: tuple[type, ...] = ()) -> None:
    """Raise a `ValueError` if a random generator or an iterator is reached: its next value is in no state of a run.

    The global generators of Python and NumPy are watched instead, in first calls. The error begins with `what`; for
    `leaves` see `reached`.
    """
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random, torch.Generator, Iterator) + (() if numpy is None else (numpy.Generator, numpy.RandomState))
    shared = getattr(random, "_inst", None), getattr(getattr(numpy, "mtrand", None), "_rand", None)
    rest, seen = deque([start]), set[int]()
    while rest:
        part = rest.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        rest.extend(_held(part))
        for where, value, _ in reached(part, leaves):
            is_exempt = isinstance(value, io.IOBase) or any(value is one for one in shared)
            if isinstance(value, kinds) and not is_exempt:
                raise ValueError(
                    f"{what} keeps {where or 'and is'}, a {type(value).__name__}, whose next value no state holds: the "
                    "same state and batch would give other numbers, and so would a resumed run. Draw by key (in a "
                    "network with torch's random functions, in a method with purecompose.random from "
                    "state.rng(name)), index a list by state.clock, or delete what no call uses (del net.rng)"
                )


def _held(part: Any) -> Iterable[Any]:
    """Return what a container, or a function of this library, holds: user code in a method, a metric, or settings."""
    if isinstance(part, types.FunctionType) and _is_foreign(part):
        return [place.value for place in read_by(part, ())]
    return part.values() if type(part) is dict else part if isinstance(part, (list, tuple)) else ()


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, and of its classes outside of torch, without special ones."""
    found: dict[str, Any] = {}
    for cls in reversed((value if isinstance(value, type) else type(value)).__mro__):
        found |= {} if _is_foreign(cls) else vars(cls)
    found |= getattr(value, "__dict__", {})
    skipped = _OF_MODULES if isinstance(value, nn.Module) else ()
    return {
        name: getattr(value, name, None) if isinstance(member, types.MemberDescriptorType) else member  # of __slots__
        for name, member in found.items()
        if not (name.startswith("__") or name in skipped)
        or (name == "__call__" and isinstance(member, types.FunctionType))
    }


_MANY = 1000
"""A container of this size or more is taken for data, and not searched."""
_OF_MODULES = frozenset(vars(nn.Module()))
_OWNER = "its object"


def _inside(place: Place, names: set[str], home: str | None) -> Iterator[Place]:
    """Yield the members of a value."""
    where, value = place.where, place.value
    if isinstance(value, functools.partial):
        prefix = f"{where}: its argument" if where else "its argument"
        yield from (Place(f"{prefix} {i}", argument) for i, argument in enumerate(value.args, 1))
        yield from (_item(f"{prefix} {key}", value.keywords, key) for key in value.keywords)
        yield Place(where, value.func)
    elif isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, (types.ModuleType, type)):
        yield Place(where, value.__self__)
    elif isinstance(value, types.MethodType):
        yield Place(where or _OWNER, value.__self__)
        yield Place(where, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from read_by(value) if _is_read(value, home) else ()
    elif isinstance(value, (property, staticmethod, classmethod)):
        yield Place(where, value.fget if isinstance(value, property) else value.__func__)
    elif isinstance(value, (Mapping, list, tuple)):
        keys = list(value) if isinstance(value, Mapping) else range(len(value))
        if isinstance(value, Mapping):  # settings that are read by constant keys
            keys = [key for key in keys if key in names] or keys
        yield from (_item(f"{where}[{key!r}]", value, key) for key in keys if len(keys) < _MANY)
    elif not _is_foreign(value):
        yield from _inside_object(place, names)


def read_by(function: types.FunctionType, kinds: tuple[type, ...] = (object,)) -> Iterator[Place]:
    """Yield the values in the closure and the defaults of a function, and its globals of these kinds."""
    code, known = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield _attribute(name, cell, "cell_contents", cell.cell_contents)
    defaults = function.__defaults__ or ()
    named = zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (
        Place(f"the default of {name}", one) for name, one in (*named, *(function.__kwdefaults__ or {}).items())
    )
    read = [name for name in _globals_in(code) if name in known and isinstance(known[name], kinds)]
    yield from (_item(f"the global {name}", known, name) for name in read)


@functools.cache
def _globals_in(code: types.CodeType) -> list[str]:
    # Not co_names, which has attributes, too: `outputs.mean()` does not read a global `mean`.
    loads = (one for own in _codes(code) for one in dis.get_instructions(own) if one.opname == "LOAD_GLOBAL")
    return [*dict.fromkeys(one.argval for one in loads)]


def _inside_object(place: Place, names: set[str]) -> Iterator[Place]:
    value, members = place.value, attributes(place.value)
    if isinstance(value, nn.Module):
        members |= {**value._modules, **value._parameters, **value._buffers}
    is_whole = callable(value) and not isinstance(value, type)
    prefix = "its attribute " if place.where in ("", _OWNER) else f"{place.where}."
    for name, member in members.items():
        if is_whole or name in names:
            yield _attribute(prefix + name, value, name, member)


def _attribute(where: str, holder: Any, name: str, value: Any) -> Place:
    settings = getattr(type(holder), "__dataclass_params__", None)  # of an object; a class can change
    is_fixed = getattr(settings, "frozen", False) or _is_code(value)
    return Place(where, value, None if is_fixed else functools.partial(getattr, holder, name))


def _item(where: str, holder: Any, key: Any) -> Place:
    value = holder[key]
    is_fixed = isinstance(holder, tuple) or _is_code(value)
    return Place(where, value, None if is_fixed else functools.partial(operator.getitem, holder, key))


def _is_code(value: Any) -> bool:
    """Return whether a value is a Python module, a class, a function, or a descriptor such as a property."""
    return isinstance(value, (types.ModuleType, type)) or hasattr(type(value), "__get__")


def _is_read(value: Any, home: str | None) -> TypeGuard[types.FunctionType]:
    return isinstance(value, types.FunctionType) and value.__module__ == home and not _is_foreign(value)


def _is_foreign(value: Any) -> bool:
    """Return whether a Python module, class or function is of torch or this library."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return _is_code(value) and str(name).partition(".")[0] in ("torch", "purecompose")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of those defined inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _words(code: types.CodeType) -> Iterator[str]:
    """Yield the names and words in a code, among them attributes and keys."""
    yield from code.co_names
    for constant in code.co_consts:
        yield from (word for word in (constant if isinstance(constant, tuple) else (constant,)) if type(word) is str)
