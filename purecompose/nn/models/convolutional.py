"""A multi-layer perceptron, two small convolutional networks, and residual networks for small and for large images.

References:
    Kaiming He et al.: Deep Residual Learning for Image Recognition. CVPR 2016. https://arxiv.org/abs/1512.03385
    Keller Jordan: 94% on CIFAR-10 in 3.29 Seconds on a Single GPU. 2024. https://arxiv.org/abs/2404.00498
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

from torch import Tensor, nn

from purecompose._support.specs import shown
from purecompose.schedule.declared import Within, checked


def _checked_widths(hidden: Any, where: str) -> tuple[int, ...]:
    """Return one width or several as a tuple."""
    if isinstance(hidden, Sequence):
        return tuple(Within(1).whole(width, f"{where}[{i}]") for i, width in enumerate(hidden))
    if not hasattr(hidden, "__index__"):
        raise TypeError(f"{where}: expected an int or a sequence of ints, such as (256, 128), got {shown(hidden)}")
    return (Within(1).whole(hidden, where),)


Size: TypeAlias = Annotated[int, Within(1)]
Dropout: TypeAlias = Annotated[float, Within(0, 1, below=True)]
Widths: TypeAlias = Annotated[int | Sequence[int], _checked_widths]


def dropout_layers(probability: float) -> list[nn.Module]:
    """Return a list of one dropout layer, or an empty list if the probability is 0."""
    return [nn.Dropout(probability)] if probability else []


def conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps the image's size at stride 1, initialized for a ReLU after it."""
    layer = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


@checked
def mlp(in_features: Size, hidden: Widths, num_classes: Size, *, dropout: Dropout = 0.0) -> nn.Sequential:
    """Return a multi-layer perceptron: flatten, then linear layers with ReLU and dropout between them.

    Args:
        in_features: Number of values per example; the inputs are flattened to this length.
        hidden: Width of each hidden layer, one number for one layer; empty for a linear classifier.
        num_classes: Length of the logits.
        dropout: Probability of dropping a hidden value, [0, 1); at 0 there are no dropout layers.

    Example:
        >>> import torch
        >>> mlp(64, (128, 32), 10)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """
    widths: Any = hidden  # a tuple after its check
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in zip((in_features, *widths), widths, strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU(), *dropout_layers(dropout)]
    layers.append(nn.Linear((in_features, *widths)[-1], num_classes))
    return nn.Sequential(*layers)


@checked
def cnn(in_channels: Size, num_classes: Size, *, width: Size = 16, dropout: Dropout = 0.0) -> nn.Sequential:
    """Return a small convolutional network: four 3x3 convolutions, two max poolings, one linear layer.

    For images from 4x4 pixels up, such as digits. A pooling follows each of the first two convolutions, and the last
    convolution has a stride of two.

    Args:
        in_channels: Channels of the images.
        num_classes: Length of the logits.
        width: Channels of the first convolution; the others have two, four and four times as many.
        dropout: Probability of dropping a feature before the classifier, [0, 1).

    Example:
        >>> import torch
        >>> cnn(1, 10, width=8)(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    def stage(channels_in: int, channels_out: int, *, stride: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        return [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]

    return nn.Sequential(
        *stage(in_channels, width),
        nn.MaxPool2d(2),
        *stage(width, 2 * width),
        nn.MaxPool2d(2),
        *stage(2 * width, 4 * width),
        # Without this stage the receptive field is too small for a digit: 97 to 98.5 % after two epochs, not 99 %.
        *stage(4 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        *dropout_layers(dropout),
        nn.Linear(4 * width, num_classes),
    )


class _ScaledMax(nn.Module):
    """The greatest value of each channel, divided by 9: (N, C, H, W) to (N, C)."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.amax((2, 3)) / 9


@checked
def airbench(in_channels: Size, num_classes: Size, *, widths: Widths = (64, 256, 256)) -> nn.Sequential:
    """Return the network of airbench, which is made to learn CIFAR-10 soon, with torch's initial weights.

    A convolution of 2x2 pixels to 24 channels, then stages of two 3x3 convolutions with batch norms, of which the
    first is followed by a max pooling. The norms' weights are frozen, and the head has no bias: biases are
    those of the norms only, for which the recipe "cifar10-fast" has large rates.

    Args:
        in_channels: Channels of the images.
        num_classes: Length of the logits.
        widths: Channels of each stage. n stages take images from 2^n + 1 pixels a side up: three from 9x9.

    Example:
        >>> import torch
        >>> airbench(3, 10, widths=(4, 8, 8))(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def conv_norm(channels_in: int, channels_out: int, *between: nn.Module) -> list[nn.Module]:
        norm = nn.BatchNorm2d(channels_out, momentum=0.4)
        norm.weight.requires_grad_(False)
        return [nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), *between, norm, nn.GELU()]

    sizes: Any = widths  # a tuple after its check
    stages, channels = nn.Sequential(), 24
    for width in sizes:
        stages.extend([*conv_norm(channels, width, nn.MaxPool2d(2)), *conv_norm(width, width)])
        channels = width
    stem = nn.Sequential(nn.Conv2d(in_channels, 24, 2, bias=False), nn.GELU())
    head = nn.Linear(channels, num_classes, bias=False)
    return nn.Sequential(OrderedDict(stem=stem, stages=stages, pool=_ScaledMax(), head=head))


class _Residual(nn.Module):
    """A block with a branch and a shortcut."""

    branch: nn.Sequential
    shortcut: nn.Module
    relu: nn.ReLU

    def forward(self, inputs: Tensor) -> Tensor:
        return self.relu(self.branch(inputs) + self.shortcut(inputs))


class ResidualBlock(_Residual):
    """`relu(branch(x) + shortcut(x))`, where the branch is two 3x3 convolutions with BatchNorm.

    The shortcut is the identity, or a 1x1 convolution with BatchNorm if the shape changes.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Stride of the first convolution.

    Example:
        >>> import torch
        >>> ResidualBlock(3, 8, stride=2)(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 8, 4, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.branch: nn.Sequential = nn.Sequential(
            conv(in_channels, out_channels, 3, stride),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            conv(out_channels, out_channels, 3),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = _shortcut(in_channels, out_channels, stride)
        self.relu: nn.ReLU = nn.ReLU()


class Bottleneck(_Residual):
    """`relu(branch(x) + shortcut(x))`, where the branch is 1x1, 3x3 and 1x1 convolutions, each with BatchNorm.

    The 3x3 convolution has a quarter of the output channels, and the stride. The shortcut is as in `ResidualBlock`.

    Args:
        in_channels: Channels of the input.
        channels: Channels of the 3x3 convolution.
        stride: Its stride.

    Example:
        >>> import torch
        >>> Bottleneck(16, 8)(torch.zeros(1, 16, 8, 8)).shape[2:]
        torch.Size([8, 8])
    """

    def __init__(self, in_channels: int, channels: int, *, stride: int = 1) -> None:
        super().__init__()
        out_channels = 4 * channels
        self.branch: nn.Sequential = nn.Sequential(
            conv(in_channels, channels, 1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            conv(channels, channels, 3, stride),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            conv(channels, out_channels, 1),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = _shortcut(in_channels, out_channels, stride)
        self.relu: nn.ReLU = nn.ReLU()


@checked
def resnet(depth: Size, in_channels: Size, num_classes: Size, *, width: Size = 16) -> nn.Sequential:
    """Return a residual network in the form for CIFAR: three stages of `(depth - 2) / 6` blocks each.

    The first convolution keeps the image size; the second and third stage halve it and double the channels.

    Args:
        depth: Number of layers with weights along the main path: 8, 14, 20, 26, ...
        in_channels: Channels of the images.
        num_classes: Length of the logits.
        width: Channels of the first stage; 16 in the paper.

    Raises:
        ValueError: The depth is not 6 n + 2 with n >= 1, or a size is below 1.

    Example:
        >>> import torch
        >>> resnet(8, 3, 10, width=4)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"resnet: depth={depth} is not 6 n + 2 with n >= 1; take 8, 14, 20, 26, 32, ...")
    layers: list[nn.Module] = [conv(in_channels, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(ResidualBlock(channels, width * 2**stage, stride=stride))
            channels = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def resnet8(in_channels: int, num_classes: int, *, width: int = 16) -> nn.Sequential:
    """Return a `resnet` with one block per stage: 8 layers, about 78 000 weights with 3 channels and 10 classes.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of classes.
        width: Channels of the first stage.

    Example:
        >>> import torch
        >>> resnet8(3, 10)(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """
    return resnet(8, in_channels, num_classes, width=width)


def resnet20(in_channels: int, num_classes: int, *, width: int = 16) -> nn.Sequential:
    """Return a `resnet` with three blocks per stage: 20 layers, about 272 000 weights with 3 channels, 10 classes.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of classes.
        width: Channels of the first stage.

    Example:
        >>> sum(param.numel() for param in resnet20(3, 10).parameters())
        272474
    """
    return resnet(20, in_channels, num_classes, width=width)


@checked
def resnet18(in_channels: Size, num_classes: Size, *, width: Size = 64, small_images: bool = False) -> nn.Sequential:
    """Return a ResNet with four stages of two residual blocks: 11 689 512 weights with 3 channels and 1000 classes.

    It begins with a 7x7 convolution and a max pooling, each with a stride of two, and the second to fourth stage halve
    the image and double the channels.

    Args:
        in_channels: Channels of the images.
        num_classes: Length of the logits.
        width: Channels of the first stage.
        small_images: True to begin with a 3x3 convolution that keeps the size, for images such as CIFAR-10's (32x32).

    Example:
        >>> import torch
        >>> resnet18(3, 10, width=4)(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """
    return _for_images(ResidualBlock, (2, 2, 2, 2), 1, in_channels, num_classes, width, small_images)


@checked
def resnet50(in_channels: Size, num_classes: Size, *, width: Size = 64, small_images: bool = False) -> nn.Sequential:
    """Return a ResNet with stages of 3, 4, 6 and 3 bottlenecks: 25 557 032 weights with 3 channels and 1000 classes.

    The rest is as in `resnet18`.

    Args:
        in_channels: Channels of the images.
        num_classes: Length of the logits.
        width: Channels of the 3x3 convolutions in the first stage, whose output has four times as many.
        small_images: True to begin with a 3x3 convolution that keeps the size, for images such as CIFAR-10's (32x32).

    Example:
        >>> import torch
        >>> resnet50(3, 10, width=4)(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """
    return _for_images(Bottleneck, (3, 4, 6, 3), 4, in_channels, num_classes, width, small_images)


def _for_images(
    make_block: Callable[..., nn.Module],
    depths: Sequence[int],
    expansion: int,
    in_channels: int,
    num_classes: int,
    width: int,
    small_images: bool,
) -> nn.Sequential:
    """Return a stem, stages of `depths` blocks, and a classifier; a block's output has `expansion` times its width."""
    layers, channels = _stem(in_channels, width, small_images), width
    for stage, num_blocks in enumerate(depths):
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(make_block(channels, width * 2**stage, stride=stride))
            channels = expansion * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


def _stem(in_channels: int, width: int, small_images: bool) -> list[nn.Module]:
    if small_images:
        return [conv(in_channels, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
    return [conv(in_channels, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
