"""Parts that many methods have: declared settings, with their checks, a check of the loss, and reported numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, losses, random
from purecompose.core.state import State
from purecompose.random.keys import as_rng
from purecompose.schedule.declared import Within
from purecompose.time import Time, TimeLike, TimeUnit
from purecompose.time.timestamp import checked_interval
from purecompose.time.units import named_point


def checked_patterns(patterns: Any, where: str) -> tuple[str, ...]:
    """Require patterns of parameters' names, a sequence of strings and not a single string; return them as a tuple."""
    is_several = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not is_several or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{where}: expected patterns of names, such as ('head.*',), got {patterns!r}")
    return tuple(patterns)


def checked_where(where: Any, where_from: str) -> tuple[str, ...] | None:
    """Require a pattern of names, several of them, or `None` for everything; return them as a tuple."""
    return None if where is None else checked_patterns([where] if isinstance(where, str) else where, where_from)


def checked_field(field: batches.Field | None, role: str) -> batches.Field | None:
    """Require a valid field of the batch, or `None` for the state's own field."""
    if field is not None:
        batches.check_field(field, role)
    return field


def checked_written_field(field: Any, role: str) -> Any:
    """Require a field that can be written, also in a list of fields, or `None` for the state's own field."""
    if isinstance(checked_field(field, role), list):
        return [checked_written_field(part, role) for part in field]
    if callable(field):
        raise TypeError(
            f"{role}={field!r} is read-only, but this member of the batch is replaced: expected an index, a name, or "
            "a pair (getter, setter), with setter(batch, value) -> new batch"
        )
    return field


def checked_period(period: Any, where: str) -> Time:
    """Require a positive time in a unit that can be counted in batches."""
    time = checked_interval(period, where, TimeUnit.BATCH)
    if time.unit not in (TimeUnit.BATCH, TimeUnit.UPDATE, TimeUnit.EPOCH, TimeUnit.DURATION):
        raise ValueError(
            f"{where}={str(time)!r}: expected batches (ba), updates (up), epochs (ep) or a share of the run (dur)"
        )
    return time


Patterns: TypeAlias = Annotated[Sequence[str], checked_patterns]
Where: TypeAlias = Annotated[str | Sequence[str] | None, checked_where]
Field: TypeAlias = Annotated[batches.Field | None, checked_field]
WrittenField: TypeAlias = Annotated[batches.Field | None, checked_written_field]
Point: TypeAlias = Annotated[TimeLike | float, named_point]
Period: TypeAlias = Annotated[TimeLike, checked_period]
Elapsed: TypeAlias = Annotated[float, Within(0, hint="it is the share of the run that is over")]


def chosen_fields(
    state: State, input_field: batches.Field | None, target_field: batches.Field | None
) -> tuple[batches.Field | None, batches.Field | None]:
    """Return a method's fields of input and target, by default those of the state."""
    context = state.context
    return (
        context.input_field if input_field is None else input_field,
        context.target_field if target_field is None else target_field,
    )


def check_reads_targets(name: str, loss_fn: Callable[..., Tensor], target_field: batches.Field | None) -> None:
    """Raise a `TypeError` if the loss reads no changed targets, as if the model computes it, or there are none."""
    if not getattr(loss_fn, "reads_targets", True):
        raise TypeError(f"{name}: the loss {loss_fn!r} reads no targets, which {name} would change: leave out {name}")
    if isinstance(loss_fn, losses.ModelLoss):
        raise TypeError(
            f"{name}: expected a loss of outputs and targets, got {loss_fn!r}, which the model computes "
            f"from its own labels, so that {name} would change nothing; give State.create a loss such as "
            f"losses.cross_entropy, or leave out {name}"
        )
    if target_field is None:
        raise TypeError(
            f"{name}: expected a batch with targets, but the state has target_field=None: give the field of the "
            f"targets, State.create(..., target_field=...), or leave out {name}"
        )


def needed_rng(key: Tensor | random.Rng | None, core: str, when: str) -> random.Rng:
    """Return the key as an `Rng`, or raise a `TypeError` that explains when a key is needed."""
    if key is None:
        raise TypeError(f"{core}: expected a key {when}, got None")
    return as_rng(key, core)


def reported(state: State, name: str, numbers: Mapping[str, float]) -> State:
    """Add host numbers to the state's metrics as `f"{name}/{key}"`, 0-d float32, on the state's device."""
    # torch.full, because a copy from the host would wait for a GPU.
    made = {
        f"{name}/{key}": torch.full((), value, dtype=torch.float32, device=state.device)
        for key, value in numbers.items()
    }
    return state.replace(metrics={**state.metrics, **made})
