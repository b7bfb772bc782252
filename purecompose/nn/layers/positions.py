"""Attention with linear biases instead of position embeddings.

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


def alibi_slopes(
    num_heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Return the slope of each head, m_h = 2^(-8 h / H), h = 1 ... H.

    If H is not a power of two: the slopes for the next smaller power, then every second one for the next greater.

    Args:
        num_heads: H.
        dtype: Floating dtype of the result.
        device: Device of the result.

    Returns:
        (H,), each between 0 and 1.

    Raises:
        TypeError, ValueError: H is not an int, or below 1.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** (check_whole(num_heads, "alibi_slopes: num_heads", 1).bit_length() - 1)
    # Computed on the device, because a tensor of Python's numbers would be copied to the device in every step.
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

    It is computed for any lengths: the bias for a shorter sequence is a corner of the bias for a longer one.

    Args:
        num_heads: H.
        length: L, the number of keys.
        is_causal: True to give keys after the query -inf, so that no other mask is needed.
        first_query: Position of the first query among the keys, an int or a tensor ().
        num_queries: Q, by default L.
        dtype: Dtype of the result, which is computed in float32 or wider.
        device: Device of the result.

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
        if not isinstance(value, torch.SymInt | Tensor):  # their values must not be read
            check_whole(value, f"alibi_bias: {role}", 0)
    queries = (torch.arange(num_queries, device=device) + first_query).unsqueeze(1)
    ahead = torch.arange(length, device=device) - queries
    wide = torch.promote_types(dtype, torch.float32)
    bias = -alibi_slopes(num_heads, dtype=wide, device=device).view(-1, 1, 1) * ahead.abs()
    return (bias.masked_fill(ahead > 0, -math.inf) if is_causal else bias).to(dtype)


class AlibiAttention(SelfAttention):
    """`SelfAttention` with linear biases, and with the given layer's parameters and settings.

    Args:
        attention: The layer; its `qkv` and `out` are shared.

    Example:
        >>> AlibiAttention(SelfAttention(8, 2, is_causal=True))(torch.zeros(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(self, attention: SelfAttention) -> None:
        nn.Module.__init__(self)
        self.num_heads: int = attention.num_heads
        self.is_causal: bool = attention.is_causal
        self.dropout: float = attention.dropout
        self.qkv: nn.Linear = attention.qkv
        self.out: nn.Linear = attention.out

    def bias(self, query: Tensor) -> Tensor:
        """Return the bias, (H, L, L)."""
        length = query.shape[-2]
        return alibi_bias(self.num_heads, length, is_causal=self.is_causal, dtype=query.dtype, device=query.device)


class NoPositions(nn.Module):
    """Replacement for a position embedding that returns zero, for sequences of any length.

    Example:
        >>> torch.ones(2, 3) + NoPositions()(torch.arange(3))
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    def forward(self, input: Tensor | int) -> Tensor:
        """Return a zero of shape () for any positions."""
        # Without dims, so that adding it changes no dtype.
        return torch.zeros((), device=input.device if isinstance(input, Tensor) else None)
