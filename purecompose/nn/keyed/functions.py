"""Keyed forms of torch's random functions: the `torch.rand` family, the fills, the samplers and the random layers.

Fills are distributions `(rng, shape, dtype, *parameters) -> tensor`, with the order, names and defaults of torch's
parameters (`low` and `high` replace `from` and `to`, since `from` is a keyword in Python), for all dtypes that torch
can fill, including integers and complex numbers.

A handler takes the pass's draws, torch's function and the call's own arguments (without `generator=` and `out=`), and
returns the result in its place. A layer that draws nothing (not training, p = 0) runs unchanged.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from purecompose._support.internals import is_fake, is_transforming
from purecompose.nn.keyed.draws import Draws, Handler, unkeyed
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
    """Fill with exponential numbers, none of them 0, as in torch."""
    wide = exponential(rng, shape, rate=lambd, dtype=wide_dtype(dtype))
    if dtype is torch.float16:  # which alone would round some to 0; this is its smallest positive number
        wide = wide.clamp_min(2.0**-24)
    return wide.to(dtype)


def _coins(draws: Draws, func: Any, p: float | Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return bools, true with probability `p`, a number or a tensor that broadcasts with `shape`."""
    if not isinstance(p, Tensor):
        return draws.draw(func, lambda rng, shape: bernoulli(rng, p, shape), shape, device)
    # Compared outside of the draw, because inside it the leading dimension may be split by examples, and p's is not.
    dtype = wide_dtype(p.dtype)
    return draws.draw(func, lambda rng, shape: uniform(rng, shape, dtype=dtype), shape, device) < p


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


def _empty(draws: Draws, func: Any, *args: Any, **options: Any) -> Tensor:
    """Return an uninitialised tensor; under vmap each member gets its own, which an in-place fill can write into.

    torch.distributions draw so: `torch.empty(shape).normal_()`.
    """
    value = func(*args, **options)
    if not is_transforming() or value.requires_grad or options.get("out") is not None:
        return value
    place = draws.rng.key[0] + draws.first_example
    return place.new_empty(value.shape, dtype=value.dtype, device=value.device)


def _new(draws: Draws, func: Any, self: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return `self.new(shape)`, as `_empty`; other arguments are the values of a tensor."""
    is_shape = all(isinstance(arg, torch.Size | int) for arg in args)
    return _empty(draws, func, self, *args, **options) if is_shape else func(self, *args, **options)


# `from` is a keyword in Python, and torch.nn.init has other names.
_NAMES = {"from": "low", "to": "high", "a": "low", "b": "high"}


def _fill(distribution: Fill) -> Handler:
    """Return the handler of an in-place fill, `tensor.normal_(mean, std)`."""

    def handler(draws: Draws, func: Any, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = {_NAMES.get(name, name): value for name, value in kwargs.items()}

        def sampler(rng: Rng, shape: Shape) -> Tensor:
            return distribution(rng, shape, self.dtype, *args, **named)

        return _write(func, self, draws.draw(func, sampler, self.shape, self.device))

    return handler


def _bernoulli_(draws: Draws, func: Any, self: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return _write(func, self, _coins(draws, func, p, self.shape, self.device))


def _make(
    draws: Draws,
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
    value = draws.draw(func, lambda rng, shape: fill(rng, shape, dtype), shape, device, per_example=per_example)
    if memory_format not in (None, torch.preserve_format):
        value = value.contiguous(memory_format=memory_format)
    return value.requires_grad_() if requires_grad else value


def _factory(fill: Fill) -> Handler:
    """Return the handler of `torch.rand(2, 3)`, `torch.rand((2, 3))` and `torch.rand(size=(2, 3))`."""

    def handler(draws: Draws, func: Any, *args: Any, size: Any = None, **options: Any) -> Tensor:
        size = args if size is None else size
        is_nested = len(size) == 1 and isinstance(size[0], (tuple, list))
        return _make(draws, func, fill, tuple(size[0] if is_nested else size), **options)

    return handler


def _like(draws: Draws, func: Any, fill: Fill, input: Tensor, **options: Any) -> Tensor:
    given = {name: value for name, value in options.items() if value is not None}
    options = {"dtype": input.dtype, "device": input.device, "memory_format": torch.preserve_format} | given
    if options["memory_format"] == torch.preserve_format and input.dim() == 4 and not input.is_contiguous():
        is_channels_last = input.is_contiguous(memory_format=torch.channels_last)
        options["memory_format"] = torch.channels_last if is_channels_last else None
    return _make(draws, func, fill, tuple(input.shape), **options)


def _like_factory(fill: Fill) -> Handler:
    """Return the handler of `torch.rand_like(input)`."""
    return lambda draws, func, input, **options: _like(draws, func, fill, input, **options)


def _range_of(args: list[Any], low: Any, high: Any) -> Fill:
    """Return the fill of `(high)` or `(low, high)`, each given by position or by name."""
    most = args.pop() if high is None else high
    least = (args.pop() if args else 0) if low is None else low
    return lambda rng, shape, dtype: randint(rng, shape, least, most).to(dtype)


def _randint(
    draws: Draws, func: Any, *args: Any, low: Any = None, high: Any = None, size: Any = None, **options: Any
) -> Tensor:
    rest = list(args)
    size = rest.pop() if size is None else size
    return _make(draws, func, _range_of(rest, low, high), tuple(size), **{"dtype": torch.int64, **options})


def _randint_like(
    draws: Draws, func: Any, input: Tensor, *args: Any, low: Any = None, high: Any = None, **options: Any
) -> Tensor:
    return _like(draws, func, _range_of(list(args), low, high), input, **options)


def _randperm(draws: Draws, func: Any, n: int, **options: Any) -> Tensor:
    def fill(rng: Rng, shape: Shape, dtype: torch.dtype) -> Tensor:
        return permutation(rng, shape[0]).to(dtype)

    options = {"dtype": torch.int64, **options}
    return _make(draws, func, fill, (n,), per_example=False, **options)


def _bernoulli(draws: Draws, func: Any, input: Tensor, p: float | None = None) -> Tensor:
    """Return 0 or 1 in the input's dtype, with the input as the probabilities, or with `p` for all elements."""
    return _coins(draws, func, input if p is None else p, input.shape, input.device).to(input.dtype)


def _normal_of(draws: Draws, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    """Handle `torch.normal` of tensors, of numbers, and of one of each. As in torch, no gradient flows to them."""
    tensors = [value.detach() for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:

        def fill(rng: Rng, shape: Shape, dtype: torch.dtype) -> Tensor:
            return fill_normal(rng, shape, dtype, mean, std)

        return _make(draws, func, fill, tuple(size), **options)
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in tensors))
    standard = draws.draw(func, lambda rng, shape: fill_normal(rng, shape, dtype), shape, tensors[0].device)
    mean, std = (value.detach() if isinstance(value, Tensor) else value for value in (mean, std))
    return mean + std * standard


def _clocks(draws: Draws, func: Any, like: Tensor) -> Tensor:
    """Return exponential numbers, none of them 0, in the shape and wide dtype of a tensor."""
    dtype = wide_dtype(like.dtype)
    return draws.draw(func, lambda rng, s: fill_exponential(rng, s, dtype), like.shape, like.device)


def _multinomial(draws: Draws, func: Any, input: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """Return indices drawn by the weights in each row.

    With replacement: the positions of uniform numbers among the cumulative weights. Without: the first arrivals of
    exponential clocks whose rates are the weights.
    """
    weights = input.detach().to(wide_dtype(input.dtype))
    if replacement:
        shape = (*input.shape[:-1], num_samples)
        total = weights.cumsum(-1)
        units = draws.draw(func, lambda rng, s: uniform(rng, s, dtype=torch.float64), shape, input.device)
        # right=True: a weight of 0 is an empty interval, which never contains the number.
        index = torch.searchsorted(total / total[..., -1:], units.to(total.dtype), right=True)
        return index.clamp_max(input.shape[-1] - 1)
    if num_samples > input.shape[-1]:
        return func(input, num_samples, replacement)  # torch's own error
    return (weights / _clocks(draws, func, weights)).topk(num_samples, dim=-1).indices


def _times(input: Tensor, factor: Tensor | float, inplace: bool) -> Tensor:
    """Return `input * factor`, written into `input` if `inplace`.

    Under vmap an input that all members share cannot hold different values for them: then the result is a new tensor.
    """
    if inplace:
        try:
            return input.mul_(factor)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
    return input * factor


def _drop(draws: Draws, func: Any, input: Tensor, p: float, shape: Sequence[int], inplace: bool) -> Tensor:
    """Return x * keep / (1 - p), with one decision for each element of `shape` (broadcast over the input)."""
    if p == 1:
        return _times(input, 0.0, inplace)
    # The input comes first, so that the result has its memory format. Backward keeps the mask, one byte per element.
    kept = _times(input, _coins(draws, func, 1.0 - p, shape, input.device), inplace)
    return _times(kept, 1.0 / (1.0 - p), inplace)


def _kernel(*, features: bool, inplace: bool) -> Handler:
    """Return the handler of one of torch's four kernels, `(input, p, train)`, which `nn.functional` calls."""

    def handler(draws: Draws, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        is_refused = features and input.dim() < 2
        if not train or not 0 < p <= 1 or input.numel() == 0 or is_refused:
            return func(input, p, train)
        # One decision for each element, or for each channel of each example, (N, C, 1, ...).
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if features else input.shape
        return _drop(draws, func, input, p, shape, inplace)

    return handler


def _attention(
    draws: Draws,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(q k^T * scale + mask), with dropout, times v, in plain operations.

    The fused kernels draw internally from a generator; without dropout they run as usual. The weights,
    (N, ..., H, L, S), are kept in memory.
    """
    if not 0 < dropout_p <= 1:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention takes `attn_mask` or `is_causal=True`, not both.")
    if not (attn_mask is None or type(attn_mask) in (Tensor, torch.nn.Parameter) or is_fake(attn_mask)):
        advice = "Pass the mask as a plain tensor, or set dropout_p=0."
        raise unkeyed(func, f"has no keyed dropout for a mask of type {type(attn_mask).__name__}", advice)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    products = (query * factor) @ key.transpose(-2, -1)
    scores = _masked(products, attn_mask, is_causal)  # in float32 if the mask is, also with queries in half precision
    # In half precision the softmax is computed in float32, as in the kernels; rows that may attend to nothing become
    # zeros. The operation's argument for a dtype has a derivative whose dtype a traced graph gets wrong.
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.ops.aten._safe_softmax(scores.to(wide), -1).to(products.dtype)
    return _drop(draws, func, weights, dropout_p, weights.shape, False) @ value


def _masked(scores: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    return scores + attn_mask


def _recurrent(draws: Draws, func: Any, *args: Any) -> tuple[Tensor, ...]:
    """Run an LSTM, GRU or RNN with dropout between layers: the kernel layer by layer, with keyed dropout between.

    Torch passes (input, hx, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first), or
    for packed sequences (data, batch_sizes, hx, weights, has_biases, num_layers, dropout, train,
    bidirectional).
    """
    is_packed = not isinstance(args[3], bool)
    num_layers, p, train = args[5:8] if is_packed else args[4:7]
    if not train or p == 0 or num_layers == 1:
        return func(*args)
    if is_packed:
        advice = "Pass padded sequences, or set dropout=0 and put nn.Dropout between single layers."
        raise unkeyed(func, "has no keyed dropout for packed sequences", advice)
    output, hx, weights, has_biases, _, _, _, bidirectional, batch_first = args
    num_directions = 2 if bidirectional else 1
    # Hidden and cell state for the LSTM, only the hidden state for the others.
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    per_layer = len(weights) // num_layers
    finals = []
    for layer in range(num_layers):
        if layer > 0:
            rows_first = output if batch_first else output.movedim(1, 0)
            dropped = _drop(draws, func, rows_first, p, rows_first.shape, False)
            output = dropped if batch_first else dropped.movedim(0, 1)
        rows = slice(layer * num_directions, (layer + 1) * num_directions)
        state = tuple(tensor[rows] for tensor in states)
        flat = weights[layer * per_layer : (layer + 1) * per_layer]
        state = state if isinstance(hx, (tuple, list)) else state[0]
        output, *final = func(output, state, flat, has_biases, 1, 0.0, train, bidirectional, batch_first)
        finals.append(final)
    return (output, *(torch.cat(tensors) for tensors in zip(*finals, strict=True)))


def _enter(draws: Draws, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a Python composite with the draws switched on, so that it handles the random calls inside."""
    with draws:
        return past_dispatch(func)(*args, **kwargs)


def _gumbel_softmax(
    draws: Draws, func: Any, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Return softmax((logits + g) / tau), g = -log(Exp(1)); if `hard`, its one-hot form with the soft form's gradient.

    Torch's composite takes a coarse logarithm in half precision, and scatters the one-hot form in place, as `vmap`
    cannot.
    """
    del eps  # without effect in torch, too
    gumbels = -_clocks(draws, func, logits).log().to(logits.dtype)
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    return torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0) - soft.detach() + soft


@functools.cache
def past_dispatch(func: types.FunctionType) -> types.FunctionType:
    """Return a copy of `func` that does not check whether a mode overrides it.

    With the mode on, the check would succeed without end. The copy has a snapshot of the module's names, taken at first
    use, in which the check returns False; the functions that it calls still perform their own checks.
    """
    questions = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **{question: lambda *args: False for question in questions}}
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_COMPOSITES = (*_DROPOUTS, F.multi_head_attention_forward)

HANDLERS: dict[Any, Handler] = {
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
    Tensor.bernoulli_: _bernoulli_,
    Tensor.exponential_: _fill(fill_exponential),
    Tensor.normal_: _fill(fill_normal),
    Tensor.uniform_: _fill(fill_uniform),
    **dict.fromkeys(_COMPOSITES, _enter),
    F.gumbel_softmax: _gumbel_softmax,
    F.scaled_dot_product_attention: _attention,
    torch.dropout: _kernel(features=False, inplace=False),
    torch.dropout_: _kernel(features=False, inplace=True),
    torch.feature_dropout: _kernel(features=True, inplace=False),
    torch.feature_dropout_: _kernel(features=True, inplace=True),
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
}
