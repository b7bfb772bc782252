"""RMSprop: steps scaled by a running average of the gradient's square."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from purecompose._support.checks import suggests_keywords
from purecompose.optim.base import ByGroup, Constant, GivenGroups, Rate, Share, Value, read
from purecompose.optim.decay import decayed
from purecompose.optim.lists import add, clamp_min, divide, lerp, multiply, root_plus
from purecompose.schedule import Scalar


@suggests_keywords(learning_rate="lr=0.1")
def rmsprop(
    lr: Scalar = 1e-2,
    *,
    alpha: Scalar = 0.99,
    eps: float = 1e-8,
    weight_decay: Scalar = 0.0,
    momentum: Scalar = 0.0,
    centered: bool = False,
    groups: GivenGroups = (),
) -> RMSprop:
    """Return RMSprop, equal to `torch.optim.RMSprop`.

    With g the gradient plus weight_decay * p::

        v <- alpha * v + (1 - alpha) * g^2
        m <- alpha * m + (1 - alpha) * g              (centered only; else m = 0)
        d = g / (sqrt(v - m^2) + eps)
        b <- momentum * b + d                         (without momentum b = d)
        p <- p - lr * b

    The variance v - m^2 of a gradient that never changes approaches 0, and may be rounded to a negative number: it then
    counts as 0, while torch returns NaN. Gradients flow through `update`; the root's derivative is taken as 0 at 0.

    Args:
        lr: The learning rate, >= 0.
        alpha: Decay rate of the averages, in [0, 1).
        eps: Added to the root; a number, >= 0. Float16 parameters need about 1e-4: the default rounds to 0 there.
        weight_decay: The L2 penalty's factor, >= 0, added to the gradient.
        momentum: The factor of the previous direction, >= 0.
        centered: Divide by the gradient's deviation from its mean instead of its magnitude.
        groups: Options for parameters by a pattern of their names (`fnmatch`, first match wins), in place of
            the ones above: `{"*.bias": {"weight_decay": 0.0}}`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"square_avg": {name: tensor}}`, if centered also `"grad_avg"`, and
        with momentum also `"momentum"`, all of the parameters' shapes and dtypes.

    Raises:
        TypeError: A setting is of the wrong kind, or a group has an unknown option.
        ValueError: A setting is out of range.

    Example:
        >>> import torch
        >>> optimizer = rmsprop(0.1, alpha=0.75)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, opt_state = optimizer.update({"w": torch.tensor([3.0, -0.5])}, optimizer.init(params), params)
        >>> params["w"]
        tensor([0.8000, 2.2000])

    References:
        Tieleman and Hinton, Lecture 6.5: divide the gradient by a running average of its recent magnitude, 2012.
        Graves, Generating sequences with recurrent neural networks, 2013, arXiv:1308.0850 (centered).
    """
    return RMSprop(lr, alpha, eps, weight_decay, momentum, centered, groups)


@dataclasses.dataclass(frozen=True, repr=False)
class RMSprop(ByGroup):
    """Optimizer returned by `rmsprop`; see there."""

    lr: Rate
    alpha: Share
    eps: Constant
    weight_decay: Rate
    momentum: Rate
    centered: bool
    groups: Any = ()
    is_elementwise = True

    @property
    def slots(self) -> tuple[str, ...]:
        mean = ("grad_avg",) if self.centered else ()
        return ("square_avg", *mean, *(("momentum",) if self.momentum != 0.0 else ()))

    def move(
        self, grads: list[Tensor], params: list[Tensor], slots: dict[str, list[Tensor]], value: Value
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        grads, params = decayed("coupled", grads, params, self.weight_decay, self.lr, value)
        weight = 1 - read(self.alpha, value)
        squares = lerp(slots["square_avg"], multiply(grads, grads), weight)
        new_slots = {"square_avg": squares}
        if self.centered:
            means = new_slots["grad_avg"] = lerp(slots["grad_avg"], grads, weight)
            squares = clamp_min(add(squares, multiply(means, means), -1.0), 0.0)
        moves = divide(grads, root_plus(squares, self.eps))
        if self.momentum != 0.0:
            moves = new_slots["momentum"] = add(moves, slots["momentum"], read(self.momentum, value))
        return add(params, moves, -read(self.lr, value)), new_slots
