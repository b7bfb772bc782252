"""The parts of a transformer: attention, its feed-forward part, and learned positions.

    attention(x) = O concat_h softmax(Q_h x (K_h x)^T / sqrt(d)) V_h x

References:
    Ashish Vaswani et al.: Attention Is All You Need. NeurIPS 2017. https://arxiv.org/abs/1706.03762
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose._support.checks import check_flag, check_number, check_whole


class SelfAttention(nn.Module):
    """Layer from (N, L, d) to (N, L, d): each position attends to all positions, or to those up to itself.

    Args:
        width: d.
        num_heads: H, a divisor of the width.
        is_causal: True if a position attends only to itself and earlier ones.
        dropout: Probability of dropping an attention weight in training, [0, 1).

    Attributes:
        qkv: (d, 3 d): queries, keys and values, each with the heads one after the other.
        out: (d, d).
        num_heads, is_causal, dropout: As given.

    Raises:
        ValueError: The width or the number of heads is below 1, the width is not a multiple of the number of heads, or
            the dropout is outside of [0, 1).
        TypeError: A setting has another type.

    Example:
        >>> SelfAttention(8, 2)(torch.zeros(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, num_heads: int, *, is_causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        check_whole(width, "SelfAttention: width", 1)
        check_whole(num_heads, "SelfAttention: num_heads", 1)
        if width % num_heads:
            raise ValueError(f"SelfAttention: width={width} is not a multiple of num_heads={num_heads}")
        self.num_heads = num_heads
        self.is_causal: bool = check_flag(is_causal, "SelfAttention: is_causal")
        self.dropout: float = check_number(dropout, "SelfAttention: dropout", 0, 1, below=True)
        self.qkv: nn.Linear = nn.Linear(width, 3 * width)
        self.out: nn.Linear = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, L, d) to (N, L, d)."""
        heads = self.qkv(input).unflatten(-1, (3, self.num_heads, -1))  # (N, L, 3, H, d / H)
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        bias, dropped = self.bias(query), self.dropout if self.training else 0.0
        is_causal = self.is_causal and bias is None
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropped, is_causal=is_causal
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def bias(self, query: Tensor) -> Tensor | None:
        """Return the bias of the logits, which broadcasts to (N, H, L, L) and includes the causal mask; `None` if there
        is none.

        Args:
            query: (N, H, L, d / H), for its shape, dtype and device.
        """
        del query
        return None

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"num_heads={self.num_heads}, is_causal={self.is_causal}, dropout={self.dropout}"


class FeedForward(nn.Module):
    """Layer from (..., d) to (..., d), applied to each position separately: `down(dropout(act(up(x))))`.

    Args:
        width: d.
        hidden: Width between the two linear layers.
        act: The activation, a module or a function; by default GELU.
        dropout: Probability of dropping a hidden value in training, [0, 1).

    Attributes:
        up: (d, hidden).
        act: The activation.
        dropout: `nn.Dropout`, or `nn.Identity` at 0.
        down: (hidden, d).

    Raises:
        ValueError: A size is below 1, or the dropout is outside of [0, 1).
        TypeError: A setting has another type.

    Example:
        >>> FeedForward(8, 32)(torch.zeros(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(
        self, width: int, hidden: int, act: Callable[[Tensor], Tensor] | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_whole(width, "FeedForward: width", 1)
        check_whole(hidden, "FeedForward: hidden", 1)
        check_number(dropout, "FeedForward: dropout", 0, 1, below=True)
        self.up: nn.Linear = nn.Linear(width, hidden)
        self.act: nn.GELU | Callable[[Tensor], Tensor] = nn.GELU() if act is None else act
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.down: nn.Linear = nn.Linear(hidden, width)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., d) to (..., d)."""
        return self.down(self.dropout(self.act(self.up(input))))


class PositionEmbedding(nn.Module):
    """A learned vector for each position, to be added to the embedding there.

    Args:
        max_length: Number of positions.
        width: d.

    Attributes:
        weight: (max_length, d), initially normal with standard deviation 0.02.

    Raises:
        ValueError: A size is below 1; or, in `forward`, there are more positions than vectors.
        TypeError: A size is not an int.

    Example:
        >>> PositionEmbedding(16, 8)(torch.zeros(3, 5, 8)).shape
        torch.Size([5, 8])
    """

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        check_whole(max_length, "PositionEmbedding: max_length", 1)
        check_whole(width, "PositionEmbedding: width", 1)
        self.weight: nn.Parameter = nn.Parameter(torch.empty(max_length, width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, input: Tensor | int) -> Tensor:
        """Return the vectors of the first L positions.

        Args:
            input: (N, L, ...), of which only the length is used, or L.

        Returns:
            (L, d).
        """
        length, places = input if isinstance(input, int) else input.shape[1], self.weight.shape[0]
        if length > places:
            raise ValueError(
                f"PositionEmbedding: expected a sequence of at most {places} positions, got {length}; truncate it, or "
                "build the model with a larger max_length"
            )
        return self.weight[:length]

    def extra_repr(self) -> str:
        """Return the shape."""
        return ", ".join(map(str, self.weight.shape))
