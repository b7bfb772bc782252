"""Common parts of the networks: checks of sizes, dropout, convolutions."""

from torch import nn

from purecompose._support.checks import check_whole


def check_sizes(where: str, **sizes: int) -> None:
    """Raise if one of the sizes is not an int, or below 1."""
    for name, size in sizes.items():
        check_whole(size, f"{where}: {name}", 1)


def dropout_layers(probability: float) -> list[nn.Module]:
    """Return a list of one dropout layer, or an empty list if the probability is 0."""
    return [nn.Dropout(probability)] if probability else []


def conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps the image's size at stride 1, initialized for a ReLU after it."""
    layer = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
