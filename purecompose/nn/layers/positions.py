"""Attention with linear biases in place of position embeddings.

    attention logits of head h:   q_i k_j / sqrt(d) - m_h |i - j|

References:
    Ofir Press, Noah A. Smith, Mike Lewis: Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation. ICLR 2022. https://arxiv.org/abs/2108.12409
"""

import math

import torch
from torch import Tensor, nn

from purecompose._support.checks import check_whole
from purecompose.nn.layers.attention import SelfAttention


__all__ = ["AlibiAttention", "NoPositions", "alibi_bias", "alibi_slopes"]


def alibi_slopes(
    num_heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Return the slope of each head, m_h = 2^(-8 h / H), h = 1 ... H.

    Where H is not a power of two: those of the next smaller power, then every second one of the next greater.

    Args:
        num_heads: H.
        dtype: Of the result, a floating one.
        device: Of the result.

    Returns:
        (H,), each between 0 and 1.

    Raises:
        TypeError, ValueError: H is not an int, or below 1.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** (check_whole(num_heads, "alibi_slopes: num_heads", 1).bit_length() - 1)
    # Computed where they are needed: a tensor made of Python's numbers would be copied to the device in every step.
    wide = torch.promote_types(dtype, torch.float32)
    first = torch.arange(1, power + 1, dtype=wide, device=device) * (-8 / power)
    between = (2 * torch.arange(num_heads - power, dtype=wide, device=device) + 1) * (-4 / power)
    return torch.cat((first, between)).exp2().to(dtype)


def alibi_bias(
    num_heads: int,
    length: int,
    *,
    is_causal: bool = True,
    first_query: int | Tensor = 0,
    num_queries: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the bias of attention's logits, -m_h |i - j|.

    Computed from the lengths, it has no size of its own: that of a shorter sequence is a corner of that of a longer.

    Args:
        num_heads: H.
        length: L, the number of keys.
        is_causal: Whether keys after the query get -inf, so that no other mask is needed.
        first_query: The place of the first query among the keys, an int or a tensor ().
        num_queries: Q, by default L.
        dtype: Of the result, which is computed in float32 at least.
        device: Of the result.

    Returns:
        (H, Q, L): head, query, key.

    Raises:
        TypeError, ValueError: H is not an int, or below 1; L, Q or the first query is not an int, or below 0.

    Example:
        >>> alibi_bias(1, 3, is_causal=False)[0].mul(256).tolist()
        [[-0.0, -1.0, -2.0], [-1.0, -0.0, -1.0], [-2.0, -1.0, -0.0]]
    """
    num_queries = length if num_queries is None else num_queries
    for role, value in (("length", length), ("first_query", first_query), ("num_queries", num_queries)):
        if not isinstance(value, torch.SymInt | Tensor):  # whose value is not to be asked for
            check_whole(value, f"alibi_bias: {role}", 0)
    queries = (torch.arange(num_queries, device=device) + first_query).unsqueeze(1)
    ahead = torch.arange(length, device=device) - queries
    wide = torch.promote_types(dtype, torch.float32)
    bias = -alibi_slopes(num_heads, dtype=wide, device=device).view(-1, 1, 1) * ahead.abs()
    return (bias.masked_fill(ahead > 0, -math.inf) if is_causal else bias).to(dtype)


class AlibiAttention(SelfAttention):
    """`SelfAttention` with linear biases, of its parameters and settings.

    Args:
        attention: The layer; its `qkv` and `out` are shared.

    Example:
        >>> AlibiAttention(SelfAttention(8, 2, is_causal=True))(torch.zeros(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(self, attention: SelfAttention) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.is_causal, self.dropout = attention.num_heads, attention.is_causal, attention.dropout
        self.qkv, self.out = attention.qkv, attention.out

    def bias(self, query: Tensor) -> Tensor:
        """(H, L, L)."""
        length = query.shape[-2]
        return alibi_bias(self.num_heads, length, is_causal=self.is_causal, dtype=query.dtype, device=query.device)


class NoPositions(nn.Module):
    """In place of an embedding of positions: zero, for sequences of any length.

    Example:
        >>> torch.ones(2, 3) + NoPositions()(torch.arange(3))
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    def forward(self, input: Tensor | int) -> Tensor:
        """Return a zero of shape () for any positions."""
        # Without dims, so that adding it changes no dtype.
        return torch.zeros((), device=input.device if isinstance(input, Tensor) else None)
