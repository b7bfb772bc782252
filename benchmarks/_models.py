"""The networks that a GPU is measured with: a ResNet-18 for CIFAR-10's images and a small GPT. Plain modules."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from purecompose.models import ResidualBlock


__all__ = ["GPT", "resnet18"]


def resnet18(num_classes: int = 10, *, width: int = 64) -> nn.Sequential:
    """A ResNet-18 in the form for images of 32x32: a first convolution of 3x3, four stages of two blocks each."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage in range(4):
        for block in range(2):
            layers.append(ResidualBlock(channels, width * 2**stage, stride=2 if stage and not block else 1))
            channels = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class _Block(nn.Module):
    """Causal attention and a feed-forward part, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.fall(F.gelu(self.rise(self.norm2(x))))


class GPT(nn.Module):
    """A decoder without dropout: token ids (N, L) to logits (N, vocabulary, L), classes in dim 1."""

    def __init__(self, *, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places)))).transpose(1, 2)
