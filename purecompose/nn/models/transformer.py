"""Transformers: one for images, and one that continues sequences of tokens.

References:
    Alexey Dosovitskiy et al.: An Image Is Worth 16x16 Words: Transformers for Image Recognition at Scale. ICLR 2021.
    https://arxiv.org/abs/2010.11929
    Alec Radford et al.: Language Models are Unsupervised Multitask Learners. 2019.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from purecompose._support.specs import shown
from purecompose.nn.layers.transformer import FeedForward, PositionEmbedding, SelfAttention
from purecompose.nn.models.convolutional import Dropout, Size
from purecompose.schedule.declared import checked


_STD = 0.02


class TransformerBlock(nn.Module):
    """`x + attention(norm(x))`, and then `x + feed_forward(norm(x))`, with dropout before each sum.

    Args:
        width: d.
        num_heads: Number of attention heads, a divisor of the width.
        is_causal: True if a position attends only to itself and earlier ones.
        dropout: Probability of dropping an attention weight, or a value that is added to x, [0, 1).

    Example:
        >>> TransformerBlock(8, 2)(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, width: int, num_heads: int, *, is_causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1: nn.LayerNorm = nn.LayerNorm(width)
        self.norm2: nn.LayerNorm = nn.LayerNorm(width)
        self.attention: SelfAttention = SelfAttention(width, num_heads, is_causal=is_causal, dropout=dropout)
        self.feed_forward: FeedForward = FeedForward(width, 4 * width)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (N, L, d) to (N, L, d)."""
        attended = inputs + self.dropout(self.attention(self.norm1(inputs)))
        return attended + self.dropout(self.feed_forward(self.norm2(attended)))


class VisionTransformer(nn.Module):
    """Network from images (N, channels, H, W) to logits (N, num_classes); see `vit`.

    Args:
        in_shape, num_classes, patch_size, width, depth, num_heads, dropout, pool: As for `vit`.

    Attributes:
        patches: A convolution whose kernel and stride have the size of a patch.
        token: Class token, (1, 1, d), placed before the patches; None if their mean is used.
        positions: Learned vectors for the positions.
        blocks: `nn.Sequential` of `TransformerBlock`.
        norm, head: Norm and linear layer after the blocks.
        image_size: (H, W).
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        patch_size: int,
        width: int,
        depth: int,
        num_heads: int,
        dropout: float,
        pool: str,
    ) -> None:
        super().__init__()
        channels, *image_size = in_shape
        self.image_size: tuple[int, ...] = tuple(image_size)
        self.patch_size: int = patch_size
        self.patches: nn.Conv2d = nn.Conv2d(channels, width, patch_size, stride=patch_size)
        self.token: nn.Parameter | None = nn.Parameter(torch.zeros(1, 1, width)) if pool == "token" else None
        num_places = math.prod(size // patch_size for size in image_size) + (pool == "token")
        self.positions: nn.Module = PositionEmbedding(num_places, width)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        blocks = (TransformerBlock(width, num_heads, dropout=dropout) for _ in range(depth))
        self.blocks: nn.Sequential = nn.Sequential(*blocks)
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        self.head: nn.Linear = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _draw_truncated(module.weight, _STD)
                nn.init.zeros_(module.bias)
            elif isinstance(module, PositionEmbedding):
                _draw_truncated(module.weight, _STD)
        _draw_truncated(self.patches.weight, self.patches.weight[0].numel() ** -0.5)
        if self.patches.bias is not None:
            nn.init.zeros_(self.patches.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, channels, H, W) to (N, num_classes)."""
        self._check_size(tuple(images.shape[-2:]))
        places = self.patches(images).flatten(2).transpose(1, 2)  # (N, L, d)
        if self.token is not None:
            places = torch.cat([self.token.expand(places.shape[0], 1, -1), places], 1)
        places = self.norm(self.blocks(self.dropout(places + self.positions(places))))
        return self.head(places.mean(1) if self.token is None else places[:, 0])

    def _check_size(self, size: tuple[int, ...]) -> None:
        side = self.patch_size
        if not isinstance(self.positions, PositionEmbedding):  # a surgery may have put in a layer without a length
            if any(number % side for number in size):
                raise ValueError(f"vit: patches of {side}x{side} do not fit images of {_by(size)}; resize them")
        elif size != self.image_size:
            raise ValueError(
                f"vit: expected images of {_by(self.image_size)}, for which it has positions, got {_by(size)}; resize "
                "them, or build the network for this size"
            )


class GPT(nn.Module):
    """Network from tokens (N, L) to the logits (N, L, vocabulary) of the next tokens; see `gpt`.

    Args:
        vocabulary, max_length, width, depth, num_heads, dropout, is_tied: As for `gpt`.

    Attributes:
        tokens: The embedding of tokens.
        positions: Learned vectors for the positions.
        blocks: `nn.Sequential` of causal `TransformerBlock`s.
        norm, head: Norm and linear layer after the blocks; the head has no bias.

    Example:
        >>> net = GPT(65, 16, 8, 1, 2, 0.0, is_tied=True)
        >>> net(torch.zeros(1, 16, dtype=torch.int64)).shape
        torch.Size([1, 16, 65])
    """

    def __init__(
        self, vocabulary: int, max_length: int, width: int, depth: int, num_heads: int, dropout: float, is_tied: bool
    ) -> None:
        super().__init__()
        self.tokens: nn.Embedding = nn.Embedding(vocabulary, width)
        self.positions: nn.Module = PositionEmbedding(max_length, width)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        blocks = [TransformerBlock(width, num_heads, is_causal=True, dropout=dropout) for _ in range(depth)]
        self.blocks: nn.Sequential = nn.Sequential(*blocks)
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        self.head: nn.Linear = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in blocks:
            # The residual stream is a sum of 2 * depth branches, which would otherwise grow with the depth.
            for last in (block.attention.out, block.feed_forward.down):
                nn.init.normal_(last.weight, std=_STD / math.sqrt(2 * depth))
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (N, L), of an integer dtype, to (N, L, vocabulary)."""
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(f"gpt: expected tokens (N, L) of an integer dtype, got {shown(tokens)}")
        embedded = self.tokens(tokens)
        return self.head(self.norm(self.through_blocks(self.dropout(embedded + self.positions(embedded)), tokens)))

    def through_blocks(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        """Return the output of the blocks for (N, L, d); a subclass may let them depend on the tokens (N, L)."""
        del tokens
        return self.blocks(inputs)


@checked
def vit(
    in_shape: Sequence[int],
    num_classes: Size,
    *,
    patch_size: Size = 4,
    width: Size = 64,
    depth: Size = 4,
    num_heads: Size = 4,
    dropout: Dropout = 0.0,
    pool: Literal["token", "mean"] = "token",
) -> VisionTransformer:
    """Return a small vision transformer: patches as tokens, learned positions, pre-norm blocks, one linear layer.

    Initial weights are truncated normal with standard deviation 0.02; biases and the class token are 0.

    Args:
        in_shape: (channels, height, width) of an image.
        num_classes: Length of the logits.
        patch_size: Side of a patch, a divisor of the image's sides.
        width: Length of the vector at each position.
        depth: Number of blocks.
        num_heads: Number of heads in each attention, a divisor of the width.
        dropout: Probability of dropping an attention weight, or a value that is added to a vector, [0, 1).
        pool: Vector that is classified: "token" for a class token before the patches, "mean" for the patches' mean.

    Raises:
        ValueError: A size is below 1, patches or heads do not fit, the pool is unknown, or the dropout is outside
            [0, 1); in `forward`, images have another size.
        TypeError: A setting has another type.

    Example:
        >>> vit((3, 32, 32), 10, width=16, depth=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    if len(in_shape) != 3:
        raise ValueError(f"vit: expected in_shape (channels, height, width), got {tuple(in_shape)}")
    if any(size % patch_size for size in in_shape[1:]):
        raise ValueError(f"vit: patch_size={patch_size} does not divide images of {_by(in_shape[1:])}")
    return VisionTransformer(in_shape, num_classes, patch_size, width, depth, num_heads, dropout, pool)


@checked
def gpt(
    vocabulary: Size,
    max_length: Size,
    *,
    width: Size = 128,
    depth: Size = 4,
    num_heads: Size = 4,
    dropout: Dropout = 0.0,
    is_tied: bool = True,
) -> GPT:
    """Return a small decoder for language: tokens, learned positions, pre-norm causal blocks, one linear layer.

    Initial weights are as in GPT-2: normal with standard deviation 0.02, divided by sqrt(2 depth) in the last layer of
    each branch; biases are 0.

    Args:
        vocabulary: Number of tokens.
        max_length: Greatest length of a sequence; shorter ones are accepted as they are.
        width: Length of the vector at each position.
        depth: Number of blocks.
        num_heads: Number of heads in each attention, a divisor of the width.
        dropout: Probability of dropping an attention weight, or a value that is added to a vector, [0, 1).
        is_tied: True if the last layer shares the weights of the first.

    Example:
        >>> gpt(65, 16, width=16, depth=1)(torch.zeros(2, 12, dtype=torch.int64)).shape
        torch.Size([2, 12, 65])
    """
    return GPT(vocabulary, max_length, width, depth, num_heads, dropout, is_tied)


def _draw_truncated(weight: Tensor, std: float) -> None:
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _by(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
