"""Adafactor: steps scaled by a factored average of the squared gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from purecompose._support.checks import shown, suggests_keywords
from purecompose.optim.base import ByGroup, GivenGroups, Rate, as_float, decayed, read, wide_dtype
from purecompose.optim.lists import add, increment, mean_squares, multiply, unbound
from purecompose.optim.protocol import OptState, Value
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within


@suggests_keywords
def adafactor(
    lr: Scalar = 1e-2,
    *,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: Scalar = 0.0,
    groups: GivenGroups = (),
) -> Adafactor:
    """Return Adafactor, equal to `torch.optim.Adafactor`: little memory, and moves in proportion to the parameters.

    With t the number of the parameter's update, counted from 1, RMS the root mean square, and w = t^beta2_decay::

        v <- (1 - w) * v + w * g^2
        u = g / max(sqrt(v), eps[0])
        u <- u / max(1, RMS(u) / d)
        a = max(eps[1], RMS(p)) * min(lr, 1 / sqrt(t))
        p <- p - lr * weight_decay * p - a * u

    For a parameter of two dimensions or more, the state holds not v but its means over columns and over rows, R and C
    (over the last dimension and the one before; leading dimensions are batched); v is then R C / max(mean(R), eps[0]).

    Gradients flow through `update`.

    Args:
        lr: The relative learning rate, >= 0, replaced by 1 / sqrt(t) once that is smaller.
        beta2_decay: The exponent by which the weight of new squares decreases; a number <= 0.
        eps: The smallest root (None for the resolution of the parameter's dtype), and the smallest RMS assumed of a
            parameter; numbers >= 0.
        d: The largest RMS of an update that is not clipped; a number >= 1.
        weight_decay: The factor of the decoupled decay, >= 0; it follows the learning rate and its schedule.
        groups: Options for parameters by a pattern of their names, as for `sgd`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"step": {name: 0-d float32}}` for all parameters, `"row_var"` of
        shape (..., rows, 1) and `"col_var"` of shape (..., 1, columns) for those of two dimensions or more, and
        `"variance"`, of the parameter's shape, for the others; all but the step in the parameters' dtypes. The
        parameters of one group have to be on one device.

    Raises:
        TypeError: A setting is of the wrong kind, a group has an unknown option; from `init`, a parameter is complex.
        ValueError: A setting is out of range.

    Example:
        >>> optimizer = adafactor(0.5)
        >>> params = {"w": torch.tensor([1.0, -1.0])}
        >>> params, opt_state = optimizer.update({"w": torch.tensor([3.0, 4.0])}, optimizer.init(params), params)
        >>> params["w"]
        tensor([ 0.5000, -1.5000])

    References:
        Shazeer and Stern, Adafactor: adaptive learning rates with sublinear memory cost, 2018, arXiv:1804.04235.
    """
    return Adafactor(lr, beta2_decay, eps, d, weight_decay, groups)


def _checked_eps(eps: Any, where: str) -> tuple[float | None, float]:
    """Require two numbers of at least 0, the first of which may be `None`."""
    if not isinstance(eps, tuple | list) or len(eps) != 2:
        raise TypeError(f"{where}: expected two numbers, the first may be None, got {shown(eps)}")
    first = None if eps[0] is None else as_float(Within(0).number(eps[0], f"{where}[0]"))
    return first, as_float(Within(0).number(eps[1], f"{where}[1]"))


@dataclasses.dataclass(frozen=True, repr=False)
class Adafactor(ByGroup):
    """Optimizer returned by `adafactor`; see there."""

    lr: Rate
    beta2_decay: Annotated[float, Within(high=0)]
    eps: Annotated[tuple[float | None, float], _checked_eps]
    d: Annotated[float, Within(1)]
    weight_decay: Rate
    groups: Any = ()
    is_factored: bool = dataclasses.field(default=False, repr=False)
    """True if this is the rule for parameters of two dimensions or more."""

    def init(self, params: Mapping[str, Tensor]) -> OptState:
        """Return zeros for every parameter, frozen ones included; see `Optimizer.init`."""
        for name, param in params.items():
            if param.is_complex():
                raise TypeError(
                    f"adafactor: expected real parameters, got {name!r} of {param.dtype}; "
                    "hold its real view (torch.view_as_real) as the parameter instead"
                )
        return super().init(params)

    def form(self, param: Tensor) -> bool:
        return param.ndim > 1

    def formed(self, form: Hashable) -> Adafactor:
        return dataclasses.replace(self, is_factored=bool(form))

    @property
    def slots(self) -> tuple[str, ...]:
        return ("step", *(("row_var", "col_var") if self.is_factored else ("variance",)))

    def fresh(self, slot: str, param: Tensor) -> Tensor:
        if slot == "row_var":
            return torch.zeros_like(param[..., :1], requires_grad=False)
        if slot == "col_var":
            return torch.zeros_like(param[..., :1, :], requires_grad=False)
        return super().fresh(slot, param)

    def move(
        self, grads: list[Tensor], params: list[Tensor], slots: dict[str, list[Tensor]], value: Value
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        dtype = wide_dtype(params)
        steps = increment(slots["step"])
        count = torch.stack(steps).to(dtype)
        lr = read(self.lr, value)
        rates = count.rsqrt()
        rates = torch.minimum(rates, lr.to(dtype)) if isinstance(lr, Tensor) else rates.clamp(max=lr)
        # Squares are clamped instead of roots: a bias is often 0 at first, where the root's derivative is infinite.
        rates = rates * mean_squares(params, dtype).clamp(min=self.eps[1] ** 2).sqrt()
        _, params = decayed("by rate", grads, params, self.weight_decay, self.lr, value)

        weights = count**self.beta2_decay
        roots, new_slots = (self._by_factors if self.is_factored else self._whole)(grads, slots, weights)
        updates = multiply(grads, roots)
        clipped = (mean_squares(updates, dtype) / self.d**2).clamp(min=1).sqrt()
        moves = multiply(updates, unbound(rates / clipped))
        return add(params, moves, -1.0), {"step": steps, **new_slots}

    def _whole(
        self, grads: list[Tensor], slots: dict[str, list[Tensor]], weights: Tensor
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Return the factors of the gradients, and new slots."""
        squares = _averaged(slots["variance"], multiply(grads, grads), weights)
        return [square.clamp(min=self._floor(square) ** 2).rsqrt() for square in squares], {"variance": squares}

    def _by_factors(
        self, grads: list[Tensor], slots: dict[str, list[Tensor]], weights: Tensor
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Return the same as `_whole`, from the means of the rows and of the columns."""
        squares = multiply(grads, grads)
        rows = _averaged(slots["row_var"], [square.mean(-1, keepdim=True) for square in squares], weights)
        columns = _averaged(slots["col_var"], [square.mean(-2, keepdim=True) for square in squares], weights)
        roots = []
        for row, column in zip(rows, columns, strict=True):
            floor = self._floor(row)
            square = row * column / row.mean(-2, keepdim=True).clamp(min=floor)
            roots.append(square.clamp(min=floor**2).rsqrt())
        return roots, {"row_var": rows, "col_var": columns}

    def _floor(self, like: Tensor) -> float:
        return torch.finfo(like.dtype).eps if self.eps[0] is None else self.eps[0]


def _averaged(averages: list[Tensor], news: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Move each average towards its new value, by its own weight.

    Not computed as a + w (b - a): the weights start at 1, where a large a would round away digits of b.
    """
    return add(multiply(averages, unbound(1 - weights)), multiply(news, unbound(weights)), 1.0)
