"""Squeeze-and-excitation: channels weighted by their global averages.

    z = mean over H and W of U,   a = sigmoid(W2 relu(W1 z)),   U * a

References:
    Jie Hu, Li Shen, Samuel Albanie, Gang Sun, Enhua Wu: Squeeze-and-Excitation Networks. CVPR 2018.
    https://arxiv.org/abs/1709.01507
"""

from torch import Tensor, nn

from purecompose._support.checks import check_whole, shown
from purecompose.nn.layers._forms import Wrapping, check_latent, latent_size


class SqueezeExcite2d(nn.Module):
    """Layer that weights the channels of (N, C, H, W) or (C, H, W).

    Args:
        num_features: C.
        latent_channels: Width of the hidden layer: a number of at least 1, or below 1 a fraction of C.

    Attributes:
        squeeze: W1, (width, C).
        excite: W2, (C, width).

    Raises:
        TypeError, ValueError: A number is of the wrong kind or out of range, such as a width of 64.5.

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
