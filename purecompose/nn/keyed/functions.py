"""Keyed forms of torch's random functions: the `torch.rand` family, the in-place fills, the samplers.

Fills are distributions `(rng, shape, dtype, *parameters) -> tensor`, with the order, names and defaults of torch's
parameters (`low` and `high` replace `from` and `to`, since `from` is a keyword in Python), for all dtypes that torch
can fill, including integers and complex numbers.

A handler takes the scope, torch's function and the call's own arguments (without `generator=`), and returns the result
in its place. Functions without a keyed form are not in the table: `detect` raises an error where they draw.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from purecompose._support.functorch import is_transforming
from purecompose.nn.keyed.scope import Handler, Scope, unkeyed
from purecompose.random.distributions import exponential
from purecompose.random.draws import bernoulli, normal, permutation, randint, uniform
from purecompose.random.keys import Rng


Shape = tuple[int, ...]
Fill = Callable[..., Tensor]
"""`(rng, shape, dtype, *parameters) -> Tensor`."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that formulas are computed in: float64 for results in double precision, else float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def fill_uniform(rng: Rng, shape: Shape, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(uniform(rng, (*shape, 2), dtype=wide_dtype(dtype), low=low, high=high)).to(dtype)
    if low == high:  # valid in torch, and needs no draw
        return torch.full(shape, low, dtype=dtype, device=rng.key.device)
    return uniform(rng, shape, low=low, high=high, dtype=dtype)


def fill_normal(rng: Rng, shape: Shape, dtype: torch.dtype, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    """Fill with normal numbers; for complex dtypes each part has half of the variance, as in torch."""
    if dtype.is_complex:
        parts = normal(rng, (*shape, 2), dtype=wide_dtype(dtype)) * math.sqrt(0.5)
        return (mean + std * torch.view_as_complex(parts)).to(dtype)
    standard = normal(rng, shape, dtype=wide_dtype(dtype))
    is_standard = isinstance(mean, (int, float)) and isinstance(std, (int, float)) and (mean, std) == (0, 1)
    return (standard if is_standard else mean + std * standard).to(dtype)


def fill_exponential(rng: Rng, shape: Shape, dtype: torch.dtype, lambd: float = 1.0) -> Tensor:
    return exponential(rng, shape, rate=lambd, dtype=wide_dtype(dtype)).to(dtype)


def _coins(scope: Scope, func: Any, p: float | Tensor, shape: Shape, device: torch.device) -> Tensor:
    """Return bools, true with probability `p`, a number or a tensor that broadcasts with `shape`."""
    if not isinstance(p, Tensor):
        return scope.draw(func, lambda rng, shape: bernoulli(rng, p, shape), shape, device)
    # Compared outside of the draw, because inside it the leading dimension may be split by examples, and p's is not.
    dtype = wide_dtype(p.dtype)
    return scope.draw(func, lambda rng, shape: uniform(rng, shape, dtype=dtype), shape, device) < p


def _write(func: Any, target: Tensor, value: Tensor) -> Tensor:
    """Fill `target`. Raises where vmap makes that impossible; returning another tensor would be a silent error."""
    try:
        return target.copy_(value)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        why = "fills a tensor shared by all members of a vmap with numbers that differ between members"
        advice = "Use a function that returns a new tensor: torch.rand, torch.randn_like, ..."
        raise unkeyed(func, why, advice) from error


def _empty(scope: Scope, func: Any, *args: Any, **options: Any) -> Tensor:
    """Return an uninitialised tensor; under vmap each member gets its own, which an in-place fill can write into.

    torch.distributions draw so: `torch.empty(shape).normal_()`.
    """
    value = func(*args, **options)
    if not is_transforming() or value.requires_grad or options.get("out") is not None:
        return value
    place = scope.rng.key[0] + scope.first_example
    return place.new_empty(value.shape, dtype=value.dtype, device=value.device)


def _new(scope: Scope, func: Any, self: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return `self.new(shape)`, as `_empty`; other arguments are the values of a tensor."""
    is_shape = all(isinstance(arg, torch.Size | int) for arg in args)
    return _empty(scope, func, self, *args, **options) if is_shape else func(self, *args, **options)


# `from` is a keyword in Python, and torch.nn.init has other names.
_NAMES = {"from": "low", "to": "high", "a": "low", "b": "high"}


def _fill(distribution: Fill) -> Handler:
    """Return the handler of an in-place fill, `tensor.normal_(mean, std)`."""

    def handler(scope: Scope, func: Any, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = {_NAMES.get(name, name): value for name, value in kwargs.items()}

        def sampler(rng: Rng, shape: Shape) -> Tensor:
            return distribution(rng, shape, self.dtype, *args, **named)

        return _write(func, self, scope.draw(func, sampler, self.shape, self.device))

    return handler


def _bernoulli_(scope: Scope, func: Any, self: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return _write(func, self, _coins(scope, func, p, self.shape, self.device))


def _make(
    scope: Scope,
    func: Any,
    fill: Fill,
    shape: Shape,
    *,
    per_example: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    memory_format: torch.memory_format | None = None,
    requires_grad: bool = False,
    **others: Any,
) -> Tensor:
    """Return a new tensor from `fill(rng, shape, dtype)`, with the options of torch's factory functions."""
    plain = (None, False, torch.strided)
    if rare := [name for name, value in others.items() if not any(value is one for one in plain)]:
        raise unkeyed(func, f"has no keyed form with {', '.join(rare)}=", "Make a plain tensor, and convert it.")
    dtype = dtype or torch.get_default_dtype()
    device = torch.get_default_device() if device is None else torch.device(device)
    value = scope.draw(func, lambda rng, shape: fill(rng, shape, dtype), shape, device, per_example=per_example)
    if memory_format not in (None, torch.preserve_format):
        value = value.contiguous(memory_format=memory_format)
    return value.requires_grad_() if requires_grad else value


def _factory(fill: Fill) -> Handler:
    """Return the handler of `torch.rand(2, 3)`, `torch.rand((2, 3))` and `torch.rand(size=(2, 3))`."""

    def handler(scope: Scope, func: Any, *args: Any, size: Any = None, **options: Any) -> Tensor:
        size = args if size is None else size
        is_nested = len(size) == 1 and isinstance(size[0], (tuple, list))
        return _make(scope, func, fill, tuple(size[0] if is_nested else size), **options)

    return handler


def _like(scope: Scope, func: Any, fill: Fill, input: Tensor, **options: Any) -> Tensor:
    given = {name: value for name, value in options.items() if value is not None}
    options = {"dtype": input.dtype, "device": input.device, "memory_format": torch.preserve_format} | given
    if options["memory_format"] == torch.preserve_format and input.dim() == 4 and not input.is_contiguous():
        is_channels_last = input.is_contiguous(memory_format=torch.channels_last)
        options["memory_format"] = torch.channels_last if is_channels_last else None
    return _make(scope, func, fill, tuple(input.shape), **options)


def _like_factory(fill: Fill) -> Handler:
    """Return the handler of `torch.rand_like(input)`."""
    return lambda scope, func, input, **options: _like(scope, func, fill, input, **options)


def _between(low: Any, high: Any) -> Fill:
    return lambda rng, shape, dtype: randint(rng, shape, low, high).to(dtype)


def _range_of(args: list[Any], low: Any, high: Any) -> Fill:
    """Return the fill of `(high)` or `(low, high)`, each given by position or by name."""
    high = args.pop() if high is None else high
    return _between((args.pop() if args else 0) if low is None else low, high)


def _randint(
    scope: Scope, func: Any, *args: Any, low: Any = None, high: Any = None, size: Any = None, **options: Any
) -> Tensor:
    rest = list(args)
    size = rest.pop() if size is None else size
    return _make(scope, func, _range_of(rest, low, high), tuple(size), **{"dtype": torch.int64, **options})


def _randint_like(
    scope: Scope, func: Any, input: Tensor, *args: Any, low: Any = None, high: Any = None, **options: Any
) -> Tensor:
    return _like(scope, func, _range_of(list(args), low, high), input, **options)


def _randperm(scope: Scope, func: Any, n: int, **options: Any) -> Tensor:
    def fill(rng: Rng, shape: Shape, dtype: torch.dtype) -> Tensor:
        return permutation(rng, shape[0]).to(dtype)

    options = {"dtype": torch.int64, **options}
    return _make(scope, func, fill, (n,), per_example=False, **options)


def _bernoulli(scope: Scope, func: Any, input: Tensor, p: float | None = None) -> Tensor:
    """Return 0 or 1 in the input's dtype, with the input as the probabilities, or with `p` for all elements."""
    return _coins(scope, func, input if p is None else p, input.shape, input.device).to(input.dtype)


def _normal_of(scope: Scope, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    """Handle `torch.normal` of tensors, of numbers, and of one of each. As in torch, no gradient flows to them."""
    tensors = [value.detach() for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:

        def fill(rng: Rng, shape: Shape, dtype: torch.dtype) -> Tensor:
            return fill_normal(rng, shape, dtype, mean, std)

        return _make(scope, func, fill, tuple(size), **options)
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in tensors))
    standard = scope.draw(func, lambda rng, shape: fill_normal(rng, shape, dtype), shape, tensors[0].device)
    mean, std = (value.detach() if isinstance(value, Tensor) else value for value in (mean, std))
    return mean + std * standard


def _clocks(scope: Scope, func: Any, like: Tensor) -> Tensor:
    """Return exponential numbers, none of them 0, in the shape and wide dtype of a tensor."""
    dtype = wide_dtype(like.dtype)
    return scope.draw(func, lambda rng, s: fill_exponential(rng, s, dtype), like.shape, like.device)


def _multinomial(scope: Scope, func: Any, input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """Return indices drawn by the weights in each row.

    With replacement: the positions of uniform numbers among the cumulative weights. Without: the first arrivals of
    exponential clocks whose rates are the weights.
    """
    weights = input.detach().to(wide_dtype(input.dtype))
    if replacement:
        shape = (*input.shape[:-1], num_samples)
        total = weights.cumsum(-1)
        draws = scope.draw(func, lambda rng, s: uniform(rng, s, dtype=torch.float64), shape, input.device)
        # right=True: a weight of 0 is an empty interval, which never contains the number.
        index = torch.searchsorted(total / total[..., -1:], draws.to(total.dtype), right=True)
        return index.clamp_max(input.shape[-1] - 1)
    if num_samples > input.shape[-1]:
        return func(input, num_samples, replacement)  # torch's own error
    return (weights / _clocks(scope, func, weights)).topk(num_samples, dim=-1).indices


def _gumbel_softmax(
    scope: Scope, func: Any, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Return softmax((logits + g) / tau), g = -log(Exp(1)); if `hard`, its one-hot form with the soft form's gradient.

    torch's own function is not used, because it fills a tensor in place, which a population cannot do.
    """
    gumbels = -_clocks(scope, func, logits).log().to(logits.dtype)
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    one_hot = torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
    return one_hot - soft.detach() + soft


FUNCTIONS: dict[Any, Handler] = {
    torch.empty: _empty,
    Tensor.new: _new,
    torch.rand: _factory(fill_uniform),
    torch.randn: _factory(fill_normal),
    torch.rand_like: _like_factory(fill_uniform),
    torch.randn_like: _like_factory(fill_normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _normal_of,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    F.gumbel_softmax: _gumbel_softmax,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.exponential_: _fill(fill_exponential),
    Tensor.normal_: _fill(fill_normal),
    Tensor.uniform_: _fill(fill_uniform),
}
