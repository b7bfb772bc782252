"""Adam and its relatives with weight decay: steps scaled by running averages of the gradient and of its square."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from purecompose._support.checks import suggests_keywords
from purecompose.optim.base import Betas, ByGroup, Constant, GivenGroups, Rate, Value, read, wide_dtype
from purecompose.optim.decay import Decay, decayed, shrinkage
from purecompose.optim.fused import adam as fused_adam, can_fuse
from purecompose.optim.lists import increment, lerp, maximum, multiply, root_plus, subtract_ratio, unbound
from purecompose.schedule import Scalar


@suggests_keywords(learning_rate="lr=0.001")
def adam(
    lr: Scalar = 1e-3,
    *,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Scalar = 0.0,
    amsgrad: bool = False,
    groups: GivenGroups = (),
) -> Adam:
    """Return Adam, equal to `torch.optim.Adam`.

    With g the gradient plus weight_decay * p, and t the number of the parameter's update, counted from 1::

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        p <- p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Each parameter counts its own updates, so that two players who share an optimizer, and parameters that are
    thawed late, get the same bias correction as with separate optimizers.

    Gradients flow through `update`, and stay finite where a gradient has been zero from the start (the
    derivative of sqrt(v) is taken as 0 at v = 0).

    Args:
        lr: The learning rate, >= 0.
        betas: Decay rates of the two averages, each in [0, 1).
        eps: Added to the root; a number, >= 0. Float16 parameters need about 1e-4: the default rounds to 0
            there, which results in 0 / 0 where a gradient is 0 (as in torch).
        weight_decay: The L2 penalty's factor, >= 0, added to the gradient.
        amsgrad: Divide by the root of the largest v so far.
        groups: Options for parameters by a pattern of their names (`fnmatch`, first match wins), in place of
            the ones above: `{"*.bias": {"weight_decay": 0.0}}`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"step": {name: 0-d float32}, "exp_avg": {name: tensor},
        "exp_avg_sq": {name: tensor}}`, with amsgrad also `"max_exp_avg_sq"`; the tensors have the parameters'
        shapes and dtypes. The parameters of one group have to be on one device.

    Raises:
        TypeError: A setting is of the wrong kind, or a group has an unknown option.
        ValueError: A setting is out of range.

    Example:
        >>> optimizer = adam(0.1)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> opt_state = optimizer.init(params)
        >>> params, opt_state = optimizer.update({"w": torch.tensor([3.0, -0.5])}, opt_state, params)
        >>> params["w"]
        tensor([0.9000, 2.1000])

    References:
        Kingma and Ba, Adam: a method for stochastic optimization, 2015, arXiv:1412.6980.
        Reddi, Kale, Kumar, On the convergence of Adam and beyond, 2018, arXiv:1904.09237 (amsgrad).
    """
    return Adam(lr, betas, eps, weight_decay, amsgrad, "coupled", groups)


@suggests_keywords(learning_rate="lr=0.001")
def adamw(
    lr: Scalar = 1e-3,
    *,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Scalar = 1e-2,
    amsgrad: bool = False,
    groups: GivenGroups = (),
) -> Adam:
    """Return Adam with decoupled weight decay, equal to `torch.optim.AdamW`.

    The decay does not enter the gradient: p <- p - lr * weight_decay * p, then Adam's move. It follows the
    learning rate and its schedule. Arguments, state and errors are the same as for `adam`.

    Args:
        lr, betas, eps, weight_decay, amsgrad, groups: As for `adam`.

    Example:
        >>> params = {"w": torch.tensor([1.0])}
        >>> optimizer = adamw(0.1, weight_decay=0.5)
        >>> optimizer.update({"w": torch.tensor([0.0])}, optimizer.init(params), params)[0]["w"]
        tensor([0.9500])

    References:
        Loshchilov and Hutter, Decoupled weight decay regularization, 2019, arXiv:1711.05101.
    """
    return Adam(lr, betas, eps, weight_decay, amsgrad, "by rate", groups)


@suggests_keywords(learning_rate="lr=0.001")
def decoupled_adamw(
    lr: Scalar = 1e-3,
    *,
    betas: tuple[Scalar, Scalar] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: Scalar = 1e-5,
    amsgrad: bool = False,
    groups: GivenGroups = (),
) -> Adam:
    """Return Adam with weight decay that is decoupled from the learning rate, too, as in Composer's DecoupledAdamW.

    p <- p - s * weight_decay * p, then Adam's move. The multiplier s is the product of the schedules in `lr`: with
    lr = 0.1 * cosine() it is the cosine's value, independent of the 0.1 or of the value of an hparam in its place, and
    1 if `lr` has no schedule. So changing the learning rate does not affect the decay; a recipe for `adamw` is
    converted by weight_decay * lr: `adamw(1e-3, weight_decay=1e-2)` is `decoupled_adamw(1e-3, weight_decay=1e-5)`.
    Without a schedule a weight that gets zero gradients halves in 0.7 / weight_decay steps.

    Arguments, state and errors are the same as for `adam`.

    Args:
        lr, betas, eps, weight_decay, amsgrad, groups: As for `adam`.

    Example:
        >>> params = {"w": torch.tensor([1.0])}
        >>> optimizer = decoupled_adamw(0.1, weight_decay=0.0625)
        >>> optimizer.update({"w": torch.tensor([0.0])}, optimizer.init(params), params)[0]["w"]
        tensor([0.9375])

    References:
        Loshchilov and Hutter, Decoupled weight decay regularization, 2019, arXiv:1711.05101.
    """
    return Adam(lr, betas, eps, weight_decay, amsgrad, "by schedule", groups)


@dataclasses.dataclass(frozen=True, repr=False)
class Adam(ByGroup):
    """Optimizer returned by `adam`, `adamw` and `decoupled_adamw`; see there."""

    lr: Rate
    betas: Betas
    eps: Constant
    weight_decay: Rate
    amsgrad: bool
    decay: Decay = dataclasses.field(repr=False)
    groups: Any = ()
    is_elementwise = True

    @property
    def called(self) -> str:
        return {"coupled": "adam", "by rate": "adamw", "by schedule": "decoupled_adamw"}[self.decay]

    @property
    def slots(self) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    def move(
        self, grads: list[Tensor], params: list[Tensor], slots: dict[str, list[Tensor]], value: Value
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        lr, beta1, beta2 = (read(scalar, value) for scalar in (self.lr, *self.betas))
        if isinstance(beta1, float) and isinstance(beta2, float) and can_fuse(params):
            if self.decay == "coupled":
                grads, _ = decayed("coupled", grads, params, self.weight_decay, self.lr, value)
            decoupled = shrinkage(self.decay, self.weight_decay, self.lr, value)
            return fused_adam(params, grads, slots, lr=lr, shrinkage=decoupled, betas=(beta1, beta2), eps=self.eps)

        grads, params = decayed(self.decay, grads, params, self.weight_decay, self.lr, value)
        steps = increment(slots["step"])
        averages = lerp(slots["exp_avg"], grads, 1 - beta1)
        squares = lerp(slots["exp_avg_sq"], multiply(grads, grads), 1 - beta2)
        new_slots = {"step": steps, "exp_avg": averages, "exp_avg_sq": squares}
        if self.amsgrad:
            squares = new_slots["max_exp_avg_sq"] = maximum(slots["max_exp_avg_sq"], squares)

        count = torch.stack(steps).to(wide_dtype(params))
        # lr * (m / c1) / (sqrt(v / c2) + eps), rewritten so that both corrections are computed on scalars:
        # (lr * root / c1) * m / (sqrt(v) + eps * root), where root = sqrt(c2).
        root = _correction(beta2, count).sqrt()
        rates = unbound(root * lr / _correction(beta1, count))
        floors = unbound(root * self.eps)
        return subtract_ratio(params, multiply(averages, rates), root_plus(squares, floors)), new_slots


def _correction(beta: float | Tensor, count: Tensor) -> Tensor:
    """Return 1 - beta^count, computed by expm1, since 1 - 0.999 in float32 loses half of its digits."""
    if isinstance(beta, Tensor):
        return -torch.expm1(count * beta.to(count.dtype).log())
    return -torch.expm1(count * (math.log(beta) if beta > 0 else -math.inf))
