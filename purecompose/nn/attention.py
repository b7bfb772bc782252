"""Attention where torch's kernels for the CPU are slow: of short sequences in half precision, and under `vmap`.

torch's fused kernel never stores the attention weights. That saves memory on long sequences; on short ones its matrix
products are too small to be efficient, especially in the backward pass. The kernel treats every example alike, so under
`vmap` the members of a population are more examples: their dimension becomes part of the batch dimension. It has no
second derivative.
"""

from typing import Any

import torch
from torch import Tensor

from purecompose._support.functorch import is_mapped_gradient


MAX_LENGTH = 256
"""The greatest number of queries and of keys. Up to it products take 0.44 to 0.63 of the kernel's time in float32
forward, and 0.33 to 0.37 backward (`benchmarks/bf16.py`, EPYC with avx512_bf16)."""


def short_attention(
    dtype: torch.dtype,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return `F.scaled_dot_product_attention` in a dtype, or `None` for what it does not compute: long sequences,
    masks, dropout, groups of queries, and tensors that are not of a floating dtype up to float32.

    Scores and weights are rounded to the dtype; the softmax is computed in float32.

    Args:
        dtype: bfloat16 or float16.
        query: Shape (N, ..., L, D).
        key: Shape (N, ..., S, D).
        value: Shape (N, ..., S, E).
        attn_mask, dropout_p, is_causal, scale, enable_gqa: As in torch's function.

    Returns:
        Shape (N, ..., L, E), of the given dtype, its dimensions ordered in memory as those of the query, as by torch's
        kernel; or `None`.
    """
    tensors = (query, key, value)
    if attn_mask is not None or dropout_p or enable_gqa or any(x.is_nested for x in tensors):
        return None
    if any(not x.is_floating_point() or x.dtype is torch.float64 for x in tensors):
        return None
    batch_shape, (num_queries, width), num_keys = query.shape[:-2], query.shape[-2:], key.shape[-2]
    if not batch_shape or max(num_queries, num_keys) > MAX_LENGTH or not query.numel() or not value.numel():
        return None
    if key.shape[:-2] != batch_shape or value.shape[:-2] != batch_shape:
        return None
    are_heads_inside = query.ndim == 4 and query.stride(1) < query.stride(2)  # a view of (N, L, H, D)
    query, key, value = (x.to(dtype).flatten(0, -3) for x in tensors)
    bias = query.new_zeros(())
    if is_causal:
        bias = query.new_full((num_queries, num_keys), float("-inf")).triu(1)
    scores = torch.baddbmm(bias, query, key.mT, alpha=width**-0.5 if scale is None else scale)
    result = torch.bmm(scores.softmax(-1), value).unflatten(0, batch_shape)
    return result.transpose(1, 2).contiguous().transpose(1, 2) if are_heads_inside else result


_aten = torch.ops.aten


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return `F.scaled_dot_product_attention` of these arguments by the fused kernel, or `None` where it is not used.

    It is used on the CPU within `vmap` and at most one gradient, for queries, keys and values of (N, H, L, D), without
    mask and dropout. A causal mask is -inf before the kernel scales it, so that the scale has to be positive.
    """
    del enable_gqa  # no effect on tensors with the same number of heads
    if attn_mask is not None or dropout_p or query.device.type != "cpu" or not is_mapped_gradient():
        return None
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape or not query.numel() or not key.numel():
        return None
    if (*query.shape[:2], query.shape[3]) != (*key.shape[:2], key.shape[3]):
        return None
    if is_causal and scale is not None and scale <= 0:
        return None
    return _Fused.apply(query, key, value, is_causal, scale)[0]


class _Fused(torch.autograd.Function):
    """Attention of (N, H, L, D), and the logarithm of each softmax's denominator."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        inputs = _dense(query, key, value)
        return _aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, is_causal, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.is_causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_FusedGradient.apply(grads[0], *ctx.saved_tensors, ctx.is_causal, ctx.scale), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(_Fused, info.batch_size, in_dims, args)


class _FusedGradient(torch.autograd.Function):
    """The gradients of the inputs of `_Fused`, whose results are arguments as well."""

    @staticmethod
    def forward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *tensors, out, sums, is_causal, scale = args
        inputs = _dense(grad, *tensors)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, out, sums, 0.0, is_causal, scale=scale
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _mapped(_FusedGradient, info.batch_size, in_dims, args)


def _dense(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors; those whose elements of the last dimension are not side by side are copied."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _mapped(function: Any, num: int, in_dims: Any, args: Any) -> Any:
    """Apply a function of a batch to all members: their dimension is folded into that of the batch."""

    def fold(arg: Any, dim: int | None) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        arg = arg.expand(num, *arg.shape) if dim is None else arg.movedim(dim, 0)
        return arg.flatten(0, 1)

    results = function.apply(*map(fold, args, in_dims))
    return tuple(result.unflatten(0, (num, -1)) for result in results), (0,) * len(results)
