"""Arithmetic on lists of tensors, in which the optimizers' rules are written.

Each function has two forms. One uses torch's `_foreach` kernels: one call for all tensors, which is one launch
on a GPU and about half the overhead on a CPU. The other is a plain loop, used under autograd and function transforms:
`_foreach` has no batching rules (under vmap it raises, torch 2.13), and its in-place kernels would overwrite tensors
that autograd has saved. Tensors of a pair have the same shape, except where a 0-d partner is mentioned.

Results have the dtypes of the xs, also with a 0-d partner of a wider dtype, such as a schedule's value.
"""

# torch.optim itself is built on the `_foreach` functions, but torch exports them under private names.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purecompose._support.internals import is_transforming


def is_plain() -> bool:
    """Return whether the current operations are neither differentiated nor mapped."""
    return not torch.is_grad_enabled() and not is_transforming()


def copies(xs: list[Tensor], layout: list[Tensor]) -> list[Tensor]:
    """Return copies, dense in memory, and laid out as the tensors of `layout` if these are dense."""
    return [torch.empty_like(y).copy_(x) for x, y in zip(xs, layout, strict=True)]


def alike(xs: list[Tensor], layout: list[Tensor]) -> list[Tensor]:
    """Return the tensors, with copies of those that are not laid out in memory as the ones of `layout`."""
    return [x if x.stride() == y.stride() else torch.empty_like(y).copy_(x) for x, y in zip(xs, layout, strict=True)]


def add(xs: list[Tensor], ys: list[Tensor], scale: float | Tensor) -> list[Tensor]:
    """Return x + scale * y; `scale` is a number or a 0-d tensor.

    Example:
        >>> add([torch.ones(2)], [torch.tensor([1.0, 2.0])], -0.5)
        [tensor([0.5000, 0.0000])]
    """
    if isinstance(scale, Tensor):
        if not xs or not is_plain():
            return _kept([x + y * scale for x, y in zip(xs, ys, strict=True)], xs)
        sums = torch._foreach_mul(ys, scale)
        torch._foreach_add_(sums, xs)
        return _kept(sums, xs)
    if not xs or not is_plain():
        return [torch.add(x, y, alpha=scale) for x, y in zip(xs, ys, strict=True)]
    return list(torch._foreach_add(xs, ys, alpha=scale))


def increment(xs: list[Tensor]) -> list[Tensor]:
    """Return x + 1, for the counts of many parameters in one kernel on a GPU.

    Example:
        >>> increment([torch.tensor(1.0)])
        [tensor(2.)]
    """
    return list(torch._foreach_add(xs, 1)) if is_plain() else [x + 1 for x in xs]


def _each(kernel: Any, plain: Callable[..., Tensor], xs: list[Tensor], *others: list[Tensor]) -> list[Tensor]:
    """Return a function of each row of tensors, in one of the two forms."""
    if xs and is_plain():
        return list(kernel(xs, *others))
    return [plain(*row) for row in zip(xs, *others, strict=True)]


def multiply(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """Return x * y; y may be 0-d, of any dtype."""
    return _kept(_each(torch._foreach_mul, torch.mul, xs, ys), xs)


def divide(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """Return x / y; y may be 0-d, of any dtype."""
    return _kept(_each(torch._foreach_div, torch.div, xs, ys), xs)


def lerp(xs: list[Tensor], ys: list[Tensor], weight: float | Tensor) -> list[Tensor]:
    """Return x + weight * (y - x); `weight` is a number or a 0-d tensor."""
    if isinstance(weight, Tensor):
        # torch.lerp requires a tensor weight of the same dtype, which rules out half-precision parameters.
        return add(xs, add(ys, xs, -1.0), weight)
    if not is_plain():
        return [torch.lerp(x, y, weight) for x, y in zip(xs, ys, strict=True)]
    return list(torch._foreach_lerp(xs, ys, weight))


def maximum(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """Return the larger of x and y, element by element."""
    return _each(torch._foreach_maximum, torch.maximum, xs, ys)


def clamp_min(xs: list[Tensor], floor: float) -> list[Tensor]:
    """Return x, or the floor where the floor is larger."""
    if not is_plain():
        return [x.clamp(min=floor) for x in xs]
    return list(torch._foreach_clamp_min(xs, floor))


def sign(xs: list[Tensor]) -> list[Tensor]:
    """Return -1, 0 or 1 for each element, with derivative 0."""
    return _each(torch._foreach_sign, torch.sign, xs)


def mean_squares(xs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the mean of x^2 of each tensor, as a vector of `dtype`; NaN for a tensor without elements.

    Example:
        >>> mean_squares([torch.tensor([1.0, 3.0])], torch.float32)
        tensor([5.])
    """
    if not is_plain():
        return torch.stack([x.to(dtype).square().mean() for x in xs])
    norms = torch.stack(list(torch._foreach_norm(xs, 2, dtype=dtype)))
    return torch.stack([square / x.numel() for x, square in zip(xs, norms.square().unbind(), strict=True)])


def largest(xs: list[Tensor]) -> Tensor:
    """Return the largest magnitude in each tensor, as a vector."""
    return torch.stack(list(torch._foreach_norm(xs, math.inf)))


def root_plus(xs: list[Tensor], ys: list[Tensor] | float) -> list[Tensor]:
    """Return sqrt(x) + y, where y is 0-d, or one number for all; the derivative of the root is taken as 0 at x = 0."""
    if not is_plain():
        zeros = [x == 0 for x in xs]
        roots = [torch.where(zero, 0, torch.where(zero, 1, x).sqrt()) for x, zero in zip(xs, zeros, strict=True)]
        sums = [root + y for root, y in zip(roots, ys if isinstance(ys, list) else [ys] * len(xs), strict=True)]
        return _kept(sums, xs)
    roots = torch._foreach_sqrt(xs)
    torch._foreach_add_(roots, ys)
    return list(roots)


def subtract_ratio(xs: list[Tensor], numerators: list[Tensor], denominators: list[Tensor]) -> list[Tensor]:
    """Return x - numerator / denominator."""
    if not is_plain():
        return [x - a / b for x, a, b in zip(xs, numerators, denominators, strict=True)]
    return list(torch._foreach_addcdiv(xs, numerators, denominators, value=-1))


def unbound(x: Tensor) -> list[Tensor]:
    """Return the elements of a vector as 0-d views of it."""
    return list(x.unbind())


def _kept(results: Sequence[Tensor], xs: list[Tensor]) -> list[Tensor]:
    """Return the results in the dtypes of the xs; only the dtypes of 0-d ones may differ."""
    return [new if new.dtype is x.dtype else new.to(x.dtype) for new, x in zip(results, xs, strict=True)]
