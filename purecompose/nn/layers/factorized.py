"""Linear and convolution layers as a product of two thinner ones, without anything between them.

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


__all__ = ["FactorizedConv2d", "FactorizedLinear"]


class FactorizedLinear(nn.Module):
    """(..., in) to (..., k) to (..., out): the closest of its rank to the layer that was given.

    `weight` and `bias` are there for those who read a linear layer's: the product, computed when asked for.

    Args:
        linear: The layer. Its bias is taken over, its weight read.
        latent_features: k, from 1 to the smaller of its sides, at which the function is the layer's.

    Attributes:
        first: (in, k), without bias.
        second: (k, out), with the layer's bias.

    Raises:
        ValueError: k out of range.
    """

    def __init__(self, linear: nn.Linear, latent_features: int) -> None:
        super().__init__()
        _check_latent("FactorizedLinear: latent_features", latent_features, linear.weight)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.first = _empty_linear(linear.in_features, latent_features)
        self.second = _empty_linear(latent_features, linear.out_features)
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
        """(out, in), the product."""
        return self.second.weight @ self.first.weight

    @property
    def bias(self) -> Tensor | None:
        """(out,), or `None`."""
        return self.second.bias

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self.second(self.first(input))

    def with_rank(self, input: Tensor, rank: float, *, n_iters: int = 3) -> nn.Module:
        """Return the layer with a smaller k that does to an input most nearly what this one does; this one stays as it
        is.

        Args:
            input: (..., in).
            rank: A number of at least 1, or below 1 a share of the input's width.
            n_iters: As in `factorize_matrix`.

        Returns:
            A `FactorizedLinear`; itself where k is the same.

        Raises:
            ValueError: A rank that is not above 0, or a k above the layer's.
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
        """Return the layer with other factors; a plain `nn.Linear` where there is only one."""
        k = solution.first.shape[1]
        first, second = _empty_linear(self.in_features, k), _empty_linear(k, self.out_features)
        second_weight = None if solution.second is None else solution.second.T
        return _with_factors(self, first, second, solution._replace(first=solution.first.T, second=second_weight))


class FactorizedConv2d(nn.Module):
    """A convolution to k channels, and one of a single place to the channels there were: the closest of its rank.

    It tells of itself what the convolution would, `weight` and `bias` as well: the product, computed when asked for.

    Args:
        conv: The convolution, of one group. Its bias is taken over, its weight read.
        latent_channels: k, from 1 to the smaller of its output channels and its patches' size, at which the function
            is the convolution's.

    Attributes:
        first: (in, k, h, w), without bias, with the stride, padding and dilation of the convolution that was given.
        second: (k, out, 1, 1), with its bias.

    Raises:
        NotImplementedError: A convolution of several groups.
        ValueError: k out of range.
    """

    def __init__(self, conv: nn.Conv2d, latent_channels: int) -> None:
        super().__init__()
        if conv.groups != 1:
            raise NotImplementedError(f"FactorizedConv2d: expected a convolution with groups=1, got {conv.groups}")
        _check_latent("FactorizedConv2d: latent_channels", latent_channels, conv.weight)
        self.in_channels, self.out_channels, self.kernel_size = conv.in_channels, conv.out_channels, conv.kernel_size
        self.stride, self.padding, self.dilation = conv.stride, conv.padding, conv.dilation
        self.groups, self.padding_mode = conv.groups, conv.padding_mode
        self.first = _empty_conv(conv, latent_channels)
        self.second = _empty_point(latent_channels, conv.out_channels)
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
        """(out, in, h, w), the product."""
        return (self.second.weight.flatten(1) @ self.first.weight.flatten(1)).view(-1, *self.first.weight.shape[1:])

    @property
    def bias(self) -> Tensor | None:
        """(out,), or `None`."""
        return self.second.bias

    def forward(self, input: Tensor) -> Tensor:
        """(N, in, H, W), or (in, H, W), to what the convolution gives."""
        return self.second(self.first(input))

    def with_rank(self, input: Tensor, rank: float, *, n_iters: int = 3) -> nn.Module:
        """Return the layer with a smaller k that does to an input most nearly what this one does; this one stays as it
        is.

        Args:
            input: (N, in, H, W), or (in, H, W) of one example.
            rank: A number of at least 1, or below 1 a share of the patches' size.
            n_iters: As in `factorize_conv2d`.

        Returns:
            A `FactorizedConv2d`; itself where k is the same.

        Raises:
            ValueError: A rank that is not above 0, or a k above the layer's.
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
        """Return the layer with other factors; a plain `nn.Conv2d` where there is only one."""
        k = solution.first.shape[0]
        first, second = _empty_conv(self.first, k), _empty_point(k, self.out_channels)
        return _with_factors(self, first, second, solution)


def _with_factors(
    layer: FactorizedLinear | FactorizedConv2d,
    first: nn.Linear | nn.Conv2d,
    second: nn.Linear | nn.Conv2d,
    weights: LowRankSolution,
) -> nn.Module:
    """Return the layer with two new ones as its factors, which get the weights; the first only where one weight is
    all.
    """
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
    """Without values, which are put in: nothing is drawn."""
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
    """Return a new value for a bias; one where there was none trains."""
    return None if new is None else nn.Parameter(new.clone(), old is None or old.requires_grad)


def _check_latent(where: str, latent: int, weight: Tensor) -> None:
    full = min(weight.shape[0], weight[0].numel())
    if not 1 <= latent <= full:
        raise ValueError(f"{where}: expected an int in [1, {full}], got {latent!r} ({type(latent).__name__})")


def _new_rank(where: str, rank: float, in_width: int, width: int) -> int:
    # Written so that NaN and infinity are refused before they are rounded.
    if not 0 < rank < width + 1:
        raise ValueError(f"{where}.with_rank: expected a rank above 0, at most the layer's {width}, got {rank!r}")
    return int(rank) if rank >= 1 else min(max(1, int(rank * in_width)), width)
