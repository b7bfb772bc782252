"""Linear and convolution layers as a product of two thinner ones.

References:
    Xiangyu Zhang, Jianhua Zou, Kaiming He, Jian Sun: Accelerating Very Deep Convolutional Networks for Classification and
    Detection. TPAMI 2016. https://arxiv.org/abs/1505.06798
"""

import math

import torch
from torch import Tensor, nn

from purecompose.layers.squeeze_excite import latent_size


__all__ = [
    "FactorizedConv2d",
    "FactorizedLinear",
    "latent_of",
    "max_latent",
    "split_weight",
]


def split_weight(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The two factors whose product is the closest to a matrix of all of a rank, by its singular values.

    Args:
        weight: (out, in), floating.
        rank: k, at most min(out, in).

    Returns:
        (k, in) and (out, k), each with the square roots of the singular values.

    Example:
        >>> first, second = split_weight(torch.eye(3), 3)
        >>> torch.allclose(second @ first, torch.eye(3))
        True
    """
    wide = weight.double()
    left, values, right = torch.linalg.svd(wide, full_matrices=False)
    roots = values[:rank].sqrt()
    first, second = roots.unsqueeze(1) * right[:rank], left[:, :rank] * roots
    return first.to(weight.dtype), second.to(weight.dtype)


def max_latent(module: nn.Linear | nn.Conv2d) -> int:
    """The greatest width between the factors with which they take fewer multiplications than the layer does.

    Example:
        >>> max_latent(nn.Linear(8, 8)), max_latent(nn.Conv2d(8, 8, 3))
        (3, 7)
    """
    out, fan_in = module.weight.shape[0], module.weight[0].numel()
    return math.ceil(fan_in * out / (fan_in + out) - 1)


def latent_of(module: nn.Linear | nn.Conv2d, latent: float) -> int:
    """A width given as a number, or below 1 as a share of the smaller side of the layer."""
    return latent_size(latent, min(module.weight.shape[:2]))


class FactorizedLinear(nn.Module):
    """(..., in) to (..., k) to (..., out): the closest of its rank to the layer that was given.

    Attributes:
        first: (in, k), without bias.
        second: (k, out), with the layer's bias.
    """

    def __init__(self, linear: nn.Linear, latent_features: int) -> None:
        super().__init__()
        options = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.first = nn.Linear(linear.in_features, latent_features, bias=False, **options)
        self.second = nn.Linear(latent_features, linear.out_features, bias=linear.bias is not None, **options)
        with torch.no_grad():
            first, second = split_weight(linear.weight, latent_features)
        self.first.weight, self.second.weight = nn.Parameter(first), nn.Parameter(second)
        self.second.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self.second(self.first(input))


class FactorizedConv2d(nn.Module):
    """A convolution to k channels, and one of a single place to the channels there were: the closest of its rank.

    Attributes:
        first: (in, k, h, w), without bias, with the stride, padding and dilation of the convolution that was given.
        second: (k, out, 1, 1), with its bias.
    """

    def __init__(self, conv: nn.Conv2d, latent_channels: int) -> None:
        super().__init__()
        options = {"device": conv.weight.device, "dtype": conv.weight.dtype}
        kernel: tuple[int, int] = conv.kernel_size  # pyright: ignore[reportAssignmentType]
        self.first = nn.Conv2d(
            conv.in_channels,
            latent_channels,
            kernel,
            stride=conv.stride,  # pyright: ignore[reportArgumentType]
            padding=conv.padding,  # pyright: ignore[reportArgumentType]
            dilation=conv.dilation,  # pyright: ignore[reportArgumentType]
            padding_mode=conv.padding_mode,
            bias=False,
            **options,
        )
        self.second = nn.Conv2d(latent_channels, conv.out_channels, 1, bias=conv.bias is not None, **options)
        with torch.no_grad():
            first, second = split_weight(conv.weight.flatten(1), latent_channels)
        self.first.weight = nn.Parameter(first.view(self.first.weight.shape))
        self.second.weight = nn.Parameter(second.view(self.second.weight.shape))
        self.second.bias = conv.bias

    def forward(self, input: Tensor) -> Tensor:
        """(N, in, H, W) to what the convolution gives."""
        return self.second(self.first(input))
