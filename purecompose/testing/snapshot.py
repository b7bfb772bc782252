"""Conversion of a state to bytes and back, for the law of resuming: the content of a checkpoint, without the disk.

Loading executes no code: the bytes contain tensors, plain values and strings, which fill a template.
"""

import struct

from purecompose.core.state import State
from purecompose.errors import CheckpointError
from purecompose.run.saving.checkpoint import assembled, snapshot
from purecompose.run.saving.fitting import template
from purecompose.run.saving.index import from_json, to_json
from purecompose.run.saving.leaves import Spec, mismatches, stored
from purecompose.run.saving.tensors import library


_LENGTH = struct.Struct("<Q")


class SnapshotError(ValueError):
    """A state that cannot be converted to bytes, or bytes that do not fit the template."""


def to_bytes(state: State) -> bytes:
    """Return everything in a state that persists between steps."""
    try:
        taken = snapshot(state)
    except (TypeError, CheckpointError) as error:
        raise SnapshotError(str(error)) from error
    index = to_json(taken.index).encode()
    # Cloned, because tensors that share memory are separate tensors in the file.
    tensors = {name: stored(tensor).clone() for name, tensor in taken.tensors.items()}
    return _LENGTH.pack(len(index)) + index + library().torch.save(tensors)


def from_bytes(data: bytes, like: State) -> State:
    """Return the state that was saved, with the static part of a template.

    Args:
        data: Bytes from `to_bytes`.
        like: A state of the same structure, after `step.init`. Its values are ignored, but its run's length is used, so
            that a run can be prolonged.

    Returns:
        The state, on the template's device.
    """
    package = library()
    try:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size])
        index = from_json(data[_LENGTH.size :][:length])
        tensors = package.torch.load(data[_LENGTH.size + length :])
        specs = {name: Spec.of_text(text) for name, text in index.tensors.items()}
    except (CheckpointError, package.SafetensorError, struct.error, ValueError) as error:
        raise SnapshotError(f"these {len(data)} bytes are not a snapshot: {error}") from error
    misfits = mismatches(template(index, like), specs, index.values)
    if misfits:
        raise SnapshotError("; ".join(misfits))
    state = assembled(index, tensors, like)
    return state.replace(timestamp=state.timestamp.replace(run=like.timestamp.run))
