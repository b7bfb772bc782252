"""Attention of short sequences in half precision, where torch's kernels for the CPU are slow.

torch's fused kernel never stores the attention weights. That saves memory on long sequences; on short ones its matrix
products are too small to be efficient, especially in the backward pass.
"""

import torch
from torch import Tensor


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
