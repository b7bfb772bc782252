"""The Python values that a function or object may read when it is called, and fingerprints of objects.

References are followed through arguments of partial functions, closures, defaults, globals, members of modules and
containers, and all attributes of objects that can be called. Of other objects, only attributes whose names occur in the
code are followed, and of a mapping the members whose keys do, or all if none does. Code is read only where it belongs
to the Python module of the function, or of the object's class.

Fingerprints are hashable descriptions of modules, losses and configurations, equal for equal structure.
"""

import contextlib
import ctypes
import dis
import enum
import functools
import hashlib
import io
import operator
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from purecompose._support.device import local


class Place(NamedTuple):
    """A value that is reached."""

    where: str
    """Description for errors; empty for the value from which the search starts."""
    value: Any
    read: Callable[[], Any] | None = None
    """Function that returns the present value; `None` where it cannot be replaced."""


def reached(start: Any, leaves: tuple[type, ...] = ()) -> list[Place]:
    """Return all places that are reached from something that can be called, each before those inside of its value.

    Nothing is looked for inside of numbers, strings, tensors and objects of the types `leaves`.
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
    """Raise a `ValueError`, which begins with `what`, if a random generator or an iterator is reached; see `reached`.

    The global generators of Python and NumPy are watched instead, in first calls.
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
                    f"{what} keeps {where or 'and is'}, a {type(value).__name__}, whose next value no state holds, so "
                    "that a resumed run would get other numbers. Draw by key (in a network with torch's random "
                    "functions, in a method with purecompose.random from state.rng(name)), index a list by "
                    "state.clock, or delete what no call uses (del net.rng)"
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


# Fingerprints


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def fingerprint(thing: Any) -> Hashable:
    """Return a hashable description of type, configuration, arrays and tensors.

    Tensors on `meta`, which stand for the weights of a skeleton, are described by shape, others by their bytes;
    functions by identity.
    """
    return _describe(thing, ())


def in_words(tensor: Tensor) -> str:
    """Return a tensor's dtype, shape, first values and checksum, as 'float32[4] (1, 0.25, 0, ...) #72c8110946f4'."""
    value = _tensor_value(tensor)
    form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not isinstance(value, tuple):
        return form
    first = tensor.detach().flatten()[:3].tolist()
    shown = [f"{number:.6g}" if isinstance(number, float) else str(number) for number in first]
    more = ", ..." if tensor.numel() > 3 else ""
    return f"{form} ({', '.join(shown)}{more}) #{value[1].hex()[:12]}"


def _describe(thing: Any, above: tuple[int, ...]) -> Hashable:
    if isinstance(thing, float):
        return (type(thing).__qualname__, thing.hex())  # 0.0 == -0.0, but computations with them differ
    if isinstance(thing, _PLAIN):
        return (type(thing).__qualname__, thing)
    if isinstance(thing, Tensor):
        return ("Tensor", tuple(thing.shape), thing.dtype, thing.requires_grad, _tensor_value(thing))
    if hasattr(thing, "tobytes") and hasattr(thing, "dtype"):  # an array or number of NumPy, which may not be installed
        value = _describe(thing.tolist(), above) if thing.dtype.hasobject else _digest(thing.tobytes())
        return (type(thing).__qualname__, thing.shape, str(thing.dtype), value)
    if isinstance(thing, _BY_IDENTITY):
        return thing
    if isinstance(thing, weakref.ref):
        return "weakref"
    if id(thing) in above:
        return ("seen", len(above) - above.index(id(thing)))
    inside = (*above, id(thing))
    if isinstance(thing, _CONTAINERS):
        attributes = vars(thing) if hasattr(thing, "__dict__") else {}
        content = _members(thing, inside)
        return (type(thing), content, _describe(attributes, inside)) if attributes else content
    if isinstance(thing, functools.partial):
        return ("partial", _describe((thing.func, thing.args, thing.keywords), inside))
    if isinstance(thing, types.MethodType):
        return ("method", thing.__func__, _describe(thing.__self__, inside))
    if isinstance(thing, nn.Module):
        attributes = {
            # The keys of hooks are numbers from a global counter.
            key: list(value.values()) if "_hooks" in key and isinstance(value, Mapping) else value
            for key, value in vars(thing).items()
            if key not in _BOOKKEEPING
        }
        # A parametrized module has its own class, created dynamically.
        return (parametrize.type_before_parametrizations(thing), _describe(attributes, inside))
    if hasattr(thing, "__dict__"):
        declared = (cls.__dict__.get("__slots__", ()) for cls in type(thing).__mro__)
        names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
        slots = {name: getattr(thing, name) for name in names if name[:2] != "__" and hasattr(thing, name)}
        return (type(thing), _describe({**vars(thing), **slots}, inside), _content(thing))
    return thing if isinstance(thing, Hashable) else (type(thing), repr(thing))


def _members(thing: Any, inside: tuple[int, ...]) -> Hashable:
    """Return a description of the members of a mapping, sequence or set."""
    if isinstance(thing, Mapping):
        return ("map", tuple((_describe(key, inside), _describe(value, inside)) for key, value in thing.items()))
    if isinstance(thing, (list, tuple)):
        return (type(thing).__qualname__, tuple(_describe(member, inside) for member in thing))
    return ("set", frozenset(_describe(member, inside) for member in thing))


def _content(thing: Any) -> Hashable:
    """Return the content of an object whose class derives from a builtin type with content, such as a list."""
    is_plain = all(cls.__module__ != "builtins" or cls is object for cls in type(thing).__mro__)
    return None if is_plain or isinstance(thing, (type, BaseException)) else repr(thing)


def _tensor_value(tensor: Tensor) -> Hashable:
    if tensor.is_meta:
        return None
    try:
        flat = local(tensor).detach().cpu().to_dense().contiguous().resolve_conj().resolve_neg()
        return str(tensor.layout), _digest(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))
    except (RuntimeError, NotImplementedError):  # the bytes of traced or quantized tensors cannot be read
        return id(tensor)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


# Attributes of nn.Module that do not affect what it computes.
_BOOKKEEPING = frozenset(
    {
        "_version",
        "_compiled_call_impl",
        "call_super_init",
        "_is_full_backward_hook",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)
