"""What a loss reads besides outputs and targets: tensors, scalars, and Python constants.

Parameters and buffers of a module move into the state. Schedules and named scalars are found among the attributes, and
filled in for a call. Constants must not change: compiled code would keep the value with which it was traced.

All of them are found by following references from the loss; see `purecompose._support.objects`.
"""

import copy
import functools
import types
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from purecompose import losses
from purecompose._support.objects import Place, attributes, check_hidden, fingerprint, reached
from purecompose._support.specs import shown
from purecompose.nn.model import Model, Parts, from_module
from purecompose.schedule import Hparam, Product, Scalar, Schedule


PREFIX = "loss."
"""The names of a loss's parameters and buffers in a state begin with it."""
Constant: TypeAlias = tuple[Place, Hashable]
"""A value that a loss reads, and what changes when a tensor or array is written into; see `_version`."""


class _Holder(nn.Module):
    """A module around a loss, which gives the loss's tensors their prefix; it calls a function with the loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()  # in training mode, so that the loss keeps the modes of its modules, as in a plain loop
        self.loss = loss

    def forward(self, fn: Any) -> Any:
        return fn(self.loss)


def joined(parts: Parts, loss: Any, net: nn.Module) -> tuple[Parts, Any, Model | None]:
    """Return a network's parts with the tensors of its loss, the loss without them, and the architecture of the loss.

    The last is `None` unless the loss is a module with parameters or buffers.

    Raises:
        TypeError, ValueError: See `check_loss` and `check_reads`; or the network has tensors whose names begin with
            "loss.".
    """
    losses.check_loss(loss)
    check_reads(loss, net)
    if isinstance(loss, losses.ModelLoss):
        return parts, loss.of_network(net), None
    if not isinstance(loss, nn.Module) or not any(isinstance(part, Tensor) for part in _parts(loss)):
        return parts, loss, None
    taken = [name for name, _ in (*net.named_parameters(), *net.named_buffers()) if name.startswith(PREFIX)]
    if taken:
        raise ValueError(
            f"the network has the tensor {taken[0]!r}, but names that begin with {PREFIX!r} are reserved for the "
            "parameters and buffers of the loss: rename the network's module"
        )
    own = from_module(_Holder(loss))
    params, buffers = {**parts.params, **own.params}, {**parts.buffers, **own.buffers}
    return Parts(parts.model, params, buffers, parts.frozen | own.frozen), own.model.module.loss, own.model


def check_reads(loss: Any, net: nn.Module | None = None) -> None:
    """Raise an error if a loss reads what is outside of the state, or cannot be filled in.

    Raises:
        TypeError: It reads a schedule or named scalar where its value cannot be filled in.
        ValueError: It reads parameters from outside of the state, or tensors of the network.
    """
    own = {id(part) for part in _parts(loss)} if isinstance(loss, nn.Module) else set()
    of_net = {id(part) for part in _parts(net)} if net is not None else set()
    filled_in = {id(scalar) for scalar in scalars_of(loss).values()}
    check_hidden(loss, f"the loss {shown(loss)}", _SCALARS)
    for where, value, _ in reached(loss, _SCALARS):
        what = f"{where or 'its object'}, a {type(value).__name__}"
        if id(value) in of_net:
            raise ValueError(_outside(loss, f"{what} of the network"))
        if id(value) in own:
            continue
        if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
            raise ValueError(_outside(loss, f"the parameters of {what}"))
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(_outside(loss, f"{what} that requires a gradient"))
        if isinstance(value, _SCALARS) and id(value) not in filled_in:
            raise TypeError(
                f"the loss {shown(loss)} reads {where}, {value!r}, whose value cannot be filled in there: make it an "
                f"argument, as in functools.partial(loss, weight={value!r})"
            )


def scalars_of(loss: Any) -> dict[str, Scalar]:
    """Return the schedules and named scalars among a loss's attributes, and the keywords of a partial function.

    Example:
        >>> from purecompose import hparam, losses
        >>> scalars_of(functools.partial(losses.mse, weight=hparam("weight", 2.0)))
        {'weight': hparam('weight', 2.0)}
    """
    if isinstance(loss, functools.partial):
        found = {**{_FUNC + name: value for name, value in scalars_of(loss.func).items()}, **loss.keywords}
    else:
        owner = loss.__self__ if isinstance(loss, types.MethodType) else loss
        found = {} if isinstance(owner, (types.FunctionType, type)) else attributes(owner)
    return {name: value for name, value in found.items() if isinstance(value, _SCALARS)}


def with_scalars(loss: Any, values: Mapping[str, Any]) -> Any:
    """Return the loss with other values for these attributes or keywords; the given one is not changed."""
    if isinstance(loss, functools.partial):
        inside = {name.removeprefix(_FUNC): value for name, value in values.items() if name.startswith(_FUNC)}
        keywords = {name: value for name, value in values.items() if not name.startswith(_FUNC)}
        function = with_scalars(loss.func, inside) if inside else loss.func
        return functools.partial(function, *loss.args, **{**loss.keywords, **keywords})
    if isinstance(loss, types.MethodType):
        return types.MethodType(loss.__func__, with_scalars(loss.__self__, values))
    changed = copy.copy(loss)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # also of a frozen dataclass
    return changed


def constants_of(fn: Any) -> tuple[Constant, ...]:
    """Return what a loss, or another function, reads from places that can change, except `None`, to be filled in."""

    def may_change(place: Place) -> bool:
        if isinstance(place.value, Tensor):
            return not place.value.is_meta  # as the twins of the loss's own tensors are
        return place.read is not None and place.value is not None

    return tuple((place, _version(place.value)) for place in reached(fn, _SCALARS) if may_change(place))


def changed_constant(constants: Iterable[Constant]) -> str | None:
    """Return a description of the first constant that has changed, such as "g[0], which was 0 and is 1 now"."""
    for (where, value, read), version in constants:
        try:
            now = value if read is None else read()
        except (AttributeError, LookupError, ValueError):
            now = None
        if now is value:
            is_same = version is None or _version(value) == version
        else:
            is_same = not isinstance(value, Tensor) and fingerprint(now) == fingerprint(value)
        if not is_same:
            changed = "has been written into" if now is value else f"was {value!r:.60} and is {now!r:.60} now"
            return f"{where}, which {changed}"
    return None


def check_constants(loss: Any, constants: tuple[Constant, ...]) -> None:
    """Raise a `ValueError` if a constant of a loss has changed."""
    if changed := changed_constant(constants):
        raise ValueError(
            f"the loss {shown(loss)} reads {changed}, but a loss must not change during a run: make it a schedule or a "
            "named scalar, as in functools.partial(loss, weight=hparam('weight', 1.0)), or a buffer of an nn.Module"
        )


_SCALARS = (Hparam, Schedule, Product)
_FUNC = "func."
"""The names of scalars of the function in a partial one begin with it."""


def _parts(module: nn.Module) -> list[Any]:
    return [*module.modules(), *module.parameters(), *module.buffers()]


def _outside(loss: Any, what: str) -> str:
    return (
        f"the loss {shown(loss)} reads {what}, outside of the state, where nothing is trained, moved or saved. Return "
        "what it needs from the network's forward; or make the loss an nn.Module of its own, whose parameters and "
        f"buffers are then in the state as {PREFIX}*; a penalty on the network's parameters is an algorithm at "
        "Event.AFTER_LOSS"
    )


def _version(value: Any) -> Hashable:
    """Return how often a tensor has been written into, or a description of a small array of NumPy; else `None`."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    is_array = hasattr(value, "tobytes") and hasattr(value, "dtype") and hasattr(value, "__setitem__")
    return fingerprint(value) if is_array and value.nbytes <= _MANY_BYTES else None


_MANY_BYTES = 4096
"""Larger arrays are not compared, because that would take more than a few microseconds in each step."""
