"""Tasks for pairs of methods that look for layers or inputs of different kinds: convolutions beside attention."""

import torch
from torch import Tensor, nn

from purecompose.nn.layers.transformer import FeedForward, SelfAttention
from purecompose.testing import Task
from purecompose.testing.tasks import MakeBatch, Residual


class Mixed(nn.Module):
    """Convolutions over a map of `channels`, then attention over the means of its columns, which have positions.

    Args:
        channels: Number of channels of the map that `first` makes of the inputs.
        first: Module that makes the map.
        norm: Module between the convolutions.
        last: Module that makes logits of attention's output `(batch, points, 4)`.
    """

    def __init__(self, channels: int, first: nn.Module, norm: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1, bias=False),
            norm,
            nn.Tanh(),
            nn.Conv2d(4, 4, 3, stride=(2, 1), padding=1, bias=False),
            nn.GroupNorm(1, 4),
            Residual(nn.Conv2d(4, 4, 1)),
        )
        self.position = nn.Parameter(0.1 * torch.randn(8, 4))
        self.attention, self.feed_forward = SelfAttention(4, 2, is_causal=True), FeedForward(4, 6)
        self.norm, self.last = nn.LayerNorm(4), last

    def forward(self, inputs: Tensor) -> Tensor:
        points = self.convolutions(self.first(inputs)).mean(2).transpose(1, 2)
        points = points + self.position[: points.shape[1]]
        points = points + self.attention(points)
        return self.last(self.norm(points + self.feed_forward(points)))


class AsMap(nn.Module):
    """Embedded ids `(batch, length, 4)` as a map of one row, `(batch, 4, 1, length)`."""

    def forward(self, embedded: Tensor) -> Tensor:
        return embedded.transpose(1, 2)[:, :, None]


class Logits(nn.Module):
    """Logits of the mean point, `(batch, 3)`, or of each point, `(batch, 7, points)`."""

    def __init__(self, *, of_each: bool) -> None:
        super().__init__()
        self.of_each, self.linear = of_each, nn.Linear(4, 7 if of_each else 3)

    def forward(self, points: Tensor) -> Tensor:
        return self.linear(points).transpose(1, 2) if self.of_each else self.linear(points.mean(1))


def images_net(seed: int) -> nn.Module:
    del seed
    return Mixed(2, nn.Identity(), nn.BatchNorm2d(4), Logits(of_each=False))


def unmixed_images_net(seed: int) -> nn.Module:
    """Return a network without batch statistics, which would mix examples."""
    del seed
    return Mixed(2, nn.Identity(), nn.GroupNorm(2, 4), Logits(of_each=False))


def sequences_net(seed: int) -> nn.Module:
    del seed
    return Mixed(4, AsMap(), nn.BatchNorm2d(4), Logits(of_each=True))


def sequences(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Return a batch of embedded tokens with the targets of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, 4, generator=generator), MakeBatch("tokens")(seed, size)[1]


def tokens_net(seed: int) -> nn.Module:
    del seed
    return Mixed(4, nn.Sequential(nn.Embedding(7, 4), AsMap()), nn.BatchNorm2d(4), Logits(of_each=True))


MIXED_TASKS = {
    "images": Task("mixed images", images_net, MakeBatch("images")),
    "images without batch statistics": Task("mixed images, no statistics", unmixed_images_net, MakeBatch("images")),
    "tokens": Task("mixed tokens", tokens_net, MakeBatch("tokens")),
    "sequences": Task("mixed sequences", sequences_net, sequences),
}
