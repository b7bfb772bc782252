"""Attention of short sequences in half precision by batched products, for CPUs.

torch's fused kernel never has all weights in memory, which pays for long sequences; on short ones its products are too
small, most of all backward.
"""

import torch
from torch import Tensor


__all__ = ["LONGEST", "short_attention"]

LONGEST = 512
"""The greatest number of queries and of keys. `benchmarks/bf16.py` measures 64 to 512: products in bfloat16 take 0.4 to
0.6 of the fused kernel's time in float32. With more the weights, (N, H, L, S), would need much memory."""


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
    """Return `F.scaled_dot_product_attention` in a dtype, or `None` where the sequences are long, or with a mask,
    dropout, groups of queries, or float64.

    Scores and weights are rounded to the dtype; the softmax is computed in float32.

    Args:
        dtype: bfloat16 or float16.
        query: Shape (N, ..., L, D).
        key: Shape (N, ..., S, D).
        value: Shape (N, ..., S, E).
        attn_mask, dropout_p, is_causal, scale, enable_gqa: As in torch's function.

    Returns:
        Shape (N, ..., L, E), of the given dtype, or `None`.
    """
    if attn_mask is not None or dropout_p or enable_gqa or query.dtype is torch.float64 or query.is_nested:
        return None
    first, (num_queries, width), num_keys = query.shape[:-2], query.shape[-2:], key.shape[-2]
    if not first or max(num_queries, num_keys) > LONGEST or not query.numel() or not value.numel():
        return None
    if key.shape[:-2] != first or value.shape[:-2] != first:
        return None
    query, key, value = (x.to(dtype).flatten(0, -3) for x in (query, key, value))
    hidden = query.new_zeros(())
    if is_causal:
        hidden = query.new_full((num_queries, num_keys), float("-inf")).triu(1)
    scores = torch.baddbmm(hidden, query, key.mT, alpha=width**-0.5 if scale is None else scale)
    return torch.bmm(scores.softmax(-1), value).unflatten(0, first)
