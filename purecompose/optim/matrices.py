"""Optimizers of matrices: Muon orthogonalizes momentum, Adafactor factors the averages of squared gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from purecompose._support.specs import shown, suggests_keywords
from purecompose.optim.base import ByGroup, Constant, GivenGroups, Rate, as_float, decayed, read, wide_dtype
from purecompose.optim.lists import Moved, Slots, add, increment, lerp, mean_squares, multiply, unbound
from purecompose.optim.protocol import OptState, Value
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within


# Chosen by Jordan for the steepest slope at 0: singular values end up between about 0.7 and 1.2, not at 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@suggests_keywords
def muon(
    lr: Scalar = 1e-3,
    *,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    weight_decay: Scalar = 0.1,
    ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
    ns_steps: int = 5,
    eps: float = 1e-7,
    adjust_lr: Literal["original", "match_rms_adamw"] = "original",
    ns_precision: Literal["bf16", "full"] = "bf16",
    filters: bool | Literal["only"] = False,
    cautious_decay: bool = False,
    groups: GivenGroups = (),
) -> Muon:
    """Return Muon, equal to `torch.optim.Muon`: it moves matrices by about the same length in all directions.

    With g the gradient of a matrix p of shape (rows, columns)::

        b <- momentum * b + (1 - momentum) * g
        d = momentum * b + (1 - momentum) * g         (without nesterov d = b)
        p <- p - lr * weight_decay * p
        p <- p - lr * ratio * orthogonalized(d)

    Other parameters, such as biases, need another optimizer, and so do, by the author's advice, embeddings and the last
    layer. `by_pattern` divides them::

        by_pattern({"blocks.*": muon(0.02)}, adamw(3e-4))
        by_pattern({"embedding.*": adamw(3e-4), "head.*": adamw(3e-4), "*": muon(0.02)}, adamw(3e-4))

    Gradients flow through `update`; with "bf16" they have only bfloat16's precision.

    Args:
        lr: The learning rate, >= 0; 0.02 is common with "original", AdamW's with "match_rms_adamw".
        momentum: The factor of the previous buffer, >= 0.
        nesterov: Look ahead along the new buffer.
        weight_decay: The factor of the decoupled decay, >= 0; it follows the learning rate and its schedule.
        ns_coefficients: Coefficients (a, b, c) of the Newton-Schulz iteration, x <- a x + b (x x') x + c (x x')^2 x.
        ns_steps: The number of iterations, in [1, 99].
        eps: The smallest norm that a matrix is divided by; a number, >= 0.
        adjust_lr: The ratio: "original" for sqrt(max(1, rows / columns)), "match_rms_adamw" for
            0.2 * sqrt(max(rows, columns)), which makes moves as large as AdamW's.
        ns_precision: "bf16" iterates in bfloat16, as torch does; "full" in the parameter's dtype, or float32 if that is
            wider.
        filters: Move filters of convolutions, too: a parameter of more than two dimensions, (rows, ...), moves like the
            matrix of its flattened rows. "only" moves no matrices.
        cautious_decay: Decay only elements whose update and weight do not have opposite signs, as for `adamw`.
        groups: Options for parameters by a pattern of their names, as for `sgd`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"momentum": {name: tensor}}`, of the parameters' shapes and dtypes.

    Raises:
        TypeError: A setting is of the wrong kind, or a group has an unknown option.
        ValueError: A setting is out of range; from `init`, a parameter is not a real matrix.

    Example:
        >>> params = {"w": torch.zeros(2, 2)}
        >>> optimizer = muon(1.0, ns_coefficients=(1.5, -0.5, 0.0), ns_steps=20, ns_precision="full")
        >>> params, _ = optimizer.update({"w": torch.tensor([[0.0, 3.0], [-1.0, 0.0]])}, optimizer.init(params), params)
        >>> params["w"].round(decimals=4) + 0.0
        tensor([[ 0., -1.],
                [ 1.,  0.]])

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024,
        https://kellerjordan.github.io/posts/muon/.
        Liu et al., Muon is scalable for LLM training, 2025, arXiv:2502.16982 ("match_rms_adamw").
    """
    newton_schulz = ns_coefficients, ns_steps, eps, adjust_lr, ns_precision
    return Muon(lr, momentum, nesterov, weight_decay, *newton_schulz, filters, cautious_decay, groups)


def orthogonalized(
    matrix: Tensor, *, coefficients: tuple[float, float, float] = _COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Return matrices with their singular values brought near to 1 and their singular vectors kept.

    Each is near to U V', where the given matrix is U S V': the Newton-Schulz iteration with an odd polynomial of degree
    5, on the matrix divided by its Frobenius norm.

    Args:
        matrix: Real, (rows, columns), or a stack, (N, rows, columns).
        coefficients: Those of x, x^3 and x^5.
    """
    a, b, c = coefficients
    x = matrix / torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True).clamp(min=eps)
    fused = torch.addmm if x.ndim == 2 else torch.baddbmm
    is_tall = x.shape[-2] > x.shape[-1]
    for _ in range(steps):
        gram = x.mT @ x if is_tall else x @ x.mT  # the smaller of the two
        slope = fused(gram, gram, gram, beta=b, alpha=c)
        x = fused(x, x, slope, beta=a) if is_tall else fused(x, slope, x, beta=a)
    return x


def _checked_coefficients(coefficients: Any, where: str) -> tuple[float, ...]:
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
        raise TypeError(f"{where}: expected three numbers, got {shown(coefficients)}")
    return tuple(as_float(Within().number(one, f"{where}[{i}]")) for i, one in enumerate(coefficients))


@dataclasses.dataclass(frozen=True, repr=False)
class Muon(ByGroup):
    """Optimizer returned by `muon`; see there."""

    lr: Rate
    momentum: Rate
    nesterov: bool
    weight_decay: Rate
    ns_coefficients: Annotated[tuple[float, float, float], _checked_coefficients]
    ns_steps: Annotated[int, Within(1, 99)]
    eps: Constant
    adjust_lr: Literal["original", "match_rms_adamw"]
    ns_precision: Literal["bf16", "full"]
    filters: bool | Literal["only"]
    cautious_decay: bool = False
    groups: Any = ()

    def init(self, params: Mapping[str, Tensor]) -> OptState:
        """Return zeros for every parameter, frozen ones included; see `Optimizer.init`."""
        for name, param in params.items():
            if not self.can_move(param):
                hint = " (filters=True moves filters)" if param.ndim > 2 and not self.filters else ""
                raise ValueError(
                    f"muon: expected real matrices, got {name!r} of shape {tuple(param.shape)} and {param.dtype}; use "
                    f"another optimizer for other parameters{hint}: optim.by_pattern({{'*': optim.muon(0.02)}}, "
                    "optim.adamw(3e-4))"
                )
        return super().init(params)

    def can_move(self, param: Tensor) -> bool:
        """Return whether the optimizer can move a parameter: a real matrix, and with `filters` a real filter."""
        is_matrix, is_filter = param.ndim == 2, param.ndim > 2
        can = (is_matrix and self.filters != "only") or (is_filter and bool(self.filters))
        return can and not param.is_complex()

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
        momentum, lr = read(self.momentum, value), read(self.lr, value)
        _, params = decayed("by rate", grads, params, self.moving_decay, self.lr, value)
        new_buffers, moved = list(grads), list(params)
        stacks: dict[Hashable, list[int]] = {}
        for i, grad in enumerate(grads):
            stacks.setdefault((grad.shape, grad.dtype), []).append(i)
        # Stack by stack, whose temporary tensors reuse memory that is still in the processor's cache.
        for members in stacks.values():
            own = [grads[i] for i in members]
            buffers = lerp([slots["momentum"][i] for i in members], own, 1 - momentum)
            moves, ratio = self._moves(lerp(own, buffers, momentum) if self.nesterov else buffers)
            scale = -lr if ratio == 1 else -lr * ratio
            for i, buffer, new in zip(members, buffers, add([params[i] for i in members], moves, scale), strict=True):
                new_buffers[i], moved[i] = buffer, new
        return moved, {"momentum": new_buffers}

    def _moves(self, directions: list[Tensor]) -> tuple[list[Tensor], float]:
        """Return the moves of parameters of one shape, up to their sign, and their ratio to the learning rate."""
        first, num = directions[0], len(directions)
        narrow = torch.bfloat16 if self.ns_precision == "bf16" else torch.promote_types(first.dtype, torch.float32)
        matrices = [direction.flatten(1) for direction in directions]
        orthogonal = functools.partial(
            orthogonalized, coefficients=self.ns_coefficients, steps=self.ns_steps, eps=self.eps
        )
        # On a CPU, batched products in float32 take a fourth longer than the same products one by one.
        if num == 1 or (self.ns_precision == "full" and first.device.type == "cpu"):
            moves = [orthogonal(matrix.to(narrow)).to(first.dtype) for matrix in matrices]
        else:
            moves = list(orthogonal(torch.stack(matrices).to(narrow)).to(first.dtype).unbind())
        moves = [move.reshape(first.shape) for move in moves]
        rows, columns = matrices[0].shape
        if self.adjust_lr == "original":
            return moves, math.sqrt(max(1, rows / max(1, columns)))
        return moves, 0.2 * math.sqrt(max(rows, columns))


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
    (of the last two dimensions); v is then R C / max(mean(R), eps[0]).

    Gradients flow through `update`.

    Args:
        lr: The relative learning rate, >= 0, replaced by 1 / sqrt(t) once that is smaller.
        beta2_decay: The exponent by which the weight of new squares decreases; a number <= 0.
        eps: The smallest root (None for the resolution of the parameter's dtype), and the smallest RMS
            assumed of a parameter; numbers >= 0.
        d: The largest RMS of an update that is not clipped; a number >= 1.
        weight_decay: The factor of the decoupled decay, >= 0; it follows the learning rate and its schedule.
        groups: Options for parameters by a pattern of their names, as for `sgd`.

    Returns:
        A frozen, hashable optimizer. Its state is `{"step": {name: 0-d float32}}` for all parameters, `"row_var"` of
        shape (..., rows, 1) and `"col_var"` of shape (..., 1, columns) for those of two dimensions or more, and
        `"variance"`, of the parameter's shape, for the others; all but the step in the parameters' dtypes. The
        parameters of one group have to be on one device.

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

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
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

    def _whole(self, grads: list[Tensor], slots: Slots, weights: Tensor) -> Moved:
        """Return the factors of the gradients, and new slots."""
        squares = _averaged(slots["variance"], multiply(grads, grads), weights)
        return [square.clamp(min=self._floor(square) ** 2).rsqrt() for square in squares], {"variance": squares}

    def _by_factors(self, grads: list[Tensor], slots: Slots, weights: Tensor) -> Moved:
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
