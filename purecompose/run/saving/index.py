"""The index of a checkpoint: everything except tensors, as readable JSON.

It contains a checksum of itself and of the file with the tensors, so that any changed bit is detected.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from purecompose._support.files import PLAIN, is_count, is_nested_deeper, is_numbers, misfit
from purecompose.errors import CheckpointError, DamagedError
from purecompose.run.saving.leaves import Spec
from purecompose.time import RunLength, Time, Timestamp


FORMAT, VERSION = "purecompose checkpoint", 1
_MOST_NESTED = 64
_COUNTERS = tuple(field.name for field in dataclasses.fields(Timestamp) if field.name != "run")


@dataclass(frozen=True)
class Index:
    """The description of a checkpoint, in plain values."""

    time: dict[str, Any]
    """Counters, and the run's length; see `time_to_plain`."""
    description: dict[str, Any]
    """Description of the static part, for comparison; see `purecompose.run.saving.description`."""
    environment: dict[str, Any]
    """Versions, and everything else outside the state that the bits of a run depend on."""
    tensors: dict[str, Any]
    """Form of each tensor in the file: dtype, shape and, if it is not contiguous, strides."""
    values: dict[str, Any]
    """Leaves that are not tensors: numbers, strings, `None`."""
    files: dict[str, Any]
    """Length in bytes and sha256 of each file."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the last evaluation."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Notes of the loop around the step, such as the number of microbatches that fit into memory."""

    @property
    def batch(self) -> int:
        """Number of batches that the state has been trained on."""
        return self.time["batch"]


def to_json(index: Index) -> str:
    """Return the index as JSON, with its checksum."""
    content = {"format": FORMAT, "version": VERSION, **{name: _plain(value) for name, value in vars(index).items()}}
    return json.dumps({**content, "sha256": _checksum(content)}, indent=1, allow_nan=False) + "\n"


def from_json(text: bytes) -> Index:
    """Return an index from its file's content."""
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"its index is not valid JSON: {error}") from error
    if is_nested_deeper(content, _MOST_NESTED):
        raise DamagedError(f"its index is nested more than {_MOST_NESTED} levels deep, which no index is")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedError("its index is of another program: it does not say that it is a checkpoint of purecompose")
    if isinstance(content.get("version"), int) and content["version"] > VERSION:
        raise CheckpointError(f"its format is version {content['version']}, and this purecompose reads {VERSION}")
    reported = content.pop("sha256", None)
    if reported != _checksum(content):
        raise DamagedError("its index has been changed since it was written (the checksum does not fit)")
    try:
        fields = {field.name: _restored(content.get(field.name)) for field in dataclasses.fields(Index)}
    except ValueError as error:
        raise DamagedError(f"its index has a number that is none: {error}") from error
    description = fields["description"]
    if isinstance(description, dict) and isinstance(description.get("base"), str):
        raise CheckpointError("an earlier purecompose wrote it with parts='trainable': load it with that version")
    for name, form in _FORMS.items():
        if (place := misfit(fields[name], form, name)) is not None:
            raise DamagedError(f"its index has no valid {place}")
    time_from_plain(fields["time"])
    return Index(**fields)


def time_to_plain(timestamp: Timestamp) -> dict[str, Any]:
    """Return a timestamp as plain values."""
    run = timestamp.run
    counters = {name: getattr(timestamp, name) for name in _COUNTERS}
    return {
        **counters,
        "duration": None if run.duration is None else str(run.duration),
        "batches_per_epoch": run.batches_per_epoch,
    }


def time_from_plain(plain: Mapping[str, Any]) -> Timestamp:
    """Return the timestamp from the values of `time_to_plain`."""
    if plain.get("iteration_length") is not None:
        raise CheckpointError("an earlier purecompose wrote it with an iteration_length: continue it with that version")
    try:
        duration = plain["duration"]
        run = RunLength(None if duration is None else Time.of(duration), plain["batches_per_epoch"])
        return Timestamp(**{name: plain[name] for name in _COUNTERS}, run=run)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedError(f"its index has no valid time: {error}") from error


def _is_spec(text: object) -> bool:
    return isinstance(text, str) and bool(Spec.of_text(text))


_TIME = {
    **dict.fromkeys(_COUNTERS, is_count),
    **{"duration": (str, None), "batches_per_epoch": (is_count, None)},
}
_MEMORY = {"has_begun?": bool, "microbatches?": is_count, "data?": {"*": object}, "code?": {"*": str}, "*": object}
_FORMS: dict[str, Any] = {
    "time": _TIME,
    "description": {
        **{"model": [str], "initialised": [str], "frozen": [str], "required?": [str], "eval_mode?": [str]},
        **dict.fromkeys(("algorithms?", "base?", "settings?"), {"*": str}),
        **{"hparams?": {"*": is_numbers}, "microbatches?": (int, str, None), "*": (str, None)},
    },
    "environment": {"*": object},
    "tensors": {"*": _is_spec},
    "values": {"*": PLAIN},
    "files": {"*": {"bytes": is_count, "sha256": str, "rows?": {"*": [is_count]}}},
    "metrics": {"*": (is_numbers, *PLAIN)},
    "memory": {**_MEMORY, "left?": {"event": ["BATCH_END", "EPOCH_END"].__contains__, "before": _TIME}},
}
"""What each part of an index looks like. What is only shown or compared as a whole may be any plain value."""


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent; numbers that are not finite become `{"float": "nan"}` etc."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, (list, tuple)) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        is_number = value.keys() == {"float"} and isinstance(value["float"], str)
        return float(value["float"]) if is_number else {name: _restored(member) for name, member in value.items()}
    return [_restored(member) for member in value] if isinstance(value, list) else value
