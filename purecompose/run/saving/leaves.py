"""What a checkpoint holds, as named tensors and plain values.

These are the leaves of a state, and what a run keeps outside the state, such as an environment: of the latter,
containers and plain values go into the checkpoint's index as JSON, with references to the tensors in its file.
"""

import base64
import itertools
import operator
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.device import local, place_of, placed, span_of
from purecompose._support.specs import shown
from purecompose.core.context import SealedTime, Static
from purecompose.core.state import State
from purecompose.core.values import NO_TEMPORARY
from purecompose.errors import CheckpointError, DamagedError, MismatchError


EXTRA, POSITION = "extra", "position"
"""What is packed: what the user gives, and the position of the data; names in the index's memory, and before the names
of their tensors."""

_PLAIN = (bool, int, float, str, type(None))
_TENSOR, _ARRAY, _TUPLE, _MAP, _BYTES = "!tensor", "!array", "!tuple", "!dict", "!bytes"


def check_extra(extra: Any) -> None:
    """Raise if what a run keeps outside the state cannot be saved or restored."""
    for one in () if extra is None else extra.values() if isinstance(extra, dict) else (extra,):
        if not _has_state(one):
            raise TypeError(
                "Checkpoints: extra: expected an object with state_dict and load_state_dict, or a dict of such "
                f"objects, got {shown(one)}"
            )
    pack(extra, EXTRA)


def is_extra(name: str) -> bool:
    """Return whether a tensor's name in a checkpoint is one that `pack` gives."""
    return name.startswith((f"{EXTRA}/", f"{POSITION}/"))


def pack(value: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Return values for JSON, and copies of the tensors and arrays by their names in the checkpoint."""
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


def restore(extra: Any, saved: Any) -> None:
    """Load saved values into an object, or into each of a dict."""
    if not isinstance(extra, dict):
        extra.load_state_dict(saved)
        return
    names = [*saved] if isinstance(saved, dict) else [type(saved).__name__]
    if {*names} != {*extra}:
        line = f"extra: {', '.join(map(repr, names))} in the checkpoint, {', '.join(map(repr, extra))} here"
        raise MismatchError(f"the checkpoint does not fit what the run keeps outside the state: {line}", [line])
    for name, one in extra.items():
        one.load_state_dict(saved[name])


def _packed(value: Any, place: str, stored: Callable[[Tensor], str]) -> Any:
    if _has_state(value):
        return _packed(value.state_dict(), f"{place}.state_dict()", stored)
    if isinstance(value, Tensor):
        return {_TENSOR: stored(value)}
    numpy = sys.modules.get("numpy")  # which may not be installed
    if numpy is not None and isinstance(value, numpy.ndarray):
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


class Leaves(NamedTuple):
    """A state's leaves by key path, such as `params['0.weight']`."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    """Numbers, strings and `None`."""


def leaves_of(state: State) -> Leaves:
    """Return the leaves of a state between steps."""
    if isinstance(state.static.timestamp, SealedTime):
        raise CheckpointError("the state stands inside a step: save what the step returns")
    found = {path.removeprefix("."): leaf for path, leaf in tree.leaves_with_paths(_lasting(state)).items()}
    # Metrics are stored by name, because a template does not know which ones a run has.
    found |= {f"{_METRICS}{name}": value for name, value in state.metrics.items()}
    tensors, values = {}, {}
    for name, leaf in found.items():
        if isinstance(leaf, Tensor):
            tensors[name] = leaf.detach()
        elif isinstance(leaf, _PLAIN):
            values[name] = leaf
        else:
            raise TypeError(
                f"state.{name} holds {type(leaf).__name__}, which no checkpoint can: keep tensors and plain numbers "
                "in slots, or register the class as a node of the tree (purecompose.tree.register_node)"
            )
    return Leaves(tensors, values)


_LISTS = ("shape", "stride")
_NUMBERS = r"([0-9]{1,18}(, [0-9]{1,18})*)?"
_SPEC = re.compile(rf"(?P<dtype>\w+)\[(?P<shape>{_NUMBERS})\]( by \[(?P<stride>{_NUMBERS})\])?")


class Spec(NamedTuple):
    """The form of a saved tensor."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """Strides; `None` for those of a contiguous tensor."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + ("" if self.stride is None else f" by {list(self.stride)}")

    @staticmethod
    def of_text(text: str) -> "Spec":
        """Return the spec from its text, the inverse of `str`, such as "float32[2, 3] by [1, 2]"."""
        found = _SPEC.fullmatch(text) if isinstance(text, str) else None
        if found is None or not isinstance(getattr(torch, found["dtype"], None), torch.dtype):
            raise DamagedError(f"its index describes a tensor as {text!r}")
        numbers = {name: tuple(map(int, (found[name] or "").split(", "))) if found[name] else () for name in _LISTS}
        stride = None if found["stride"] is None else numbers["stride"]
        if stride is not None and not _is_dense(numbers["shape"], stride):
            raise DamagedError(f"its index describes a tensor with gaps or overlaps: {text!r}")
        return Spec(found["dtype"], numbers["shape"], stride)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor's elements fill its memory, each in a place of its own.

    The stride of a dimension of size 1 may be any number: `x[:, :1]` keeps that of `x`.
    """
    steps = sorted((step, one) for step, one in zip(stride, shape, strict=False) if one != 1)
    places = itertools.accumulate((one for _, one in steps), operator.mul, initial=1)
    is_filled = 0 in shape or all(step == place for (step, _), place in zip(steps, places, strict=False))
    return len(shape) == len(stride) and is_filled


def spec_of(tensor: Tensor) -> Spec:
    """Return the form in which a tensor is restored: dense, with the same order of dimensions in memory."""
    if (place := place_of(tensor)) is not None:
        tensor = torch.empty_strided(place.shape, place.stride, dtype=tensor.dtype, device="meta")
    stride = torch.empty_like(tensor, device="meta").stride()
    is_usual = stride == torch.empty(tensor.shape, device="meta").stride()
    return Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), None if is_usual else tuple(stride))


def stored(tensor: Tensor) -> Tensor:
    """Return the tensor in the form of the file: on the CPU, contiguous, complex numbers as pairs."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"a checkpoint holds dense tensors, got {tensor.layout}")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()


def mismatches(
    like: State, tensors: Mapping[str, Spec], values: Mapping[str, Any], elsewhere: Collection[str] = ()
) -> list[str]:
    """Return a line for each saved leaf that does not fit a template; those `elsewhere` are not loaded on purpose."""
    wanted, found = leaves_of(_lasting(like)), {*tensors, *values}
    lines = []
    for name, tensor in wanted.tensors.items():
        if (_is_runs_own(name) or name in elsewhere) and name not in found:
            continue
        spec, ours = tensors.get(name), spec_of(tensor)
        if name not in found:
            lines.append(f"state.{name}: {ours} here, not in the checkpoint")
        elif spec is None or not _fits(name, spec, ours):
            saved = "a plain value" if spec is None else spec
            lines.append(f"state.{name}: {saved} in the checkpoint, {ours} here")
    for name in wanted.values:
        if name not in values and name not in elsewhere:
            lines.append(f"state.{name}: a plain value here, {'a tensor' if name in tensors else 'nothing'} there")
    known = {*wanted.tensors, *wanted.values}
    unknown = [name for name in (*tensors, *values) if name not in known]
    unknown = [name for name in unknown if not (_is_metric(name) or _is_runs_own(name) or is_extra(name))]
    return lines + [f"state.{name}: in the checkpoint, not here" for name in unknown]


def filled(
    like: State, static: Static, tensors: Mapping[str, Tensor], specs: Mapping[str, Spec], values: Mapping[str, Any]
) -> State:
    """Return the template with the saved leaves; leaves that do not fit keep the template's value."""
    # Metrics in the order of the index: the order in the file is different, and is part of a tree's structure.
    found = {name: restored_tensor(tensors[name], specs[name], like.device) for name in specs if _is_metric(name)}
    found |= {name: value for name, value in values.items() if _is_metric(name)}
    metrics = {name.removeprefix(_METRICS): value for name, value in found.items()}
    template = _lasting(like)
    leaves, treespec = tree.flatten(template)
    new = []
    for path, leaf in zip(tree.leaves_with_paths(template), leaves, strict=True):
        name = path.removeprefix(".")
        if isinstance(leaf, Tensor):
            spec, ours = specs.get(name), spec_of(leaf)
            fits = spec is not None and _fits(name, spec, ours)
            new.append(_restored(tensors, name, spec, leaf) if fits and spec is not None else leaf)
        else:
            new.append(values.get(name, leaf))
    return tree.unflatten(treespec, new).replace(static=static, metrics=metrics)


_METRICS = "metrics/"


def _is_runs_own(name: str) -> bool:
    """Return whether a leaf belongs to a stopping rule, which a resumed run may add or leave out."""
    return name.startswith("slots['.")


def _is_metric(name: str) -> bool:
    return name.startswith(_METRICS)


def _fits(name: str, saved: Spec, ours: Spec) -> bool:
    # The loss may differ in dtype: a new state's has the dtype of the weights, the network's may have another.
    return saved.shape == ours.shape and (saved.dtype == ours.dtype or name == "loss")


def _lasting(state: State) -> State:
    """Return the state without the fields that end with the step, and without metrics."""
    temporary = {name: None for name in NO_TEMPORARY if getattr(state, name) is not None}
    return state.replace(metrics={}, **temporary)


def _restored(tensors: Mapping[str, Tensor], name: str, spec: Spec, like: Tensor) -> Tensor:
    """Return a saved tensor, divided like that of a template."""
    place = place_of(like)
    if place is None:
        return restored_tensor(tensors[name], spec, like.device)
    start, stop = span_of(place)
    read_rows = getattr(tensors, "rows", None)  # those in files
    rows = tensors[name][start:stop] if read_rows is None else read_rows(name, start, stop)
    own = spec._replace(shape=(stop - start, *spec.shape[1:]), stride=tuple(local(like).stride()))
    return placed(restored_tensor(rows, own, like.device), place)


def restored_tensor(saved: Tensor, spec: Spec, device: torch.device | str = "cpu") -> Tensor:
    """Return a copy of a tensor from the form of the file, the inverse of `stored`.

    Last bits of a product can depend on where its factors begin: at multiples of 8 bytes in a file, of 64 in torch.
    """
    dtype = getattr(torch, spec.dtype)
    form = (dtype.to_real(), (*spec.shape, 2)) if dtype.is_complex else (dtype, spec.shape)
    if (saved.dtype, tuple(saved.shape)) != form:
        raise DamagedError(f"a tensor is {tree.describe(saved)} in the file and {spec} in the index")
    value = torch.view_as_complex(saved) if dtype.is_complex else saved
    stride = value.stride() if spec.stride is None else spec.stride  # the file's tensors are contiguous
    return torch.empty_strided(spec.shape, stride, dtype=dtype, device=device).copy_(value)
