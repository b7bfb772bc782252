"""Attention that knows distances: linear biases in place of position embeddings.

References:
    Ofir Press, Noah A. Smith, Mike Lewis: Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation. ICLR 2022. https://arxiv.org/abs/2108.12409
"""

import math

import torch
from torch import Tensor


__all__ = ["alibi_bias", "alibi_slopes"]


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head, m_h = 2^(-8 h / H).

    Where H is no power of two: those of the next smaller power, and every second one of the next greater.

    Example:
        >>> alibi_slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-4 * (2 * head + 1) / power) for head in range(power)]
    return (slopes + between)[:num_heads]


def alibi_bias(
    num_heads: int,
    length: int,
    *,
    is_causal: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """What is added to the logits of attention, -m_h |i - j|.

    Args:
        num_heads: H.
        length: L.
        is_causal: Whether keys after the query get -inf, so that no other mask is needed.
        dtype: Of the result.
        device: Of the result.

    Returns:
        (H, L, L): head, query, key.

    Example:
        >>> alibi_bias(1, 3, is_causal=False)[0].mul(256).tolist()
        [[-0.0, -1.0, -2.0], [-1.0, -0.0, -1.0], [-2.0, -1.0, -0.0]]
    """
    places = torch.arange(length, dtype=dtype, device=device)
    distance = (places.unsqueeze(1) - places).abs()
    heads = torch.stack([-slope * distance for slope in alibi_slopes(num_heads)])
    return heads + torch.full_like(distance, -math.inf).triu(1) if is_causal else heads
