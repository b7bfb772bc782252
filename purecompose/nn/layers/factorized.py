"""Linear layers and convolutions as products of two thinner ones, the closest to the given layer's weight."""

import math
from typing import Any

import torch
from torch import Tensor, nn


def max_latent(module: nn.Linear | nn.Conv2d) -> int:
    """Return the greatest width between two factors with which they take fewer multiplications than the layer does.

    Example:
        >>> max_latent(nn.Linear(8, 8)), max_latent(nn.Conv2d(8, 8, 3))
        (3, 7)
    """
    out, fan_in = module.weight.shape[0], module.weight[0].numel()
    return math.ceil(fan_in * out / (fan_in + out) - 1)


def split_weight(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return two factors whose product is the closest to a matrix among all of a given rank, by its singular values.

    Args:
        weight: (out, in), floating.
        rank: k, from 1 to min(out, in).

    Returns:
        (k, in) and (out, k), contiguous, each scaled by the square roots of the singular values. If a singular value is
        almost zero, the first factor has a row of the usual norm and only the second is small: if both were zero, they
        would have no gradient and would never train.

    Example:
        >>> first, second = split_weight(torch.eye(3), 3)
        >>> torch.allclose(second @ first, torch.eye(3))
        True
    """
    exact = weight.cpu().double() if weight.device.type == "mps" else weight.double()
    left, values, right = torch.linalg.svd(exact, full_matrices=False)
    values = values[:rank]
    is_there = values > 1e-6 * values[0]
    # For a matrix of zeros, the scale is that of a new layer's initial weights.
    usual = values[is_there].sqrt().mean() if is_there.any() else values.new_tensor(3**-0.5)
    scales = torch.where(is_there, values.sqrt(), usual)
    first, second = scales.unsqueeze(1) * right[:rank], left[:, :rank] * (values / scales)
    return first.to(weight).contiguous(), second.to(weight).contiguous()


class _Factorized(nn.Module):
    """A layer and a second one without kernel or stride, whose product is the closest one to a given layer.

    Args:
        first, second: The new layers, without bias and on meta, so that no values are drawn.
    """

    first: Any
    second: Any

    def __init__(self, layer: nn.Linear | nn.Conv2d, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        thin, wide = split_weight(layer.weight.detach().flatten(1), self.first.weight.shape[0])
        is_trained = layer.weight.requires_grad
        self.first.weight = nn.Parameter(thin.view(self.first.weight.shape), is_trained)
        self.second.weight = nn.Parameter(wide.view(self.second.weight.shape), is_trained)
        self.second.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The product of the factors, in the shape of the given layer's weight."""
        return (self.second.weight.flatten(1) @ self.first.weight.flatten(1)).view(-1, *self.first.weight.shape[1:])

    @property
    def bias(self) -> Tensor | None:
        """(out,), or `None`."""
        return self.second.bias

    def forward(self, input: Tensor) -> Tensor:
        """Map an input to the shape of the given layer's output."""
        return self.second(self.first(input))


class FactorizedLinear(_Factorized):
    """Layer from (..., in) to (..., k) to (..., out): the closest approximation of the given layer with rank k.

    `weight` is the factors' product, computed on access.

    Args:
        linear: The layer. Its bias is reused, its weight is read.
        latent_features: k, from 1 to the smaller side of the weight, at which the approximation is exact.

    Attributes:
        first: (in, k), without bias.
        second: (k, out), with the layer's bias.

    Raises:
        ValueError: k is out of range.

    Example:
        >>> linear = nn.Linear(64, 64)
        >>> sum(param.numel() for param in FactorizedLinear(linear, 8).parameters()), linear.weight.numel()
        (1088, 4096)
    """

    def __init__(self, linear: nn.Linear, latent_features: int) -> None:
        _check_rank(linear, latent_features, "FactorizedLinear: latent_features")
        sizes = (linear.in_features, latent_features), (latent_features, linear.out_features)
        first, second = (nn.Linear(*pair, bias=False, device="meta") for pair in sizes)
        super().__init__(linear, first, second)
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features

    @property
    def latent_features(self) -> int:
        """k."""
        return self.first.out_features


class FactorizedConv2d(_Factorized):
    """A convolution to k channels and a 1x1 convolution to the original channels: the closest one with rank k.

    It has the public attributes of the given convolution; `weight` is the factors' product, computed on access.

    Args:
        conv: The convolution, with one group. Its bias is reused, its weight is read.
        latent_channels: k, from 1 to the smaller of the number of output channels and the size of a patch, at which
            the approximation is exact.

    Attributes:
        first: (in, k, h, w), without bias, with the given convolution's stride, padding and dilation.
        second: (k, out, 1, 1), with the given convolution's bias.

    Raises:
        NotImplementedError: The convolution has several groups.
        ValueError: k is out of range.

    Example:
        >>> conv = nn.Conv2d(8, 8, 3)
        >>> sum(param.numel() for param in FactorizedConv2d(conv, 2).parameters()), conv.weight.numel()
        (168, 576)
    """

    def __init__(self, conv: nn.Conv2d, latent_channels: int) -> None:
        if conv.groups != 1:
            raise NotImplementedError(f"FactorizedConv2d: expected a convolution with groups=1, got {conv.groups}")
        _check_rank(conv, latent_channels, "FactorizedConv2d: latent_channels")
        names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
        options: dict[str, Any] = {name: getattr(conv, name) for name in names}
        first = nn.Conv2d(conv.in_channels, latent_channels, **options, bias=False, device="meta")
        second = nn.Conv2d(latent_channels, conv.out_channels, 1, bias=False, device="meta")
        super().__init__(conv, first, second)
        for name in ("in_channels", "out_channels", "groups", *names):
            setattr(self, name, getattr(conv, name))

    @property
    def latent_channels(self) -> int:
        """k."""
        return self.first.out_channels


def _check_rank(layer: nn.Linear | nn.Conv2d, rank: Any, where: str) -> None:
    full = min(layer.weight.shape[0], layer.weight[0].numel())
    if not 1 <= rank <= full:
        raise ValueError(f"{where}: expected an int in [1, {full}], got {rank!r} ({type(rank).__name__})")
