"""Dependencies of a loss besides outputs and targets: tensors, scalars, and Python constants.

Parameters and buffers of a module move into the state. Schedules and named scalars are found among the attributes, and
filled in for a call. Constants must not change: compiled code would keep the value with which it was traced.
"""

import copy
import dataclasses
import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
    if isinstance(loss, nn.Module) and any(True for _ in _tensors(loss)):
        if {id(tensor) for tensor in _tensors(loss)} & {id(tensor) for tensor in _tensors(net)}:
            raise ValueError(_reads_parameters(loss, "tensors of the network"))
        taken = [name for name, _ in (*net.named_parameters(), *net.named_buffers()) if name.startswith(PREFIX)]
        if taken:
            raise ValueError(
                f"the network has the tensor {taken[0]!r}, but names that begin with {PREFIX!r} are reserved for the "
                "parameters and buffers of the loss: rename the network's module"
            )
        parts = from_module(_Holder(loss))
        return parts.model.module.loss, parts
    owner = getattr(loss, "__self__", None)
    if isinstance(owner, nn.Module) and any(True for _ in owner.parameters()):
        raise ValueError(_reads_parameters(loss, f"the parameters of its {type(owner).__name__}"))
    filled_in = set(map(id, scalars_of(loss).values()))
    for place in _places(loss):
        value = place.value
        if isinstance(value, nn.Module) and value is not loss and any(True for _ in value.parameters()):
            raise ValueError(_reads_parameters(loss, f"the parameters of {place.where}, a {type(value).__name__}"))
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(_reads_parameters(loss, f"{place.where}, a tensor that requires a gradient"))
        if isinstance(value, _SCALARS) and id(value) not in filled_in:
            raise TypeError(
                f"the loss {shown(loss)} reads {place.where}, {value!r}, whose value cannot be filled in there: make "
                f"it an argument, as in functools.partial(loss, weight={value!r}), or an attribute of an object with "
                "__call__"
            )
    return loss, None


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
    vars(changed).update(values)
    return changed


class Constant(NamedTuple):
    """A number or tensor that a loss reads from Python, with its value at the first step."""

    holder: Any
    """Closure cell or mapping that contains it."""
    key: str | None
    """Key in a mapping; `None` for a cell."""
    where: str
    """Description of the place, for errors."""
    value: Any
    version: int = 0
    """Version counter of a tensor."""


def constants_of(loss: Any) -> tuple[Constant, ...]:
    """Return the numbers and tensors that a loss reads from places where they can change."""
    found = [place for place in _places(loss) if isinstance(place.value, (int, float, Tensor))]
    return tuple(place._replace(version=_version(place.value)) for place in found)


def check_constants(loss: Any, constants: tuple[Constant, ...]) -> None:
    """Raise a `ValueError` if a constant of a loss has changed."""
    for holder, key, where, value, version in constants:
        now = holder.cell_contents if key is None else holder.get(key)
        is_same = now is value or (not isinstance(value, Tensor) and now == value)
        if not is_same or _version(now) != version:
            changed = "has been written into" if now is value else f"was {value!r:.60} and is {now!r:.60} now"
            raise ValueError(
                f"the loss {shown(loss)} reads {where}, which {changed}, but a loss must not change during a run: make "
                "it a schedule or a named scalar, as in functools.partial(loss, weight=hparam('weight', 1.0)), or a "
                "buffer of an nn.Module"
            )


_SCALARS = (Hparam, Schedule, Product)


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
    """Return the attributes of an object that is a loss, or has it as a method."""
    if isinstance(loss, types.MethodType):
        return _attributes(loss.__self__)
    if isinstance(loss, (types.FunctionType, type)):
        return {}
    return getattr(loss, "__dict__", {})


def _places(loss: Any) -> Iterator[Constant]:
    """Yield what a loss reads from attributes, closures, defaults and globals."""
    if isinstance(loss, functools.partial):
        yield from (
            Constant(loss.keywords, name, f"its argument {name}", loss.keywords[name]) for name in loss.keywords
        )
        yield from _places(loss.func)
        return
    attributes = _attributes(loss)
    is_frozen = dataclasses.is_dataclass(loss) and type(loss).__dataclass_params__.frozen  # pyright: ignore
    for name, value in attributes.items():
        is_of_torch = isinstance(loss, nn.Module) and (name == "training" or name.startswith("_"))
        if not is_of_torch and not (is_frozen and isinstance(value, (int, float))):
            yield Constant(attributes, name, f"its attribute {name}", value)
    function = getattr(loss, "__func__", loss)
    if isinstance(function, types.FunctionType) and not (function.__module__ or "").startswith("torch."):
        yield from _in_function(function, {id(function)})


def _in_function(function: types.FunctionType, seen: set[int]) -> Iterator[Constant]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    inside = [Constant(cell, None, name, _content(cell)) for name, cell in cells.items()]
    names = {
        i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"
    } & function.__globals__.keys()
    inside += [Constant(function.__globals__, name, f"the global {name}", function.__globals__[name]) for name in names]
    defaults = {**(function.__kwdefaults__ or {})}
    code, values = function.__code__, function.__defaults__ or ()
    defaults |= dict(zip(code.co_varnames[: code.co_argcount][-len(values) :], values, strict=False)) if values else {}
    inside += [Constant(defaults, name, f"the default of {name}", value) for name, value in defaults.items()]
    for place in inside:
        value = place.value
        if not isinstance(value, types.FunctionType):
            yield place
        elif id(value) not in seen and value.__module__ == function.__module__:
            seen.add(id(value))
            yield from _in_function(value, seen)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
