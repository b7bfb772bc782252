"""Fingerprints: hashable descriptions of modules, losses and configurations, equal for equal structure."""

import ctypes
import enum
import functools
import hashlib
import types
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from purecompose._support.shards import local


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def fingerprint(thing: Any) -> Hashable:
    """Return a hashable description of type, configuration, arrays and tensors.

    Tensors on `meta` stand for the weights of a skeleton and are described by shape, others by their bytes. Two
    separately built networks of one architecture have the same fingerprint. Functions are described by identity.
    """
    return _describe(thing, ())


def in_words(tensor: Tensor) -> str:
    """Return a tensor's dtype, shape, first values and checksum; equal for tensors that are equal bit for bit.

    Example:
        >>> in_words(torch.tensor([1.0, 0.25, 0.0, 3.0]))
        'float32[4] (1, 0.25, 0, ...) #72c8110946f4'
    """
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
    slots = _slots(thing)
    if hasattr(thing, "__dict__"):
        return (type(thing), _describe({**vars(thing), **slots}, inside), _content(thing))
    return thing if isinstance(thing, Hashable) else (type(thing), repr(thing))


def _members(thing: Any, inside: tuple[int, ...]) -> Hashable:
    """Return a description of the members of a mapping, sequence or set."""
    if isinstance(thing, Mapping):
        return ("map", tuple((_describe(key, inside), _describe(value, inside)) for key, value in thing.items()))
    if isinstance(thing, (list, tuple)):
        return (type(thing).__qualname__, tuple(_describe(member, inside) for member in thing))
    return ("set", frozenset(_describe(member, inside) for member in thing))


def _slots(thing: Any) -> dict[str, Any]:
    """Return the values of an object's `__slots__` by name."""
    declared = (cls.__dict__.get("__slots__", ()) for cls in type(thing).__mro__)
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return {name: getattr(thing, name) for name in names if name[:2] != "__" and hasattr(thing, name)}


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
