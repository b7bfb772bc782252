"""Residual networks, small ones for images of 32x32 and larger ones for large images.

References:
    Kaiming He, Xiangyu Zhang, Shaoqing Ren, Jian Sun: Deep Residual Learning for Image Recognition. CVPR 2016.
    https://arxiv.org/abs/1512.03385
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from purecompose._support.checks import check_flag
from purecompose.nn.models._parts import check_sizes, conv


class ResidualBlock(nn.Module):
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

    def forward(self, inputs: Tensor) -> Tensor:
        return self.relu(self.branch(inputs) + self.shortcut(inputs))


class Bottleneck(nn.Module):
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

    def forward(self, inputs: Tensor) -> Tensor:
        return self.relu(self.branch(inputs) + self.shortcut(inputs))


def resnet(depth: int, in_channels: int, num_classes: int, *, width: int = 16) -> nn.Sequential:
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
    check_sizes("resnet", depth=depth, in_channels=in_channels, num_classes=num_classes, width=width)
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


def resnet18(in_channels: int, num_classes: int, *, width: int = 64, small_images: bool = False) -> nn.Sequential:
    """Return a ResNet with four stages of two residual blocks: 11 689 512 weights with 3 channels and 1000 classes.

    Designed for large images: it begins with a 7x7 convolution and a max pooling, each with a stride of two, and the
    second to fourth stage halve the image and double the channels.

    Args:
        in_channels: Channels of the images.
        num_classes: Length of the logits.
        width: Channels of the first stage.
        small_images: True to begin with a 3x3 convolution that keeps the size, for small images such as CIFAR-10's
            (32x32).

    Raises:
        ValueError: A size is below 1.
        TypeError: A size is not an int.

    Example:
        >>> import torch
        >>> resnet18(3, 10, width=4)(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """
    return _for_images("resnet18", ResidualBlock, (2, 2, 2, 2), 1, in_channels, num_classes, width, small_images)


def resnet50(in_channels: int, num_classes: int, *, width: int = 64, small_images: bool = False) -> nn.Sequential:
    """Return a ResNet with stages of 3, 4, 6 and 3 bottlenecks: 25 557 032 weights with 3 channels and 1000 classes.

    The rest is as in `resnet18`.

    Args:
        in_channels: Channels of the images.
        num_classes: Length of the logits.
        width: Channels of the 3x3 convolutions in the first stage, whose output has four times as many.
        small_images: True to begin with a 3x3 convolution that keeps the size, for small images such as CIFAR-10's
            (32x32).

    Raises:
        ValueError: A size is below 1.
        TypeError: A size is not an int.

    Example:
        >>> import torch
        >>> resnet50(3, 10, width=4)(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """
    return _for_images("resnet50", Bottleneck, (3, 4, 6, 3), 4, in_channels, num_classes, width, small_images)


def _for_images(
    name: str,
    make_block: Callable[..., nn.Module],
    depths: Sequence[int],
    expansion: int,
    in_channels: int,
    num_classes: int,
    width: int,
    small_images: bool,
) -> nn.Sequential:
    """Return a stem, stages of `depths` blocks, and a classifier; a block's output has `expansion` times its width."""
    check_sizes(name, in_channels=in_channels, num_classes=num_classes, width=width)
    check_flag(small_images, f"{name}: small_images")
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
