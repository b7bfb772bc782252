"""Squeeze-and-excitation: scales a convolution's channels by weights computed from the averages of all channels."""

from typing import Annotated

from torch import nn

from purecompose import surgery
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers._forms import check_latent
from purecompose.nn.layers.convolutions import SqueezeExciteConv2d
from purecompose.schedule.declared import Within


@factory
def squeeze_excite(
    latent_channels: Annotated[float, check_latent] = 64,
    min_channels: Annotated[int, Within(1)] = 128,
    *,
    where: Where = None,
    name: str = "squeeze_excite",
) -> Algorithm:
    """Add attention over channels after wide convolutions.

    With the convolution's output U (N, C, H, W) and a hidden width k:

        z = mean over H and W of U,   a = sigmoid(W2 relu(W1 z)),   U * a        W1: k x C, W2: C x k, no biases

    This is added to convolutions with at least `min_channels` input and output channels. Their weights are kept.

    Events: INIT. Reads and replaces: the model, its parameters and the optimizer's state.

    Args:
        latent_channels: The hidden width: an integer of at least 1, or, if below 1, a share of the convolution's output
            channels, rounded down. The authors recommend 64 or more.
        min_channels: The least number of input channels and of output channels of a convolution that is replaced.
        where: Pattern or patterns (`fnmatch`) of the names of modules to change, including their submodules, such as
            "student.*"; by default all except parts without trainable parameters, such as a frozen teacher.
        name: Name of the algorithm and of the draws of its weights.

    Warns:
        UserWarning: At INIT: the network has no convolutions to replace.

    Example:
        >>> squeeze_excite(0.125)
        squeeze_excite(latent_channels=0.125, min_channels=128)

    References:
        Jie Hu, Li Shen, Samuel Albanie, Gang Sun, Enhua Wu: Squeeze-and-Excitation Networks. CVPR 2018.
        https://arxiv.org/abs/1709.01507
    """

    def conv(module: nn.Conv2d, site: surgery.Site) -> nn.Module | None:
        del site
        is_wide = min(module.in_channels, module.out_channels) >= min_channels
        return SqueezeExciteConv2d(module, latent_channels) if is_wide else None

    return surgery_method(name, {nn.Conv2d: conv, SqueezeExciteConv2d: None}, where)
