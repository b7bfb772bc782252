"""Layers that smooth before they subsample.

References:
    Richard Zhang: Making Convolutional Networks Shift-Invariant Again. ICML 2019. https://arxiv.org/abs/1904.11486
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose._support.checks import check_flag, shown
from purecompose.nn.layers._forms import Wrapping, is_plain, recast


Pair = int | Sequence[int]


def blur_2d(input: Tensor, *, stride: Pair = 1, kernel: Tensor | None = None) -> Tensor:
    """Smooth each channel separately, with zeros around the image.

    Args:
        input: (N, C, H, W) or (C, H, W), floating.
        stride: Step in pixels, one number or two.
        kernel: (h, w), or (C, h, w) for one kernel per channel, with odd sides; by default the outer product of
            (1, 2, 1) with itself, divided by 16.

    Returns:
        (N, C, ceil(H / stride), ceil(W / stride)), in the dtype of the input.

    Raises:
        TypeError: The input is not floating.
        ValueError: The input has another number of dimensions, or the kernel has an even side, or another number of
            dimensions or channels.

    Example:
        >>> blur_2d(torch.ones(1, 1, 3, 3)).squeeze().tolist()
        [[0.5625, 0.75, 0.5625], [0.75, 1.0, 0.75], [0.5625, 0.75, 0.5625]]
    """
    if input.ndim not in (3, 4):
        raise ValueError(f"blur_2d: expected an input (N, C, H, W) or (C, H, W), got shape {tuple(input.shape)}")
    if not input.is_floating_point():
        raise TypeError(f"blur_2d: expected a floating input, got {input.dtype}; convert it first")
    channels, (down, right) = input.shape[-3], _pair(stride)
    if kernel is None:
        # Created on the input's device, because copying numbers from the host would make a GPU wait.
        row = (2 - (torch.arange(3, dtype=input.dtype, device=input.device) - 1).abs()) / 4
        kernel = row.unsqueeze(1) * row
    sides, own = kernel.shape[-2:], kernel.shape[:-2]
    if kernel.ndim not in (2, 3) or not all(side % 2 for side in sides) or own not in ((), (1,), (channels,)):
        raise ValueError(
            f"blur_2d: expected a kernel (h, w) or ({channels}, h, w) of odd sides, got shape {tuple(kernel.shape)}"
        )
    if not input.numel():
        return input[..., ::down, ::right]
    filters = kernel.to(input.dtype).expand(channels, *sides).unsqueeze(1)
    return F.conv2d(input, filters, stride=(down, right), padding=(sides[0] // 2, sides[1] // 2), groups=channels)


def blurmax_pool2d(
    input: Tensor,
    kernel_size: Pair = 2,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    *,
    ceil_mode: bool = False,
    kernel: Tensor | None = None,
) -> Tensor:
    """Compute the maximum of the window at every position, smooth the result, and subsample it by `stride`.

    Args:
        input: (N, C, H, W) or (C, H, W), floating.
        kernel_size, stride, padding, dilation, ceil_mode: As in `torch.nn.functional.max_pool2d`; by default the stride
            is the window's size.
        kernel: See `blur_2d`.

    Returns:
        A tensor of the shape of `max_pool2d`'s output.

    Raises:
        TypeError, ValueError: As for `blur_2d`.

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
    return blur_2d(F.max_pool2d(input, window, 1, around, holes), stride=steps, kernel=kernel)


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


class BlurPool2d(nn.Module):
    """`blur_2d` as a layer.

    Args:
        stride: As for `blur_2d`.

    Example:
        >>> BlurPool2d(2)(torch.ones(1, 3, 8, 8)).shape
        torch.Size([1, 3, 4, 4])
    """

    def __init__(self, stride: Pair = 2) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, ceil(H / stride), ceil(W / stride))."""
        return blur_2d(input, stride=self.stride)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"stride={self.stride}"


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
