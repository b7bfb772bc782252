"""Checks of factories, when an algorithm is built and at INIT: settings, fields of the batch, the loss."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, losses, random
from purecompose._support.checks import check_number
from purecompose.random.keys import as_rng
from purecompose.schedule import Hparam, Product, Schedule, collect, number


def check_scalar(value: Any, where: str, low: float, high: float = math.inf, *, hint: str) -> None:
    """Do what `check_number` does, also for an hparam or a product, of which the default is checked.

    Schedules are accepted without a check, since they have a value only at a given time.
    """
    if collect(value, Schedule):
        return
    plain = number(value) if isinstance(value, (Hparam, Product)) else value
    check_number(plain, where, low, high, hint=hint)


def check_one_of(value: Any, where: str, choices: Sequence[str]) -> None:
    """Raise a `ValueError` unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{where}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def checked_patterns(patterns: Any, where: str) -> tuple[str, ...]:
    """Require patterns of parameters' names, a sequence of strings and not a single string; return them as a tuple."""
    is_several = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not is_several or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{where}: expected patterns of names, such as ('head.*',), got {patterns!r}")
    return tuple(patterns)


def checked_where(where: Any, where_from: str) -> tuple[str, ...] | None:
    """Require a pattern of names, several of them, or `None` for everything; return them as a tuple."""
    return None if where is None else checked_patterns([where] if isinstance(where, str) else where, where_from)


def given_fields(*, writes: Sequence[str] = (), **fields: batches.Field | None) -> dict[str, batches.Field]:
    """Return the batch fields that are not `None`, by role; for the other roles the state's fields are used."""
    given = {role: field for role, field in fields.items() if field is not None}
    for role, field in given.items():
        batches.check_field(field, role)
        if role in writes:
            check_can_write(field, role)
    return given


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


def check_per_example(loss_fn: Callable[..., Tensor]) -> None:
    """Raise a `TypeError` for a loss that does not return losses per example, as far as this can be detected.

    In addition to `losses.check_loss`, the loss is called on meta tensors (four examples, three classes): if it returns
    a scalar for the reduction "none", it ignores the reduction. A loss that does not accept these shapes passes, and
    raises when it is first used.
    """
    losses.check_loss(loss_fn, per_example=True)
    outputs = torch.empty(4, 3, device="meta")
    for targets in (outputs, torch.empty(4, dtype=torch.int64, device="meta")):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = loss_fn(outputs, targets, reduction="none")
        except Exception:  # noqa: S112 - it may need other shapes, actual values, or weights on another device
            continue
        if isinstance(result, Tensor) and result.ndim == 0:
            raise TypeError(
                f'expected a loss that gives losses per example for reduction="none", got {loss_fn!r}, which takes '
                "the argument and still returns a scalar; let it return one loss for each example"
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
