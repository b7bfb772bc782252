"""Stochastic gradient descent, Lion, Adagrad, and Adam for embeddings, which may move looked-up rows only."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from purecompose._support.specs import suggests_keywords
from purecompose.optim.adam import correction
from purecompose.optim.base import Betas, ByGroup, Constant, Decay, GivenGroups, Rate, decayed, read, wide_dtype
from purecompose.optim.lists import (
    Lists,
    Moved,
    Slots,
    add,
    divide,
    increment,
    lerp,
    moved,
    multiply,
    root_plus,
    sign,
    tables_apart,
    unbound,
)
from purecompose.optim.protocol import Value
from purecompose.schedule import Scalar


@suggests_keywords
def sgd(
    lr: Scalar,
    *,
    momentum: Scalar = 0.0,
    dampening: Scalar = 0.0,
    nesterov: bool = False,
    weight_decay: Scalar = 0.0,
    groups: GivenGroups = (),
) -> SGD:
    """Return stochastic gradient descent, equal to `torch.optim.SGD`.

    With g the gradient plus weight_decay * p, each parameter with a gradient moves by::

        b <- momentum * b + (1 - dampening) * g       (b <- g in the parameter's first update)
        p <- p - lr * b                               (Nesterov: p - lr * (g + momentum * b))

    A setting that is the number 0 costs nothing: without momentum the state is empty.

    Args:
        lr: The learning rate, >= 0.
        momentum: The factor of the previous buffer, >= 0.
        dampening: The share of the gradient that the buffer leaves out, >= 0.
        nesterov: Look ahead along the new buffer.
        weight_decay: The L2 penalty's factor, >= 0, added to the gradient and so part of the momentum.
        groups: Options for parameters by a pattern of their names (`fnmatch`, first match wins), in place of
            the ones above: `{"*.bias": {"weight_decay": 0.0}}`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"momentum": {name: tensor}}`, of the parameters' shapes
        and dtypes, and with dampening `{"step": {name: tensor}}`, 0-d float32 counts of updates.

    Example:
        >>> optimizer = sgd(0.5, momentum=0.9)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> opt_state = optimizer.init(params)
        >>> params, opt_state = optimizer.update({"w": torch.tensor([1.0, 0.0])}, opt_state, params)
        >>> params["w"]
        tensor([0.5000, 2.0000])

    References:
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013.
    """
    return SGD(lr, momentum, dampening, nesterov, weight_decay, "coupled", groups=groups)


@suggests_keywords
def decoupled_sgdw(
    lr: Scalar,
    *,
    momentum: Scalar = 0.0,
    dampening: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    nesterov: bool = False,
    cautious_decay: bool = False,
    groups: GivenGroups = (),
) -> SGD:
    """Return SGD with weight decay decoupled from gradient and learning rate, as in Composer's DecoupledSGDW.

    p <- p - s * weight_decay * p, then `sgd`'s move, whose momentum does not include the decay. The multiplier s is the
    product of the schedules in `lr`, 1 if it has none: `sgd(2.0, weight_decay=5e-4)` becomes `decoupled_sgdw(2.0,
    weight_decay=1e-3)`.

    Args:
        lr, momentum, dampening, weight_decay, nesterov, groups: As for `sgd`.
        cautious_decay: As for `adamw`.

    Example:
        >>> params = {"w": torch.tensor([1.0])}
        >>> optimizer = decoupled_sgdw(0.5, momentum=0.9, weight_decay=0.0625)
        >>> params, opt_state = optimizer.update({"w": torch.tensor([1.0])}, optimizer.init(params), params)
        >>> params["w"], opt_state["momentum"]["w"]
        (tensor([0.4375]), tensor([1.]))

    References:
        Loshchilov and Hutter, Decoupled weight decay regularization, 2019, arXiv:1711.05101.
    """
    return SGD(lr, momentum, dampening, nesterov, weight_decay, "by schedule", cautious_decay, groups)


@dataclasses.dataclass(frozen=True, repr=False)
class SGD(ByGroup):
    """Optimizer returned by `sgd` and `decoupled_sgdw`; see there."""

    lr: Rate
    momentum: Rate
    dampening: Rate
    nesterov: bool
    weight_decay: Rate
    decay: Decay = dataclasses.field(repr=False)
    cautious_decay: bool = False
    groups: Any = ()
    is_elementwise = True

    @property
    def called(self) -> str:
        return "sgd" if self.decay == "coupled" else "decoupled_sgdw"

    def check(self) -> None:
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ValueError(
                f"{self.called}: nesterov=True needs momentum > 0 and dampening=0, "
                f"got momentum={self.momentum!r}, dampening={self.dampening!r}"
            )

    @property
    def slots(self) -> tuple[str, ...]:
        if self.momentum == 0.0:
            return ()
        return ("momentum",) if self.dampening == 0.0 else ("step", "momentum")

    @property
    def moves_rows(self) -> bool:
        return self.momentum == 0.0 and self.weight_decay == 0.0

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
        lr = read(self.lr, value)
        descent = -lr
        if self.moves_rows:
            return tables_apart("sgd", [params], grads, [lr], lambda rest, own: [add(rest[0], own, descent)])[0], {}
        grads, params = decayed(self.decay, grads, params, self.moving_decay, self.lr, value)
        if self.momentum == 0.0:
            return add(params, grads, descent), {}

        momentum = read(self.momentum, value)
        new_slots, inflow = {}, grads
        if self.dampening != 0.0:
            new_slots["step"], factors = _dampened(slots["step"], read(self.dampening, value), wide_dtype(params))
            inflow = multiply(grads, factors)
        buffers = new_slots["momentum"] = add(inflow, slots["momentum"], momentum)
        direction = add(grads, buffers, momentum) if self.nesterov else buffers
        return add(params, direction, descent), new_slots


def _dampened(steps: list[Tensor], dampening: float | Tensor, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return new counts, and the factor of each gradient: 1 in the first update, then 1 - dampening.

    Buffers start at zero, so with factor 1 the first buffer equals the first gradient, as in torch.optim.
    The count is per parameter: one that is thawed late has its first update late.
    """
    started = (torch.stack(steps) > 0).to(dtype)
    return increment(steps), unbound(1 - started * dampening)


@suggests_keywords
def lion(
    lr: Scalar = 1e-4,
    *,
    betas: tuple[Scalar, Scalar] = (0.9, 0.99),
    weight_decay: Scalar = 0.0,
    cautious_decay: bool = False,
    groups: GivenGroups = (),
) -> Lion:
    """Return Lion: each element moves by lr, up or down, and the state has one tensor per parameter.

    ::

        p <- p - lr * weight_decay * p
        p <- p - lr * sign(beta1 * m + (1 - beta1) * g)
        m <- beta2 * m + (1 - beta2) * g

    Compared with AdamW the paper uses a learning rate that is 3 to 10 times smaller and a weight decay that is larger
    by the same factor. An element whose average is exactly 0 moves only by its decay.

    Gradients flow through `update`; the sign has derivative 0.

    Args:
        lr: The learning rate, >= 0.
        betas: Weight of the average in the sign's argument, and decay rate of the average; each in [0, 1).
        weight_decay: The factor of the decoupled decay, >= 0; it follows the learning rate and its schedule.
        cautious_decay: Decay only elements whose update and weight do not have opposite signs, as for `adamw`.
        groups: Options for parameters by a pattern of their names, as for `sgd`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"exp_avg": {name: tensor}}`, of the parameters' shapes and dtypes.

    Example:
        >>> import torch
        >>> params = {"w": torch.tensor([1.0, 2.0, 3.0])}
        >>> optimizer = lion(0.5)
        >>> optimizer.update({"w": torch.tensor([1e-3, -70.0, 0.0])}, optimizer.init(params), params)[0]["w"]
        tensor([0.5000, 2.5000, 3.0000])

    References:
        Chen et al., Symbolic discovery of optimization algorithms, 2023, arXiv:2302.06675.
    """
    return Lion(lr, betas, weight_decay, cautious_decay, groups)


@dataclasses.dataclass(frozen=True, repr=False)
class Lion(ByGroup):
    """Optimizer returned by `lion`; see there."""

    lr: Rate
    betas: Betas
    weight_decay: Rate
    cautious_decay: bool = False
    groups: Any = ()
    is_elementwise = True

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
        beta1, beta2 = (read(beta, value) for beta in self.betas)
        _, params = decayed("by rate", grads, params, self.moving_decay, self.lr, value)
        directions = sign(lerp(slots["exp_avg"], grads, 1 - beta1))
        return add(params, directions, -read(self.lr, value)), {"exp_avg": lerp(slots["exp_avg"], grads, 1 - beta2)}


@suggests_keywords
def adagrad(
    lr: Scalar = 1e-2,
    *,
    lr_decay: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    groups: GivenGroups = (),
) -> Adagrad:
    """Return Adagrad, equal to `torch.optim.Adagrad`, also with its sparse gradients.

    With g the gradient plus weight_decay * p, and t the number of the parameter's update, counted from 1::

        s <- s + g^2
        p <- p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

    An element whose gradient is zero stays as it is unless it decays. So a compiled step of a large embedding reads and
    writes only rows that the batch looks up.

    Args:
        lr: The learning rate, >= 0.
        lr_decay: The growth of the divisor of the learning rate with each update, >= 0.
        weight_decay: The L2 penalty's factor, >= 0, added to the gradient.
        initial_accumulator_value: The sum before the first update; a number, >= 0.
        eps: Added to the root; a number, >= 0.
        groups: Options for parameters by a pattern of their names, as for `sgd`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"sum": {name: tensor}}`, of the parameters' shapes and dtypes, and
        with `lr_decay` also `{"step": {name: tensor}}`, 0-d float32 counts of updates.

    Example:
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> optimizer = adagrad(0.5)
        >>> optimizer.update({"w": torch.tensor([3.0, 0.0])}, optimizer.init(params), params)[0]["w"]
        tensor([0.5000, 2.0000])

    References:
        Duchi et al., Adaptive subgradient methods for online learning and stochastic optimization, 2011.
    """
    return Adagrad(lr, lr_decay, weight_decay, initial_accumulator_value, eps, groups)


@dataclasses.dataclass(frozen=True, repr=False)
class Adagrad(ByGroup):
    """Optimizer returned by `adagrad`; see there."""

    lr: Rate
    lr_decay: Rate
    weight_decay: Rate
    initial_accumulator_value: Constant
    eps: Constant
    groups: GivenGroups = ()
    is_elementwise = True

    @property
    def slots(self) -> tuple[str, ...]:
        return ("sum",) if self.lr_decay == 0.0 else ("step", "sum")

    @property
    def moves_rows(self) -> bool:
        return self.weight_decay == 0.0

    def fresh(self, slot: str, param: Tensor) -> Tensor:
        """Return a count, or the sum before the first update; complex numbers have a sum for each part."""
        if slot == "step":
            return super().fresh(slot, param)
        value = self.initial_accumulator_value
        return torch.full_like(param, complex(value, value) if param.is_complex() else value, requires_grad=False)

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
        lr = read(self.lr, value)
        grads, params = decayed("coupled", grads, params, self.weight_decay, self.lr, value)

        def sums_and_moves(sums: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            sums = add(sums, multiply(grads, grads), 1.0)
            return sums, divide(grads, root_plus(sums, self.eps))

        if self.lr_decay != 0.0:
            counts = torch.stack(slots["step"]).to(wide_dtype(params))
            rates = unbound(lr / (1 + counts * read(self.lr_decay, value)))
            sums, moves = sums_and_moves(slots["sum"], grads)
            new_slots = {"step": increment(slots["step"]), "sum": sums}
            return add(params, multiply(moves, rates), -1.0), new_slots

        def rest(lists: Lists, grads: list[Tensor]) -> Lists:
            sums, moves = sums_and_moves(lists[1], grads)
            return [add(lists[0], moves, -lr), sums]

        lists = [params, slots["sum"]]
        apart = tables_apart("adagrad", lists, grads, [lr, self.eps], rest) if self.moves_rows else rest(lists, grads)
        return apart[0], {"sum": apart[1]}


@suggests_keywords
def sparse_adam(
    lr: Scalar = 1e-3, *, betas: tuple[Scalar, Scalar] = (0.9, 0.999), eps: float = 1e-8, groups: GivenGroups = ()
) -> SparseAdam:
    """Return lazy Adam for embeddings, equal to `torch.optim.SparseAdam`.

    Rows whose gradient is not zero move as by `adam`; other rows and their averages stay as they are. So a row that no
    index of the batch names does not move by its momentum, and its averages do not decay. All rows share the count of
    updates. For the other parameters of a network use another optimizer: `by_pattern({"embed.weight": sparse_adam()},
    adam())`. In a parameter of one dimension each element is a row.

    A compiled step reads and writes only the rows of a large embedding that the batch looks up; see "Large embeddings"
    in the guide to training.

    `torch.optim.SparseAdam` also moves a row that an index names and whose gradient is exactly zero, as that of a token
    that the loss masks.

    Args:
        lr: The learning rate, >= 0.
        betas: Decay rates of the two averages, each in [0, 1).
        eps: Added to the root; a number, >= 0.
        groups: Options for parameters by a pattern of their names, as for `sgd`.

    Returns:
        A frozen, hashable optimizer. Its state is that of `adam`, `{"step": {name: 0-d float32}, "exp_avg": {name:
        tensor}, "exp_avg_sq": {name: tensor}}`.

    Example:
        >>> params, optimizer = {"embed": torch.zeros(2, 2)}, sparse_adam(0.1)
        >>> grads = {"embed": torch.tensor([[0.0, 0.0], [3.0, -0.5]])}
        >>> params, opt_state = optimizer.update(grads, optimizer.init(params), params)
        >>> params["embed"]
        tensor([[ 0.0000,  0.0000],
                [-0.1000,  0.1000]])
        >>> optimizer.update({"embed": torch.zeros(2, 2)}, opt_state, params)[0]["embed"].equal(params["embed"])
        True

    References:
        Kingma and Ba, Adam: a method for stochastic optimization, 2015, arXiv:1412.6980.
    """
    return SparseAdam(lr, betas, eps, groups)


@dataclasses.dataclass(frozen=True, repr=False)
class SparseAdam(ByGroup):
    """Optimizer returned by `sparse_adam`; see there."""

    lr: Rate
    betas: Betas
    eps: Constant
    groups: GivenGroups = ()
    is_elementwise = True

    @property
    def moves_rows(self) -> bool:
        return True

    @property
    def called(self) -> str:
        return "sparse_adam"

    @property
    def slots(self) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq")

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
        lr, beta1, beta2 = (read(scalar, value) for scalar in (self.lr, *self.betas))
        steps = increment(slots["step"])
        count = torch.stack(steps).to(wide_dtype(params))
        rates = unbound(correction(beta2, count).sqrt() * lr / correction(beta1, count))
        scalars = [rates, beta1, beta2, self.eps]
        new, averages, squares = moved("sparse_adam", params, grads, [slots["exp_avg"], slots["exp_avg_sq"]], scalars)
        return new, {"step": steps, "exp_avg": averages, "exp_avg_sq": squares}
