"""Declared settings that several methods have, and checks at INIT: patterns of names, fields of the batch, the loss."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

from torch import Tensor

from purecompose import batch as batches, losses, random
from purecompose.core.state import State
from purecompose.random.keys import as_rng


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


def checked_written_field(field: batches.Field | None, role: str) -> batches.Field | None:
    """Require a field that can be written, or `None` for the state's own field, which is checked at INIT."""
    if checked_field(field, role) is not None:
        check_can_write(field, role)
    return field


Patterns: TypeAlias = Annotated[Sequence[str], checked_patterns]
Where: TypeAlias = Annotated[str | Sequence[str] | None, checked_where]
Field: TypeAlias = Annotated[batches.Field | None, checked_field]
WrittenField: TypeAlias = Annotated[batches.Field | None, checked_written_field]


def chosen_fields(
    state: State, input_field: batches.Field | None, target_field: batches.Field | None
) -> tuple[batches.Field | None, batches.Field | None]:
    """Return a method's fields of input and target, by default those of the state."""
    context = state.context
    return (
        context.input_field if input_field is None else input_field,
        context.target_field if target_field is None else target_field,
    )


def check_can_write(field: batches.Field | None, role: str) -> None:
    """Raise a `TypeError` for no field, or a getter without a setter, also in a list of fields."""
    if field is None:
        raise TypeError(
            f"{role}=None: expected a field, since this member of the batch is replaced; give State.create one, or "
            "leave the method out"
        )
    if isinstance(field, list):
        for part in field:
            check_can_write(part, role)
    elif callable(field):
        raise TypeError(
            f"{role}={field!r} is read-only, but this member of the batch is replaced: expected an index, a name, or "
            "a pair (getter, setter), with setter(batch, value) -> new batch"
        )


def check_reads_targets(name: str, loss_fn: Callable[..., Tensor]) -> None:
    """Raise a `TypeError` for a loss that the model computes itself: changed targets would not reach it."""
    if isinstance(loss_fn, losses.ModelLoss):
        raise TypeError(
            f"{name}: expected a loss of outputs and targets, got {loss_fn!r}, which the model computes "
            f"from its own labels, so that {name} would change nothing; give State.create a loss such as "
            f"losses.cross_entropy, or leave out {name}"
        )


def needed_rng(key: Tensor | random.Rng | None, core: str, when: str) -> random.Rng:
    """Return the key as an `Rng`, or raise a `TypeError` that explains when a key is needed."""
    if key is None:
        raise TypeError(f"{core}: expected a key {when}, got None")
    return as_rng(key, core)
