"""Convolutions and pooling that smooth before they subsample, with standardized filters, or with weighted channels.

    standardized filters:     W' = (W - mean) / sqrt(var + 1e-10),   over all dims of W but the first, biased variance
    squeeze and excitation:   z = mean over H and W of U,   a = sigmoid(W2 relu(W1 z)),   U * a

Sources are in the methods that use them, `blurpool`, `weight_standardization` and `squeeze_excite`.
"""

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose._support.specs import check_flag, check_whole, shown, suggests_keywords
from purecompose.nn.layers.replacing import Wrapping, check_latent, is_plain, latent_size, recast


Pair = int | Sequence[int]


@suggests_keywords
def blur_2d(input: Tensor, *, stride: Pair = 1) -> Tensor:
    """Smooth each channel by the outer product of (1, 2, 1) / 4 with itself, with zeros around the image.

    Args:
        input: (N, C, H, W) or (C, H, W), floating.
        stride: Step in pixels, one number or two.

    Returns:
        (N, C, ceil(H / stride), ceil(W / stride)), in the dtype of the input.

    Raises:
        TypeError: The input is not floating.
        ValueError: The input has another number of dimensions.

    Example:
        >>> blur_2d(torch.ones(1, 1, 3, 3)).squeeze().tolist()
        [[0.5625, 0.75, 0.5625], [0.75, 1.0, 0.75], [0.5625, 0.75, 0.5625]]
    """
    if input.ndim not in (3, 4):
        raise ValueError(f"blur_2d: expected an input (N, C, H, W) or (C, H, W), got shape {tuple(input.shape)}")
    if not input.is_floating_point():
        raise TypeError(f"blur_2d: expected a floating input, got {input.dtype}; convert it first")
    channels, (down, right) = input.shape[-3], _pair(stride)
    if not input.numel():
        return input[..., ::down, ::right]
    # Created on the input's device, because copying numbers from the host would make a GPU wait.
    row = (2 - (torch.arange(3, dtype=input.dtype, device=input.device) - 1).abs()) / 4
    filters = (row.unsqueeze(1) * row).expand(channels, 1, 3, 3)
    return F.conv2d(input, filters, stride=(down, right), padding=1, groups=channels)


@suggests_keywords
def blurmax_pool2d(
    input: Tensor,
    kernel_size: Pair = 2,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    *,
    ceil_mode: bool = False,
) -> Tensor:
    """Compute the maximum of the window at every position, smooth the result, and subsample it by `stride`.

    Args:
        input: (N, C, H, W) or (C, H, W), floating.
        kernel_size, stride, padding, dilation, ceil_mode: As in `torch.nn.functional.max_pool2d`; by default the stride
            is the window's size.

    Returns:
        A tensor of the shape of `max_pool2d`'s output.

    Example:
        >>> blurmax_pool2d(torch.eye(4)[None]).shape
        torch.Size([1, 2, 2])
    """
    window, steps = _pair(kernel_size), _pair(kernel_size if stride is None else stride)
    around, holes = _pair(padding), _pair(dilation)
    if ceil_mode:
        # Pads below and to the right of the image, for windows that begin inside and end outside.
        below, beside = (_missing(*sizes) for sizes in zip(input.shape[-2:], window, steps, around, holes, strict=True))
        if below or beside:
            input = F.pad(input, (0, beside, 0, below), value=-math.inf)
    return blur_2d(F.max_pool2d(input, window, 1, around, holes), stride=steps)


class BlurConv2d(Wrapping):
    """A strided convolution whose input, or whose output before subsampling, is smoothed.

    The convolution's public attributes, such as `weight` and `in_channels`, can be read here, too.

    Attributes:
        conv: A convolution with the weights of the given one.
        blur_first: True if the input is smoothed, which costs little; False if the output is smoothed before
            subsampling, as in the paper, which costs as much as the convolution without its stride.

    Raises:
        TypeError: `conv` is not an `nn.Conv2d`; with `blur_first=False`, also if it has its own forward, hooks or
            parametrized tensors, since its stride cannot be removed then.

    Example:
        >>> BlurConv2d(nn.Conv2d(3, 8, 3, stride=2))(torch.ones(1, 3, 9, 9)).shape
        torch.Size([1, 8, 4, 4])
    """

    _held = "conv"

    def __init__(self, conv: nn.Conv2d, blur_first: bool = True) -> None:
        super().__init__()
        if not isinstance(conv, nn.Conv2d):
            raise TypeError(f"BlurConv2d: expected an nn.Conv2d, got {shown(conv)}")
        if not check_flag(blur_first, "BlurConv2d: blur_first") and not is_plain(conv, nn.Conv2d):
            raise TypeError(
                "BlurConv2d: expected a convolution without an overridden forward, hooks or parametrized tensors, got "
                f"{shown(conv)}; smooth its input with blur_first=True"
            )
        self.blur_first: bool = blur_first
        self.stride: tuple[int, int] = _pair(conv.stride)
        self.conv = conv
        if not blur_first:
            # The same tensors in a convolution without stride.
            self.conv: nn.Conv2d = recast(conv, type(conv))
            self.conv.stride = (1, 1)

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, H, W) or (C, H, W) to the shape of the given convolution's output."""
        if self.blur_first:
            return self.conv(blur_2d(input))
        return blur_2d(self.conv(input), stride=self.stride)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"blur_first={self.blur_first}, stride={self.stride}"


class BlurMaxPool2d(nn.Module):
    """`blurmax_pool2d` as a layer, with the arguments of `nn.MaxPool2d`.

    Args:
        kernel_size, stride, padding, dilation, ceil_mode: As for `nn.MaxPool2d`.

    Example:
        >>> BlurMaxPool2d(2, 2)(torch.ones(1, 3, 8, 8)).shape
        torch.Size([1, 3, 4, 4])
    """

    @classmethod
    def of(cls, pool: nn.MaxPool2d) -> "BlurMaxPool2d":
        """Return a layer with the settings of `pool`, including the attributes of a subclass."""
        return recast(pool, cls)

    def __init__(
        self,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        dilation: Pair = 1,
        *,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size: Pair = kernel_size
        self.padding: Pair = padding
        self.dilation: Pair = dilation
        self.stride: Pair = kernel_size if stride is None else stride
        self.ceil_mode = ceil_mode

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, H, W) or (C, H, W) to the shape of `max_pool2d`'s output."""
        return blurmax_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, ceil_mode=self.ceil_mode
        )

    def extra_repr(self) -> str:
        """Return the settings."""
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"ceil_mode={self.ceil_mode}"
        )


def _pair(value: Pair) -> tuple[int, int]:
    down, right = (value, value) if isinstance(value, int) else value
    return down, right


def _missing(size: int, window: int, step: int, around: int, hole: int) -> int:
    """Return the padding needed at the end of a side so that all windows of `ceil_mode` fit."""
    free = size + 2 * around - hole * (window - 1) - 1
    steps = -(-free // step)
    # A last window that would begin beyond the image does not count.
    steps -= steps * step >= size + around
    return max(0, steps * step - free)


_EPS = 1e-10


@suggests_keywords
def standardized(weight: Tensor) -> Tensor:
    """Return each filter with mean 0 and variance 1, computed in float32 at least.

    Args:
        weight: (out, ...), floating.

    Returns:
        A tensor of the weight's shape and dtype; zeros for a filter of a single number or of equal numbers.

    Raises:
        ValueError: The weight has fewer than two dimensions.

    Example:
        >>> standardized(torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])
    """
    if weight.ndim < 2:
        raise ValueError(f"standardized: expected a weight (out, ...), got shape {tuple(weight.shape)}")
    wide = weight if weight.dtype == torch.float64 else weight.float()
    dims = tuple(range(1, wide.ndim))  # not flattened, which keeps strides such as channels last
    centred = wide - wide.mean(dims, keepdim=True)
    scale = (centred.square().mean(dims, keepdim=True) + _EPS).rsqrt()
    return (centred * scale).to(weight.dtype)


class _Standardized:
    """Common part of the three classes: the stored weight is trained, the standardized one is used."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        forward: Any = super()
        return forward._conv_forward(input, standardized(weight), bias)


class StandardizedConv1d(_Standardized, nn.Conv1d):
    """`nn.Conv1d` with standardized filters; the same parameters under the same names.

    Example:
        >>> StandardizedConv1d(2, 4, 3)(torch.ones(1, 2, 5)).shape
        torch.Size([1, 4, 3])
    """


class StandardizedConv2d(_Standardized, nn.Conv2d):
    """`nn.Conv2d` with standardized filters; the same parameters under the same names.

    Example:
        >>> StandardizedConv2d(2, 4, 3)(torch.ones(1, 2, 5, 5)).shape
        torch.Size([1, 4, 3, 3])
    """


class StandardizedConv3d(_Standardized, nn.Conv3d):
    """`nn.Conv3d` with standardized filters; the same parameters under the same names.

    Example:
        >>> StandardizedConv3d(2, 4, 3)(torch.ones(1, 2, 5, 5, 5)).shape
        torch.Size([1, 4, 3, 3, 3])
    """


STANDARDIZED: MappingProxyType[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.Conv1d: StandardizedConv1d, nn.Conv2d: StandardizedConv2d, nn.Conv3d: StandardizedConv3d}
)
"""The standardized form of each kind of convolution."""


def standardized_conv(conv: nn.Module) -> nn.Module | None:
    """Return a convolution with the same parameters and settings, and standardized filters.

    Args:
        conv: Any module.

    Returns:
        One of the three classes, with the attributes of a subclass. `None` if this is not an `nn.Conv1d`, `2d` or `3d`,
        if it is already standardized, has its own forward, hooks or parametrized tensors, or if its weight is not
        floating.

    Example:
        >>> type(standardized_conv(nn.Conv2d(3, 8, 3))).__name__, standardized_conv(nn.Linear(2, 2))
        ('StandardizedConv2d', None)
    """
    kind = next((kind for kind in STANDARDIZED if isinstance(conv, kind)), None)
    if kind is None or isinstance(conv, _Standardized):
        return None
    weight = conv._parameters.get("weight")
    inherits = is_plain(conv, kind) and getattr(type(conv), "_conv_forward") is getattr(kind, "_conv_forward")  # noqa: B009
    if not inherits or weight is None or not weight.is_floating_point():
        return None
    return recast(conv, STANDARDIZED[kind])


class SqueezeExcite2d(nn.Module):
    """Layer that weights the channels of (N, C, H, W) or (C, H, W).

    Args:
        num_features: C.
        latent_channels: Width of the hidden layer: a number of at least 1, or below 1 a fraction of C.

    Attributes:
        squeeze: W1, (width, C).
        excite: W2, (C, width).

    Example:
        >>> import torch
        >>> SqueezeExcite2d(8, 4)(torch.ones(2, 8, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def __init__(self, num_features: int, latent_channels: float = 0.125) -> None:
        super().__init__()
        check_whole(num_features, "SqueezeExcite2d: num_features", 1)
        width = latent_size(check_latent(latent_channels, "SqueezeExcite2d: latent_channels"), num_features)
        self.squeeze: nn.Linear = nn.Linear(num_features, width, bias=False)
        self.excite: nn.Linear = nn.Linear(width, num_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Return the weighted input, in the same shape."""
        attention = self.excite(self.squeeze(input.mean((-2, -1))).relu()).sigmoid()
        return input * attention[..., None, None]


class SqueezeExciteConv2d(Wrapping):
    """A convolution followed by a `SqueezeExcite2d`.

    The convolution's public attributes, such as `weight` and `in_channels`, can be read here, too.

    Args:
        conv: An `nn.Conv2d`.
        latent_channels: As for `SqueezeExcite2d`.

    Attributes:
        conv: The given convolution.
        se: The attention.

    Raises:
        TypeError, ValueError: `conv` is not an `nn.Conv2d`; or as for `SqueezeExcite2d`.

    Example:
        >>> import torch
        >>> SqueezeExciteConv2d(nn.Conv2d(3, 8, 3), 4)(torch.ones(2, 3, 8, 8)).shape
        torch.Size([2, 8, 6, 6])
    """

    _held = "conv"

    def __init__(self, conv: nn.Conv2d, latent_channels: float = 0.125) -> None:
        super().__init__()
        if not isinstance(conv, nn.Conv2d):
            raise TypeError(f"SqueezeExciteConv2d: expected an nn.Conv2d, got {shown(conv)}")
        self.conv = conv
        self.se: SqueezeExcite2d = SqueezeExcite2d(conv.out_channels, latent_channels)

    def forward(self, input: Tensor) -> Tensor:
        """Return the weighted output of the convolution."""
        return self.se(self.conv(input))
