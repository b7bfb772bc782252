"""Keyed forms of the random layers: the dropouts, attention and recurrent networks.

Each handler takes the scope, torch's function and the call's own arguments, and returns the result in its place. If a
call draws nothing (not training, p = 0), torch's function runs unchanged. Wrong arguments are also passed to it, so
that it raises its own error.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from purecompose._support.functorch import is_fake
from purecompose.nn.keyed.scope import Handler, Scope, unkeyed
from purecompose.random.draws import bernoulli


_safe_softmax = torch.ops.aten._safe_softmax


def _keep(scope: Scope, func: Any, p: float, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return bools, true where an element is kept, with probability 1 - p."""
    return scope.draw(func, lambda rng, shape: bernoulli(rng, 1.0 - p, shape), shape, device)


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


def _drop(scope: Scope, func: Any, input: Tensor, p: float, shape: Sequence[int], inplace: bool) -> Tensor:
    """Return x * keep / (1 - p), with one decision for each element of `shape` (broadcast over the input)."""
    if p == 1:
        return _times(input, 0.0, inplace)
    # The input comes first, so that the result has its memory format. Backward keeps the mask, one byte per element.
    kept = _times(input, _keep(scope, func, p, shape, input.device), inplace)
    return _times(kept, 1.0 / (1.0 - p), inplace)


def _dropout(scope: Scope, func: Any, input: Tensor, p=0.5, training=True, inplace=False) -> Tensor:
    if not training or not 0 < p <= 1 or input.numel() == 0:
        return func(input, p, training, inplace)
    return _drop(scope, func, input, p, input.shape, inplace)


def _kernel(*, features: bool, inplace: bool) -> Handler:
    """Return the handler of one of torch's four kernels, `(input, p, train)`, which `nn.functional` calls."""

    def handler(scope: Scope, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        is_refused = features and input.dim() < 2
        if not train or not 0 < p <= 1 or input.numel() == 0 or is_refused:
            return func(input, p, train)
        # One decision for each element, or for each channel of each example, (N, C, 1, ...).
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if features else input.shape
        return _drop(scope, func, input, p, shape, inplace)

    return handler


def _attention(
    scope: Scope,
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
    scores = _masked((query * factor) @ key.transpose(-2, -1), attn_mask, is_causal)
    # In half precision the softmax is computed in float32, as in the kernels; rows that may attend to nothing become
    # zeros.
    is_half = scores.dtype in (torch.float16, torch.bfloat16)
    weights = _safe_softmax(scores, -1, torch.float32 if is_half else None).to(scores.dtype)
    return _drop(scope, func, weights, dropout_p, weights.shape, False) @ value


def _masked(scores: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    return scores + attn_mask


def _recurrent(scope: Scope, func: Any, *args: Any) -> tuple[Tensor, ...]:
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
            output = _drop_sequence(scope, func, output, p, 0 if batch_first else 1)
        rows = slice(layer * num_directions, (layer + 1) * num_directions)
        state = tuple(tensor[rows] for tensor in states)
        flat = weights[layer * per_layer : (layer + 1) * per_layer]
        state = state if isinstance(hx, (tuple, list)) else state[0]
        output, *final = func(output, state, flat, has_biases, 1, 0.0, train, bidirectional, batch_first)
        finals.append(final)
    return (output, *(torch.cat(tensors) for tensors in zip(*finals, strict=True)))


def _drop_sequence(scope: Scope, func: Any, input: Tensor, p: float, batch_dim: int) -> Tensor:
    """Apply dropout with a draw per example in either layout, since the batch's dimension is known here."""
    if p == 1:
        return input * 0.0
    batch_first = input.movedim(batch_dim, 0)
    keep = _keep(scope, func, p, batch_first.shape, input.device)
    return input * keep.movedim(0, batch_dim) * (1.0 / (1.0 - p))


def _enter(scope: Scope, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a Python composite with the scope switched on, so that it handles the random calls inside."""
    with scope:
        return past_dispatch(func)(*args, **kwargs)


@functools.cache
def past_dispatch(func: types.FunctionType) -> types.FunctionType:
    """Return a copy of `func` that does not check whether a mode overrides it.

    With the mode on, the check would succeed again and again, without end. The copy shares the code and a snapshot of
    the module's names, taken at first use, in which the check always returns False; the functions that it calls still
    perform their own checks.
    """
    questions = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **{question: lambda *args: False for question in questions}}
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


COMPOSITES = (F.dropout1d, F.dropout2d, F.dropout3d, F.multi_head_attention_forward)

LAYERS: dict[Any, Handler] = {
    **dict.fromkeys(COMPOSITES, _enter),
    F.dropout: _dropout,
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
