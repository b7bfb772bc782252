"""A state as bytes and back, for the law of resuming.

A stand-in: `purecompose.save(state, path)` and `purecompose.load(path, like=state)` replace it when they are there,
with files, versions and surgery. Nothing is executed on loading: the bytes hold tensors, plain values and strings, and
fill a template.
"""

import dataclasses
import io
from typing import Any

import torch
from torch import Tensor

from purecompose import tree
from purecompose.state import State
from purecompose.time import Timestamp


__all__ = ["SnapshotError", "from_bytes", "to_bytes"]

# Metrics last too, but every step has its own: they are not held against the template.
_FIELDS = ("params", "buffers", "opt_state", "slots", "hparams", "key", "loss")
_PLAIN = (type(None), bool, int, float, str)
_COUNTERS = tuple(field.name for field in dataclasses.fields(Timestamp) if field.name != "run")


class SnapshotError(ValueError):
    """A state that bytes cannot hold, or bytes that do not fit the template."""


def to_bytes(state: State) -> bytes:
    """All of a state that lasts between steps, but for what a template brings: model, loss, optimizer, run length.

    Raises:
        SnapshotError: A leaf that is neither a tensor nor a plain value.
    """
    parts = {
        "leaves": {path: _storable(path, leaf) for path, leaf in _leaves(state).items()},
        "metrics": {name: _storable(f"metrics[{name!r}]", value) for name, value in state.metrics.items()},
        "timestamp": {name: getattr(state.timestamp, name) for name in _COUNTERS},
        "frozen": sorted(state.context.frozen),
    }
    buffer = io.BytesIO()
    torch.save(parts, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes, like: State) -> State:
    """The state that was saved, with the static part of a template.

    Args:
        data: What `to_bytes` made.
        like: A state of the same structure, after `step.init`. Its values play no part; its run's length does, so
            that a run can be prolonged.

    Returns:
        The state, on the template's device.

    Raises:
        SnapshotError: The bytes are no snapshot; or a leaf has no place in the template, is missing, or has another
            shape or dtype: the first one is named.
    """
    try:
        parts = torch.load(io.BytesIO(data), map_location=like.device, weights_only=True)
        saved, metrics, counters, frozen = (parts[name] for name in ("leaves", "metrics", "timestamp", "frozen"))
    except Exception as error:  # torch has many errors for bytes that are not its own
        raise SnapshotError(f"these {len(data)} bytes are no snapshot: {error}") from error
    places = _leaves(like)
    _check(saved, places)
    values, fields = iter([saved[path] for path in places]), {}
    for name in _FIELDS:
        leaves, treespec = tree.flatten(getattr(like, name))
        fields[name] = tree.unflatten(treespec, [next(values) for _ in leaves])
    changes = {"metrics": metrics, "timestamp": like.timestamp.replace(**counters), "frozen": frozenset(frozen)}
    return like.replace(**fields, **changes)


def _leaves(state: State) -> dict[str, Any]:
    """By key path, in the order of flattening."""
    return {
        f"{name}{path}": leaf for name in _FIELDS for path, leaf in tree.leaves_with_paths(getattr(state, name)).items()
    }


def _storable(path: str, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if isinstance(leaf, _PLAIN):
        return leaf
    raise SnapshotError(f"state.{path} is {leaf!r} ({type(leaf).__name__}): only tensors and plain values are saved")


def _check(saved: dict[str, Any], places: dict[str, Any]) -> None:
    for path, place in places.items():
        if path not in saved:
            raise SnapshotError(f"state.{path} is in the template and was not saved")
        came, wanted = _form(saved[path]), _form(place)
        # A new state's loss has the dtype of the weights, which is not always that of the network's own.
        if came != wanted and path != "loss":
            raise SnapshotError(f"state.{path}: {came} was saved, the template has {wanted}")
    for path in saved:
        if path not in places:
            raise SnapshotError(f"state.{path} was saved and has no place in the template")


def _form(leaf: Any) -> str:
    # Without the device: what is loaded goes to the template's, which need not be each leaf's own.
    return tree.describe(leaf, with_device=False) if isinstance(leaf, Tensor) else type(leaf).__name__
