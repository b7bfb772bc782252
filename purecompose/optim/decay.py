"""Weight decay: how it enters an update, and its factor."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from torch import Tensor

from purecompose._support.messages import warn
from purecompose.optim.base import Value, read
from purecompose.optim.checks import known_part
from purecompose.optim.lists import add
from purecompose.schedule import Scalar, Schedule
from purecompose.schedule.scalar import factors_of


Decay: TypeAlias = Literal["coupled", "by rate", "by schedule"]
"""How the decay is applied: "coupled" adds it to the gradient; "by rate" subtracts it from the parameter, times the
learning rate; "by schedule" does so times only the learning rate's schedule."""


def decayed(
    how: Decay,
    grads: list[Tensor],
    params: list[Tensor],
    weight_decay: Scalar,
    lr: Scalar,
    value: Value,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients and parameters with the decay applied; a decay that is the number 0 costs nothing.

    A parameter's decay is computed as p - factor * p rather than (1 - factor) * p: in float32, 1 - 1e-5 loses two
    of the factor's digits.

    Example:
        >>> import torch
        >>> from purecompose.schedule import number
        >>> decayed("by rate", [torch.ones(1)], [torch.full((1,), 4.0)], 0.5, 0.5, number)
        ([tensor([1.])], [tensor([3.])])
    """
    if weight_decay == 0.0:
        return grads, params
    if how == "coupled":
        return add(grads, params, read(weight_decay, value)), params
    return grads, add(params, params, -shrinkage(how, weight_decay, lr, value))


def shrinkage(how: Decay, weight_decay: Scalar, lr: Scalar, value: Value) -> float | Tensor:
    """Return the part of a parameter that decoupled decay subtracts; 0 if the decay is coupled."""
    if how == "coupled" or weight_decay == 0.0:
        return 0.0
    return read(weight_decay, value) * (read(lr, value) if how == "by rate" else progress(lr, value))


def progress(scalar: Scalar, value: Value) -> float | Tensor:
    """Return the product of a scalar's schedules, or 1 without schedules.

    Example:
        >>> from purecompose.schedule import cosine, hparam
        >>> progress(0.1 * cosine() * hparam("lr", 3.0), lambda schedule: 0.25)
        0.25
    """
    return math.prod((read(one, value) for one in factors_of(scalar) if isinstance(one, Schedule)), start=1.0)


def warn_if_strong(name: str, coupled: str, weight_decay: Scalar, lr: Scalar) -> None:
    """Warn if a decay by schedule is far too strong, such as a number from a recipe for another optimizer.

    Composer warns from 1e-3 on, which is right for a learning rate of 2 and far too much for one of 1e-3; the ratio
    of decay and learning rate reveals the mistake.

    Args:
        name: The optimizer's name.
        coupled: The name of its counterpart whose decay is multiplied by the learning rate.
        weight_decay: The optimizer's decay.
        lr: The optimizer's learning rate.
    """
    decay, rate = known_part(weight_decay), known_part(lr)
    if decay > rate > 0:
        warn(
            f"{name}: weight_decay={decay:g} takes {100 * decay:g} % off every weight in every step, as "
            f"{coupled}(lr={rate:g}, weight_decay={decay / rate:g}) would: here it is not multiplied by the learning "
            f"rate. For the effect of weight_decay={decay:g} in {coupled}, set weight_decay={decay * rate:g}"
        )
