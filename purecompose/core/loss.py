"""Dependencies of a loss besides outputs and targets: tensors, scalars, and Python constants.

Parameters and buffers of a module move into the state. Schedules and named scalars are found among the attributes, and
filled in for a call. Constants must not change: compiled code would keep the value with which it was traced.
"""

import copy
import dataclasses
import dis
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from numbers import Number
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from purecompose._support.checks import shown
from purecompose.nn.model import Parts, from_module
from purecompose.schedule import Hparam, Product, Scalar, Schedule


__all__ = ["PREFIX", "Constant", "check_constants", "constants_of", "scalars_of", "taken_apart", "with_scalars"]

PREFIX = "loss."
"""The names of a loss's parameters and buffers in a state begin with it."""


class _Holder(nn.Module):
    """A module around a loss, which gives the loss's tensors their prefix; it calls a function with the loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self.training = loss.training

    def forward(self, fn: Any) -> Any:
        return fn(self.loss)


def taken_apart(loss: Any, net: nn.Module) -> tuple[Any, Parts | None]:
    """Return a loss without its tensors, and its parts; `None` unless it is a module with parameters or buffers.

    Args:
        loss: The loss.
        net: The network.

    Raises:
        TypeError: The loss reads a schedule or named scalar where its value cannot be filled in.
        ValueError: It reads parameters from outside of the state; or the network has tensors whose names begin with
            "loss.".
    """
    has_tensors = isinstance(loss, nn.Module) and any(True for _ in _tensors(loss))
    if has_tensors and {id(tensor) for tensor in _tensors(loss)} & {id(tensor) for tensor in _tensors(net)}:
        raise ValueError(_reads_parameters(loss, "tensors of the network"))
    own = {id(part) for part in (*loss.modules(), *_tensors(loss))} if has_tensors else set()
    filled_in = set(map(id, scalars_of(loss).values()))
    for place in _with_members(_places(loss)):
        value = place.value
        if id(value) in own:
            continue
        if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
            raise ValueError(_reads_parameters(loss, f"the parameters of {place.where}, a {type(value).__name__}"))
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(_reads_parameters(loss, f"{place.where}, a tensor that requires a gradient"))
        if isinstance(value, _SCALARS) and id(value) not in filled_in:
            raise TypeError(
                f"the loss {shown(loss)} reads {place.where}, {value!r}, whose value cannot be filled in there: make "
                f"it an argument, as in functools.partial(loss, weight={value!r}), or an attribute of an object with "
                "__call__, which is the loss itself"
            )
    if not has_tensors:
        return loss, None
    taken = [name for name, _ in (*net.named_parameters(), *net.named_buffers()) if name.startswith(PREFIX)]
    if taken:
        raise ValueError(
            f"the network has the tensor {taken[0]!r}, but names that begin with {PREFIX!r} are reserved for the "
            "parameters and buffers of the loss: rename the network's module"
        )
    parts = from_module(_Holder(loss))
    return parts.model.module.loss, parts


def scalars_of(loss: Any) -> dict[str, Scalar]:
    """Return the schedules and named scalars among a loss's attributes, or the keywords of a partial function.

    Example:
        >>> from purecompose import hparam, losses
        >>> scalars_of(functools.partial(losses.mse, weight=hparam("weight", 2.0)))
        {'weight': hparam('weight', 2.0)}
    """
    found = loss.keywords if isinstance(loss, functools.partial) else _attributes(loss)
    return {name: value for name, value in found.items() if isinstance(value, _SCALARS)}


def with_scalars(loss: Any, values: Mapping[str, Any]) -> Any:
    """Return the loss with other values for these attributes or keywords; the given one is not changed."""
    if isinstance(loss, functools.partial):
        return functools.partial(loss, **values)
    if isinstance(loss, types.MethodType):
        return types.MethodType(loss.__func__, with_scalars(loss.__self__, values))
    changed = copy.copy(loss)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # also of a frozen dataclass
    return changed


class Constant(NamedTuple):
    """A number, word or tensor that a loss reads from Python, with its value at the first step."""

    holder: Any
    """Closure cell, mapping or object that contains it."""
    key: Any
    """Key in a mapping, or name of an attribute; `None` for a cell."""
    where: str
    """Description of the place, for errors."""
    value: Any
    version: int = 0
    """Version counter of a tensor."""


def constants_of(loss: Any) -> tuple[Constant, ...]:
    """Return the numbers, words and tensors that a loss reads from places where they can change."""
    found = [place for place in _places(loss) if isinstance(place.value, (Number, str, Tensor))]
    return tuple(place._replace(version=_version(place.value)) for place in found)


def check_constants(loss: Any, constants: tuple[Constant, ...]) -> None:
    """Raise a `ValueError` if a constant of a loss has changed."""
    for holder, key, where, value, version in constants:
        if key is None:
            now = _content(holder)
        else:
            now = holder.get(key) if isinstance(holder, Mapping) else getattr(holder, key, None)
        is_same = now is value or (not isinstance(value, Tensor) and now == value)
        if not is_same or _version(now) != version:
            changed = "has been written into" if now is value else f"was {value!r:.60} and is {now!r:.60} now"
            raise ValueError(
                f"the loss {shown(loss)} reads {where}, which {changed}, but a loss must not change during a run: make "
                "it a schedule or a named scalar, as in functools.partial(loss, weight=hparam('weight', 1.0)), or a "
                "buffer of an nn.Module"
            )


_SCALARS = (Hparam, Schedule, Product)
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
"""Operations of bytecode that read an attribute."""
_MANY = 1000
"""A list or dict of this size or more is taken for data, and not searched."""


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _reads_parameters(loss: Any, what: str) -> str:
    return (
        f"the loss {shown(loss)} reads {what}, outside of the state, where nothing is trained, moved or saved. Return "
        "what it needs from the network's forward; or make the loss an nn.Module of its own, whose parameters and "
        f"buffers are then in the state as {PREFIX}*; a penalty on the network's parameters is an algorithm at "
        "Event.AFTER_LOSS"
    )


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _attributes(loss: Any) -> dict[str, Any]:
    """Return the attributes of an object that is a loss, or those that a method reads which is a loss."""
    if isinstance(loss, types.MethodType):
        read = _read_by(loss)
        return {name: value for name, value in _attributes(loss.__self__).items() if name in read}
    if isinstance(loss, (types.FunctionType, types.BuiltinFunctionType, type)):
        return {}
    return _variables(loss)


def _variables(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its `__dict__` and in slots."""
    slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
    in_slots = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    return {**in_slots, **getattr(value, "__dict__", {})}


def _read_by(loss: Any) -> set[str]:
    """Return the attributes, and keys of mappings, that a loss reads, itself or in methods of its object."""
    classes = () if isinstance(loss, types.FunctionType) else type(getattr(loss, "__self__", loss)).__mro__
    starts = [getattr(loss, "__func__", loss)]
    starts += [vars(cls).get(name) for cls in classes for name in ("__call__", "forward") if starts[0] is loss]
    names, rest = set[str](), [function.__code__ for function in starts if _is_followed(function)]
    while rest:
        for found, following in pairwise(_instructions(rest.pop())):
            if following.opname == "BINARY_SUBSCR" or following.argrepr == "[]":
                names |= {found.argval} if isinstance(found.argval, str) and found.opname == "LOAD_CONST" else set()
            if found.opname in _READS and found.argval not in names:
                names.add(found.argval)
                methods = [vars(cls).get(found.argval) for cls in classes]
                methods = [method.fget if isinstance(method, property) else method for method in methods]
                rest += [method.__code__ for method in methods if _is_followed(method)]
    return names


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function, and of those defined inside of it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _is_followed(value: Any) -> TypeGuard[types.FunctionType]:
    return isinstance(value, types.FunctionType) and not (value.__module__ or "").startswith("torch.")


def _places(loss: Any) -> Iterator[Constant]:
    """Yield what a loss reads from arguments, attributes, closures, defaults and globals."""
    if isinstance(loss, functools.partial):
        positional = dict(enumerate(loss.args))
        yield from (Constant(positional, i, f"its argument {i + 1}", value) for i, value in positional.items())
        yield from (
            Constant(loss.keywords, name, f"its argument {name}", loss.keywords[name]) for name in loss.keywords
        )
        if isinstance(loss.func, nn.Module):
            yield Constant({"func": loss.func}, "func", "its function", loss.func)
        yield from _places(loss.func)
        return
    if isinstance(loss, types.MethodType):
        yield Constant({"self": loss.__self__}, "self", "its object", loss.__self__)
    attributes, owner, read = _attributes(loss), getattr(loss, "__self__", loss), _read_by(loss)
    is_frozen = dataclasses.is_dataclass(loss) and type(loss).__dataclass_params__.frozen  # pyright: ignore
    for name, value in attributes.items():
        is_skipped = isinstance(owner, nn.Module) and _is_of_torch(name)
        if not is_skipped and not (is_frozen and isinstance(value, (Number, str))):
            place = Constant(owner, name, f"its attribute {name}", value)
            yield place
            yield from _settings(place, read)
    if isinstance(loss, nn.Module):
        yield from (Constant(loss, name, f"its module {name}", child) for name, child in loss.named_children())
        for path, module in list(loss.named_modules())[1:]:
            yield from (
                Constant(module, name, f"its attribute {path}.{name}", value)
                for name, value in vars(module).items()
                if not _is_of_torch(name)
            )
    function: Any = getattr(loss, "__func__", loss)
    if _is_followed(function):
        yield from _in_function(function, {id(function)})


def _with_members(places: Iterable[Constant]) -> Iterator[Constant]:
    """Yield places, and those inside of the modules, containers and partial functions that they have."""
    seen, rest = set(), deque(places)
    while rest:
        place = rest.popleft()
        holder, value = place.where, place.value
        yield place
        if id(value) in seen:
            continue
        seen.add(id(value))
        members: dict[str, Any] = {}
        if isinstance(value, nn.Module):
            members = {f"{holder}.{name}": member for name, member in _members(value)}
        elif isinstance(value, Mapping) and len(value) < _MANY:
            members = {f"{holder}[{key!r}]": member for key, member in value.items()}
        elif isinstance(value, (list, tuple)) and len(value) < _MANY:
            members = {f"{holder}[{i}]": member for i, member in enumerate(value)}
        elif isinstance(value, (functools.partial, types.MethodType)):
            rest += (inner._replace(where=f"{holder}: {inner.where}") for inner in _places(value))
        rest += (Constant(members, where, where, member) for where, member in members.items())


def _members(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_children()
    yield from ((name, value) for name, value in vars(module).items() if not _is_of_torch(name))


def _settings(place: Constant, read: set[str]) -> Iterator[Constant]:
    """Yield those members of a plain object or mapping that a function reads, as in `config.weight`."""
    value = place.value
    is_of_torch = isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] == "torch"
    if is_of_torch or isinstance(value, (nn.Module, Tensor, type, *_SCALARS)):
        return
    members = value if isinstance(value, Mapping) else _variables(value)
    for name in sorted(read & members.keys()):
        where = f"{place.where}[{name!r}]" if members is value else f"{place.where}.{name}"
        inner = Constant(value, name, where, members[name])
        if not isinstance(inner.value, (types.ModuleType, types.FunctionType, type)):
            yield inner
            yield from _settings(inner, read - {name})


def _is_of_torch(name: str) -> bool:
    """Return whether an attribute of a module is not one that its class has added."""
    return name == "training" or name.startswith("_")


def _in_function(function: types.FunctionType, seen: set[int]) -> Iterator[Constant]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    inside = [Constant(cell, None, name, _content(cell)) for name, cell in cells.items()]
    names = {i.argval for i in _instructions(function.__code__) if i.opname == "LOAD_GLOBAL"}
    names &= function.__globals__.keys()
    inside += [Constant(function.__globals__, name, f"the global {name}", function.__globals__[name]) for name in names]
    defaults = {**(function.__kwdefaults__ or {})}
    code, values = function.__code__, function.__defaults__ or ()
    defaults |= dict(zip(code.co_varnames[: code.co_argcount][-len(values) :], values, strict=False)) if values else {}
    inside += [Constant(defaults, name, f"the default of {name}", value) for name, value in defaults.items()]
    read = _read_by(function)
    for place in inside:
        value = place.value
        if not isinstance(value, types.FunctionType):
            yield place
            yield from _settings(place, read)
        elif id(value) not in seen and value.__module__ == function.__module__:
            seen.add(id(value))
            yield from _in_function(value, seen)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
