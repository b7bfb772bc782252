"""Linear and convolution layers as a product of two thinner ones, with nothing between them.

References:
    Xiangyu Zhang, Jianhua Zou, Kaiming He, Jian Sun: Accelerating Very Deep Convolutional Networks for Classification
    and Detection. TPAMI 2016. https://arxiv.org/abs/1505.06798
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose.nn.layers._forms import recast
from purecompose.nn.layers.low_rank import LowRankSolution, factorize_conv2d, factorize_matrix, split_weight


class FactorizedLinear(nn.Module):
    """Layer from (..., in) to (..., k) to (..., out): the closest approximation of the given layer with rank k.

    `weight` and `bias` are available as in a linear layer; the weight is the factors' product, computed on access.

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
        super().__init__()
        _check_latent("FactorizedLinear: latent_features", latent_features, linear.weight)
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features
        self.first: nn.Linear = _empty_linear(linear.in_features, latent_features)
        self.second: nn.Linear = _empty_linear(latent_features, linear.out_features)
        first, second = split_weight(linear.weight.detach(), latent_features)
        is_trained = linear.weight.requires_grad
        self.first.weight, self.second.weight = nn.Parameter(first, is_trained), nn.Parameter(second, is_trained)
        self.second.bias = linear.bias

    @property
    def latent_features(self) -> int:
        """k."""
        return self.first.out_features

    @property
    def weight(self) -> Tensor:
        """The product of the factors, (out, in)."""
        return self.second.weight @ self.first.weight

    @property
    def bias(self) -> Tensor | None:
        """(out,), or `None`."""
        return self.second.bias

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return self.second(self.first(input))

    def with_rank(self, input: Tensor, rank: float, *, n_iters: int = 3) -> nn.Module:
        """Return a layer with a smaller k whose outputs on an input are closest to this layer's; this layer is not
        modified.

        Args:
            input: (..., in).
            rank: A number of at least 1, or below 1 a fraction of the input's width.
            n_iters: As in `factorize_matrix`.

        Returns:
            A `FactorizedLinear`; the layer itself if k does not change.

        Raises:
            ValueError: The rank is not above 0, or k is above the layer's.
        """
        k = _new_rank("FactorizedLinear", rank, self.in_features, self.latent_features)
        if k == self.latent_features:
            return self
        with torch.no_grad():
            x = input.reshape(-1, self.in_features)
            outputs = self(x)
            first, second, bias = self.first.weight.T, self.second.weight.T, self.second.bias
            solution = factorize_matrix(x, outputs, first, second, bias, rank=k, n_iters=n_iters)
        return self.with_solution(solution)

    def with_solution(self, solution: LowRankSolution) -> nn.Module:
        """Return the layer with other factors, or a plain `nn.Linear` if there is only one."""
        k = solution.first.shape[1]
        first, second = _empty_linear(self.in_features, k), _empty_linear(k, self.out_features)
        second_weight = None if solution.second is None else solution.second.T
        return _with_factors(self, first, second, solution._replace(first=solution.first.T, second=second_weight))


class FactorizedConv2d(nn.Module):
    """A convolution to k channels and a 1x1 convolution to the original channels: the closest one with rank k.

    It has the public attributes of the given convolution, including `weight`, the factors' product, which is computed
    on access, and `bias`.

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
        super().__init__()
        if conv.groups != 1:
            raise NotImplementedError(f"FactorizedConv2d: expected a convolution with groups=1, got {conv.groups}")
        _check_latent("FactorizedConv2d: latent_channels", latent_channels, conv.weight)
        self.in_channels: int = conv.in_channels
        self.out_channels: int = conv.out_channels
        self.kernel_size: tuple[int, ...] = conv.kernel_size
        self.stride: tuple[int, ...] = conv.stride
        self.padding: str | tuple[int, ...] = conv.padding
        self.dilation: tuple[int, ...] = conv.dilation
        self.groups: int = conv.groups
        self.padding_mode = conv.padding_mode
        self.first: nn.Conv2d = _empty_conv(conv, latent_channels)
        self.second: nn.Conv2d = _empty_point(latent_channels, conv.out_channels)
        first, second = split_weight(conv.weight.detach().flatten(1), latent_channels)
        is_trained = conv.weight.requires_grad
        self.first.weight = nn.Parameter(first.view(latent_channels, *conv.weight.shape[1:]), is_trained)
        self.second.weight = nn.Parameter(second[:, :, None, None], is_trained)
        self.second.bias = conv.bias

    @property
    def latent_channels(self) -> int:
        """k."""
        return self.first.out_channels

    @property
    def weight(self) -> Tensor:
        """The product of the factors, (out, in, h, w)."""
        return (self.second.weight.flatten(1) @ self.first.weight.flatten(1)).view(-1, *self.first.weight.shape[1:])

    @property
    def bias(self) -> Tensor | None:
        """(out,), or `None`."""
        return self.second.bias

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, in, H, W) or (in, H, W) to the shape of the given convolution's output."""
        return self.second(self.first(input))

    def with_rank(self, input: Tensor, rank: float, *, n_iters: int = 3) -> nn.Module:
        """Return a layer with a smaller k whose outputs on an input are closest to this layer's; this layer is not
        modified.

        Args:
            input: (N, in, H, W), or (in, H, W) for one example.
            rank: A number of at least 1, or below 1 a fraction of the size of a patch.
            n_iters: As in `factorize_conv2d`.

        Returns:
            A `FactorizedConv2d`; the layer itself if k does not change.

        Raises:
            ValueError: The rank is not above 0, or k is above the layer's.
        """
        k = _new_rank("FactorizedConv2d", rank, self.first.weight[0].numel(), self.latent_channels)
        if k == self.latent_channels:
            return self
        conv = self.first
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        images = input.detach().unsqueeze(0) if input.ndim == 3 else input.detach()
        padded = F.pad(images, conv._reversed_padding_repeated_twice, mode=mode)
        solution = factorize_conv2d(
            padded,
            conv.weight,
            self.second.weight,
            rank=k,
            second_bias=self.second.bias,
            n_iters=n_iters,
            stride=conv.stride,  # pyright: ignore[reportArgumentType]
            dilation=conv.dilation,  # pyright: ignore[reportArgumentType]
        )
        return self.with_solution(solution)

    def with_solution(self, solution: LowRankSolution) -> nn.Module:
        """Return the layer with other factors, or a plain `nn.Conv2d` if there is only one."""
        k = solution.first.shape[0]
        first, second = _empty_conv(self.first, k), _empty_point(k, self.out_channels)
        return _with_factors(self, first, second, solution)


def _with_factors(
    layer: FactorizedLinear | FactorizedConv2d,
    first: nn.Linear | nn.Conv2d,
    second: nn.Linear | nn.Conv2d,
    weights: LowRankSolution,
) -> nn.Module:
    """Return the layer with two new factors, which get the weights; only the first factor if there is one weight."""
    is_trained, bias = layer.first.weight.requires_grad, _like(layer.bias, weights.bias)
    first.weight = nn.Parameter(weights.first.contiguous(), is_trained)
    if weights.second is None:
        first.bias = bias  # pyright: ignore[reportAttributeAccessIssue]
        return first.train(layer.training)
    second.weight = nn.Parameter(weights.second.contiguous(), is_trained)
    second.bias = bias  # pyright: ignore[reportAttributeAccessIssue]
    new: Any = recast(layer, type(layer))
    new.first, new.second = first, second
    return new.train(layer.training)


def _empty_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear layer on meta, so that no values are drawn; the weights are set afterwards."""
    return nn.Linear(in_features, out_features, bias=False, device="meta")


def _empty_conv(conv: nn.Conv2d, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(
        conv.in_channels,
        out_channels,
        conv.kernel_size,  # pyright: ignore[reportArgumentType]
        stride=conv.stride,  # pyright: ignore[reportArgumentType]
        padding=conv.padding,  # pyright: ignore[reportArgumentType]
        dilation=conv.dilation,  # pyright: ignore[reportArgumentType]
        padding_mode=conv.padding_mode,
        bias=False,
        device="meta",
    )


def _empty_point(in_channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 1, bias=False, device="meta")


def _like(old: Tensor | None, new: Tensor | None) -> nn.Parameter | None:
    """Return a parameter with the new value of a bias; a bias that did not exist before is trained."""
    return None if new is None else nn.Parameter(new.clone(), old is None or old.requires_grad)


def _check_latent(where: str, latent: int, weight: Tensor) -> None:
    full = min(weight.shape[0], weight[0].numel())
    if not 1 <= latent <= full:
        raise ValueError(f"{where}: expected an int in [1, {full}], got {latent!r} ({type(latent).__name__})")


def _new_rank(where: str, rank: float, in_width: int, width: int) -> int:
    # Written so that NaN and infinity are rejected before they are rounded.
    if not 0 < rank < width + 1:
        raise ValueError(f"{where}.with_rank: expected a rank above 0, at most the layer's {width}, got {rank!r}")
    return int(rank) if rank >= 1 else min(max(1, int(rank * in_width)), width)
