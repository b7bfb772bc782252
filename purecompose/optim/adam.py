"""Adam, its relatives with weight decay, and RMSprop: steps scaled by a running average of the gradient's square.

Where torch has a fused kernel, Adam's update is one pass over each tensor, without temporary ones. In a traced step the
update of many tensors is one operation, `purecompose::adam`, or `purecompose::adam_`, which writes into donated buffers
(`transforms/compilation/updates.py`).
"""

# torch.optim itself is built on the fused kernels, but torch exports them under private names.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from purecompose._support.internals import is_fake
from purecompose._support.specs import suggests_keywords
from purecompose.optim.base import (
    Betas,
    ByGroup,
    Constant,
    Decay,
    GivenGroups,
    Rate,
    Share,
    Value,
    decayed,
    read,
    shrinkage,
    wide_dtype,
)
from purecompose.optim.lists import (
    Moved,
    Slots,
    add,
    alike,
    clamp_min,
    copies,
    divide,
    increment,
    is_plain,
    lerp,
    maximum,
    multiply,
    root_plus,
    subtract_ratio,
    unbound,
)
from purecompose.schedule import Scalar


@suggests_keywords
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

    Each parameter counts its own updates. Gradients flow through `update`, and stay finite where a gradient has been
    zero from the start (the derivative of sqrt(v) is taken as 0 at v = 0).

    Args:
        lr: The learning rate, >= 0.
        betas: Decay rates of the two averages, each in [0, 1).
        eps: Added to the root; a number, >= 0. Float16 parameters need about 1e-4: the default rounds to 0 there.
        weight_decay: The L2 penalty's factor, >= 0, added to the gradient.
        amsgrad: Divide by the root of the largest v so far.
        groups: Options for parameters by a pattern of their names, as for `sgd`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"step": {name: 0-d float32}, "exp_avg": {name: tensor},
        "exp_avg_sq": {name: tensor}}`, with amsgrad also `"max_exp_avg_sq"`; the tensors have the parameters'
        shapes and dtypes. The parameters of one group have to be on one device.

    Example:
        >>> optimizer = adam(0.1)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> opt_state = optimizer.init(params)
        >>> params, opt_state = optimizer.update({"w": torch.tensor([3.0, -0.5])}, opt_state, params)
        >>> params["w"]
        tensor([0.9000, 2.1000])

    References:
        Kingma and Ba, Adam: a method for stochastic optimization, 2015, arXiv:1412.6980.
        Reddi et al., On the convergence of Adam and beyond, 2018, arXiv:1904.09237 (amsgrad).
    """
    return Adam(lr, betas, eps, weight_decay, amsgrad, "coupled", groups=groups)


@suggests_keywords
def adamw(
    lr: Scalar = 1e-3,
    *,
    betas: tuple[Scalar, Scalar] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Scalar = 1e-2,
    amsgrad: bool = False,
    cautious_decay: bool = False,
    groups: GivenGroups = (),
) -> Adam:
    """Return Adam with decoupled weight decay, equal to `torch.optim.AdamW`.

    The decay does not enter the gradient: p <- p - lr * weight_decay * p, then Adam's move. It follows the
    learning rate and its schedule.

    Args:
        lr, betas, eps, weight_decay, amsgrad, groups: As for `adam`.
        cautious_decay: Decay only elements whose update u and weight p do not have opposite signs:
            p <- p - lr * (u + weight_decay * p) where u * p >= 0, otherwise p <- p - lr * u.

    Example:
        >>> params = {"w": torch.tensor([1.0])}
        >>> optimizer = adamw(0.1, weight_decay=0.5)
        >>> optimizer.update({"w": torch.tensor([0.0])}, optimizer.init(params), params)[0]["w"]
        tensor([0.9500])

    References:
        Loshchilov and Hutter, Decoupled weight decay regularization, 2019, arXiv:1711.05101.
        Chen et al., Cautious weight decay, 2025, arXiv:2510.12402.
    """
    return Adam(lr, betas, eps, weight_decay, amsgrad, "by rate", cautious_decay, groups)


@suggests_keywords
def decoupled_adamw(
    lr: Scalar = 1e-3,
    *,
    betas: tuple[Scalar, Scalar] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: Scalar = 1e-5,
    amsgrad: bool = False,
    cautious_decay: bool = False,
    groups: GivenGroups = (),
) -> Adam:
    """Return Adam with weight decay that is decoupled from the learning rate, too, as in Composer's DecoupledAdamW.

    p <- p - s * weight_decay * p, then Adam's move. The multiplier s is the product of the schedules in `lr`, 1 if it
    has none, so changing the learning rate does not affect the decay: `adamw(1e-3, weight_decay=1e-2)` is
    `decoupled_adamw(1e-3, weight_decay=1e-5)`.

    Args:
        lr, betas, eps, weight_decay, amsgrad, groups: As for `adam`.
        cautious_decay: As for `adamw`.

    Example:
        >>> params = {"w": torch.tensor([1.0])}
        >>> optimizer = decoupled_adamw(0.1, weight_decay=0.0625)
        >>> optimizer.update({"w": torch.tensor([0.0])}, optimizer.init(params), params)[0]["w"]
        tensor([0.9375])

    References:
        Loshchilov and Hutter, Decoupled weight decay regularization, 2019, arXiv:1711.05101.
    """
    return Adam(lr, betas, eps, weight_decay, amsgrad, "by schedule", cautious_decay, groups)


@dataclasses.dataclass(frozen=True, repr=False)
class Adam(ByGroup):
    """Optimizer returned by `adam`, `adamw` and `decoupled_adamw`; see there."""

    lr: Rate
    betas: Betas
    eps: Constant
    weight_decay: Rate
    amsgrad: bool
    decay: Decay = dataclasses.field(repr=False)
    cautious_decay: bool = False
    groups: Any = ()
    is_elementwise = True

    @property
    def called(self) -> str:
        return {"coupled": "adam", "by rate": "adamw", "by schedule": "decoupled_adamw"}[self.decay]

    @property
    def slots(self) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
        lr, beta1, beta2 = (read(scalar, value) for scalar in (self.lr, *self.betas))
        if isinstance(beta1, float) and isinstance(beta2, float) and _can_fuse(params):
            if self.decay == "coupled":
                grads, _ = decayed("coupled", grads, params, self.weight_decay, self.lr, value)
            decoupled = shrinkage(self.decay, self.moving_decay, self.lr, value)
            return _fused(params, grads, slots, lr=lr, shrinkage=decoupled, betas=(beta1, beta2), eps=self.eps)

        grads, params = decayed(self.decay, grads, params, self.moving_decay, self.lr, value)
        steps = increment(slots["step"])
        averages = lerp(slots["exp_avg"], grads, 1 - beta1)
        squares = lerp(slots["exp_avg_sq"], multiply(grads, grads), 1 - beta2)
        new_slots = {"step": steps, "exp_avg": averages, "exp_avg_sq": squares}
        if self.amsgrad:
            squares = new_slots["max_exp_avg_sq"] = maximum(slots["max_exp_avg_sq"], squares)

        count = torch.stack(steps).to(wide_dtype(params))
        # lr * (m / c1) / (sqrt(v / c2) + eps), rewritten so that both corrections are computed on scalars:
        # (lr * root / c1) * m / (sqrt(v) + eps * root), where root = sqrt(c2).
        root = correction(beta2, count).sqrt()
        rates = unbound(root * lr / correction(beta1, count))
        floors = unbound(root * self.eps)
        return subtract_ratio(params, multiply(averages, rates), root_plus(squares, floors)), new_slots


def correction(beta: float | Tensor, count: Tensor) -> Tensor:
    """Return 1 - beta^count, computed by expm1, since 1 - 0.999 in float32 loses half of its digits."""
    if isinstance(beta, Tensor):
        return -torch.expm1(count * beta.to(count.dtype).log())
    return -torch.expm1(count * (math.log(beta) if beta > 0 else -math.inf))


@suggests_keywords
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

    The variance v - m^2 may be rounded to a negative number: it then counts as 0, while torch returns NaN. Gradients
    flow through `update`; the root's derivative is taken as 0 at 0.

    Args:
        lr: The learning rate, >= 0.
        alpha: Decay rate of the averages, in [0, 1).
        eps: Added to the root; a number, >= 0. Float16 parameters need about 1e-4: the default rounds to 0 there.
        weight_decay: The L2 penalty's factor, >= 0, added to the gradient.
        momentum: The factor of the previous direction, >= 0.
        centered: Divide by the gradient's deviation from its mean instead of its magnitude.
        groups: Options for parameters by a pattern of their names, as for `sgd`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"square_avg": {name: tensor}}`, if centered also `"grad_avg"`, and
        with momentum also `"momentum"`, all of the parameters' shapes and dtypes.

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

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
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


# Adam's update by torch's fused kernel


_FULL_PRECISION = ({torch.float32}, {torch.float64})

_FEWEST_TRACED, _SMALLEST_TRACED = 32, 2**20
"""Least number and bytes of the parameters in a traced update, either of which suffices for the operation. Below both,
compiled code of the formula saves more in every step than the operation saves in the first one."""


def _can_fuse(params: list[Tensor]) -> bool:
    """Return whether `_fused` may be used: in eager code and, for many or large tensors, in a traced step on a CPU."""
    x = params[0]
    if not is_plain() or torch.compiler.is_compiling() or {x.dtype for x in params} not in _FULL_PRECISION:
        return False
    if is_fake(x):
        is_large = len(params) >= _FEWEST_TRACED or sum(param.nbytes for param in params) >= _SMALLEST_TRACED
        return x.device.type == "cpu" and is_large
    return x.device.type in ("cpu", "cuda")


def _fused(
    params: list[Tensor],
    grads: list[Tensor],
    slots: Slots,
    *,
    lr: float | Tensor,
    shrinkage: float | Tensor,
    betas: tuple[float, float],
    eps: float,
) -> Moved:
    """Return new parameters and new slots; `shrinkage` is the part of a parameter that decoupled decay subtracts."""
    memory = [tensor for slot, tensors in slots.items() if slot != "step" for tensor in tensors]
    lists = params, grads, slots["step"], memory
    if is_fake(params[0]):
        scalars = (x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64) for x in (lr, shrinkage))
        new = torch.ops.purecompose.adam(*lists, *scalars, *betas, eps)
    else:
        new = _new(*lists, lr, shrinkage, *betas, eps)
    parts = [new[start : start + len(params)] for start in range(0, len(new), len(params))]
    return parts[0], dict(zip(slots, parts[1:], strict=True))


def _new(
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    memory: list[Tensor],
    lr: float | Tensor,
    shrinkage: float | Tensor,
    *constants: float,
) -> list[Tensor]:
    """Return new parameters, steps and memory (averages, squares, and largest squares if any) in one list."""
    is_shrunk = isinstance(shrinkage, Tensor) or shrinkage != 0.0
    params = alike(add(params, params, -shrinkage), params) if is_shrunk else copies(params, params)
    memory = copies(memory, params * (len(memory) // len(params)))
    steps = [step + 1 for step in steps]
    _update(params, grads, steps, memory, lr, *constants)
    return [*params, *steps, *memory]


def _new_traced(*given: Any) -> list[Tensor]:
    lists, (lr, shrinkage), constants = given[:4], given[4:6], given[6:]
    return _new(*lists, lr.item(), shrinkage.item(), *constants)


def _write(
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    memory: list[Tensor],
    lr: Tensor,
    shrinkage: Tensor,
    *constants: float,
) -> None:
    """Write what `_new` returns into the old tensors; parameters and memory have to be laid out alike."""
    if (part := shrinkage.item()) != 0.0:
        torch._foreach_add_(params, params, alpha=-part)
    torch._foreach_add_(steps, 1)
    _update(params, grads, steps, memory, lr.item(), *constants)


def _update(
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    memory: list[Tensor],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update parameters and memory in place; `steps` count this update."""
    count = len(params)
    torch._fused_adam_(
        params,
        alike(grads, params),
        memory[:count],
        memory[count : 2 * count],
        memory[2 * count :],
        steps,
        lr=lr,  # pyright: ignore[reportArgumentType]  # A 0-d tensor is accepted, too.
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        amsgrad=len(memory) > 2 * count,
        maximize=False,
    )


def _fake(params: list[Tensor], grads: list[Tensor], steps: list[Tensor], memory: list[Tensor], *_: object):
    del grads
    layout = params * (len(memory) // len(params))
    return [torch.empty_like(tensor) for tensor in (*params, *steps, *layout)]


_ARGUMENTS = "Tensor lr, Tensor shrinkage, float beta1, float beta2, float eps"
_library = Library("purecompose", "FRAGMENT")
_library.define(f"adam(Tensor[] params, Tensor[] grads, Tensor[] steps, Tensor[] memory, {_ARGUMENTS}) -> Tensor[]")
_library.define(
    f"adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] steps, Tensor(c!)[] memory, {_ARGUMENTS}) -> ()"
)
_library.impl("adam", _new_traced, "CPU")
_library.impl("adam_", _write, "CPU")
register_fake("purecompose::adam", _fake, lib=_library)
register_fake("purecompose::adam_", lambda *_: None, lib=_library)
