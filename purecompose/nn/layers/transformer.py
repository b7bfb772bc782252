"""The parts of a transformer: attention, positions, feed-forward parts, and a wrapper of its outputs.

    attention(x) = O concat_h softmax(Q_h x (K_h x)^T / sqrt(d)) V_h x
    with linear biases, the logits of head h are   q_i k_j / sqrt(d) - m_h |i - j|
    with normalised queries and keys, they are     q_i k_j / (rms(q_i) rms(k_j) sqrt(d)),   rms(x)^2 = mean(x^2) + eps
    a gated feed-forward layer                     act(G x) * (N x)

Source of attention: Ashish Vaswani et al.: Attention Is All You Need. NeurIPS 2017. https://arxiv.org/abs/1706.03762
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose._support.specs import check_number, check_whole, suggests_keywords


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
        qk_norm: Norm of the queries and of the keys of each head, or `None`; `algorithms.qk_norm` sets it.

    Raises:
        ValueError: The width is not a multiple of the number of heads, or the dropout is outside of [0, 1).

    Example:
        >>> SelfAttention(8, 2)(torch.zeros(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(self, width: int, num_heads: int, *, is_causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"SelfAttention: width={width} is not a multiple of num_heads={num_heads}")
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.dropout: float = check_number(dropout, "SelfAttention: dropout", 0, 1, below=True)
        self.qkv: nn.Linear = nn.Linear(width, 3 * width)
        self.out: nn.Linear = nn.Linear(width, width)
        self.qk_norm: nn.Module | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, L, d) to (N, L, d)."""
        return self.attend(*self.heads(input))

    def heads(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of (N, L, d), each (N, H, L, d / H)."""
        heads = self.qkv(input).unflatten(-1, (3, self.num_heads, -1))  # (N, L, 3, H, d / H)
        query, key, value = heads.unbind(2)
        if self.qk_norm is not None:
            query, key = self.qk_norm(heads[:, :, :2]).unbind(2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the layer's output, (N, L, d), for queries, keys and values (N, H, L, d / H)."""
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

    Example:
        >>> FeedForward(8, 32)(torch.zeros(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(
        self, width: int, hidden: int, act: Callable[[Tensor], Tensor] | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
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
        ValueError: In `forward`, there are more positions than vectors.

    Example:
        >>> PositionEmbedding(16, 8)(torch.zeros(3, 5, 8)).shape
        torch.Size([5, 8])
    """

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
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


@suggests_keywords
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


@suggests_keywords
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

    Example:
        >>> alibi_bias(1, 3, is_causal=False)[0].mul(256).tolist()
        [[-0.0, -1.0, -2.0], [-1.0, -0.0, -1.0], [-2.0, -1.0, -0.0]]
    """
    num_queries = length if num_queries is None else num_queries
    queries = (torch.arange(num_queries, device=device) + first_query).unsqueeze(1)
    ahead = torch.arange(length, device=device) - queries
    wide = torch.promote_types(dtype, torch.float32)
    bias = -alibi_slopes(num_heads, dtype=wide, device=device).view(-1, 1, 1) * ahead.abs()
    return (bias.masked_fill(ahead > 0, -math.inf) if is_causal else bias).to(dtype)


class AlibiAttention(SelfAttention):
    """`SelfAttention` with linear biases, and with the given layer's parameters and settings.

    Args:
        attention: The layer; its `qkv`, `out` and `qk_norm` are shared.

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
        self.qk_norm: nn.Module | None = attention.qk_norm

    def bias(self, query: Tensor) -> Tensor:
        """Return the bias, (H, L, L)."""
        length = query.shape[-2]
        return alibi_bias(self.num_heads, length, is_causal=self.is_causal, dtype=query.dtype, device=query.device)


class HeadNorm(nn.Module):
    """Norm of the queries and keys of a head, without parameters: x / sqrt(mean(x^2) + eps).

    Args:
        eps: Number that is added to the mean of the squares, above 0.
        scale: Factor of the products of queries and keys. Attention divides these by sqrt(d), so both are multiplied by
            sqrt(scale sqrt(d)); by default by 1.

    Example:
        >>> HeadNorm(1e-6)(torch.tensor([[3.0, 4.0, 0.0, 0.0]]))
        tensor([[1.2000, 1.6000, 0.0000, 0.0000]])
    """

    def __init__(self, eps: float, scale: float | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., d) to the same shape and dtype."""
        width, wide = input.shape[-1], torch.promote_types(input.dtype, torch.float32)
        # Not the square of the vector's norm, whose second derivative is NaN at zero; nor a product with itself, which
        # autocast computes in half precision. Float16 is too narrow for squares.
        own = input.to(wide) if input.dtype is torch.float16 else input
        factor = ((own * own).sum(-1, keepdim=True, dtype=wide) / width + self.eps).rsqrt()
        if self.scale is not None:
            factor = factor * math.sqrt(self.scale * math.sqrt(width))
        return input * factor.to(input.dtype)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"eps={self.eps}, scale={self.scale}"


class SquaredReLU(nn.Module):
    """The activation max(0, x)^2.

    Example:
        >>> SquaredReLU()(torch.tensor([-1.0, 3.0]))
        tensor([0., 9.])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map (...) to the same shape."""
        return torch.relu(input).square()


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


class GatedLinearUnit(nn.Module):
    """Layer from (..., d) to (..., d_ff), the product of an activated and a plain linear layer.

    Args:
        features: d.
        width: d_ff.
        act: The gate's activation, a module or a function, such as SiLU for SwiGLU.
        gate_bias: True to give the gate a bias.
        linear_bias: True to give the linear layer a bias.

    Attributes:
        gate: G, (d, d_ff).
        linear: N, (d, d_ff).
        act: The gate's activation.

    Example:
        >>> import torch
        >>> GatedLinearUnit(4, 6, nn.SiLU())(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 6])
    """

    def __init__(
        self,
        features: int,
        width: int,
        act: Callable[[Tensor], Tensor],
        *,
        gate_bias: bool = False,
        linear_bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate: nn.Linear = nn.Linear(features, width, bias=gate_bias)
        self.linear: nn.Linear = nn.Linear(features, width, bias=linear_bias)
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., d) to (..., d_ff)."""
        return self.act(self.gate(input)) * self.linear(input)


class ClassesSecond(nn.Module):
    """Wrapper that moves the classes of a network's outputs from the last dim to the second: (N, L, C) to (N, C, L).

    The outputs then have the form that `losses.cross_entropy` expects. The result is a view.

    Args:
        net: A network with logits `(N, ..., C)`; it becomes the submodule `net`.

    Example:
        >>> import torch
        >>> ClassesSecond(nn.Embedding(10, 7))(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 7, 5])
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the network's outputs with the classes in dim 1."""
        return self.net(inputs).movedim(-1, 1)
