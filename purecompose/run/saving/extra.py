"""What a run keeps outside the state, such as an environment, in its checkpoints: packed as plain values and tensors.

Containers and plain values go into the checkpoint's index as JSON, with references to the tensors in its file.
"""

import base64
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from purecompose._support.checks import shown
from purecompose.errors import MismatchError


EXTRA, POSITION = "extra", "position"
"""What is packed: what the user gives, and the position of the data; names in the index's memory, and before the names
of their tensors."""

_PLAIN = (bool, int, float, str, type(None))
_TENSOR, _ARRAY, _TUPLE, _MAP, _BYTES = "!tensor", "!array", "!tuple", "!dict", "!bytes"


def check_extra(extra: Any) -> None:
    """Raise if what a run keeps outside the state cannot be saved or restored."""
    if extra is not None and isinstance(extra, (*_PLAIN, bytes, tuple)):
        raise TypeError(
            f"Checkpoints: extra={shown(extra)}: expected something that can be restored in its place: an object with "
            "state_dict and load_state_dict, a tensor, an array, or a list or dict of these and of plain values"
        )
    pack(extra, EXTRA)


def is_extra(name: str) -> bool:
    """Return whether a tensor's name in a checkpoint is one that `pack` gives."""
    return name.startswith((f"{EXTRA}/", f"{POSITION}/"))


def pack(value: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Return values for JSON, and copies of the tensors and arrays by their names in the checkpoint.

    Raises:
        TypeError: There is something that no checkpoint can hold.
    """
    tensors: dict[str, Tensor] = {}

    def stored(tensor: Tensor) -> str:
        place = f"{name}/{len(tensors)}"
        tensors[place] = tensor.detach().clone()
        return place

    return _packed(value, name, stored), tensors


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the inverse of `pack`, with the content of an object's `state_dict` in place of the object."""
    if isinstance(packed, list):
        return [unpack(member, tensors) for member in packed]
    if not isinstance(packed, Mapping):
        return packed
    if _TENSOR in packed:
        return tensors[packed[_TENSOR]]
    if _ARRAY in packed:
        return tensors[packed[_ARRAY]].numpy()
    if _BYTES in packed:
        return base64.b64decode(packed[_BYTES])
    if _TUPLE in packed:
        return tuple(unpack(member, tensors) for member in packed[_TUPLE])
    if _MAP in packed:
        return {unpack(key, tensors): unpack(member, tensors) for key, member in packed[_MAP]}
    return {name: unpack(member, tensors) for name, member in packed.items()}


def restore(extra: Any, saved: Any, place: str = "extra") -> Any:
    """Put saved values back in their place: into objects, tensors and containers; return what now stands there."""
    if _has_state(extra):
        extra.load_state_dict(saved)
        return extra
    if isinstance(extra, Tensor) or _is_array(extra):
        kind = Tensor if isinstance(extra, Tensor) else type(extra)
        if not isinstance(saved, kind) or saved.shape != extra.shape or saved.dtype != extra.dtype:
            raise _misfit(place, saved, extra)
        with torch.no_grad():
            extra[...] = saved
        return extra
    if isinstance(extra, dict):
        if not isinstance(saved, dict) or saved.keys() != extra.keys():
            raise _misfit(place, saved, extra)
        for key, member in extra.items():
            extra[key] = restore(member, saved[key], f"{place}[{key!r}]")
        return extra
    if isinstance(extra, (list, tuple)):
        if type(saved) is not type(extra) or len(saved) != len(extra):
            raise _misfit(place, saved, extra)
        members = [restore(*pair, f"{place}[{i}]") for i, pair in enumerate(zip(extra, saved, strict=True))]
        if isinstance(extra, tuple):
            return tuple(members)
        extra[:] = members
        return extra
    return saved


def _packed(value: Any, place: str, stored: Callable[[Tensor], str]) -> Any:
    if _has_state(value):
        return _packed(value.state_dict(), f"{place}.state_dict()", stored)
    if isinstance(value, Tensor):
        return {_TENSOR: stored(value)}
    if _is_array(value):
        try:
            return {_ARRAY: stored(torch.as_tensor(value.copy()))}
        except TypeError:
            raise TypeError(f"Checkpoints: {place} has the dtype {value.dtype}, which no checkpoint can hold") from None
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_packed(member, f"{place}[{i}]", stored) for i, member in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [_packed(member, f"{place}[{i}]", stored) for i, member in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [(key, _packed(member, f"{place}[{key!r}]", stored)) for key, member in value.items()]
        if all(isinstance(key, str) and key[:1] != "!" for key in value) and value.keys() != {"float"}:
            return dict(pairs)
        return {_MAP: [[_packed(key, f"a key of {place}", stored), member] for key, member in pairs]}
    if hasattr(value, "dtype") and hasattr(value, "item"):  # a number of NumPy
        return _packed(value.item(), place, stored)
    raise TypeError(
        f"Checkpoints: {place}: expected a tensor, an array, a plain value, or an object with state_dict and "
        f"load_state_dict, got {shown(value)}"
    )


def _has_state(value: Any) -> bool:
    is_object = not isinstance(value, type)
    return is_object and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy, which may not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _misfit(place: str, saved: Any, here: Any) -> MismatchError:
    line = f"{place}: {shown(saved)} in the checkpoint, {shown(here)} here"
    return MismatchError(f"the checkpoint does not fit what the run keeps outside the state: {line}", [line])
