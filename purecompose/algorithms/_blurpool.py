"""BlurPool: smooths before subsampling, so that a shifted image gives a shifted output."""

from collections.abc import Sequence
from typing import Annotated

from torch import nn

from purecompose import surgery
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers._forms import is_plain
from purecompose.nn.layers.convolutions import BlurConv2d, BlurMaxPool2d
from purecompose.schedule.declared import Within


@factory
def blurpool(
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    *,
    min_channels: Annotated[int, Within(1)] = 16,
    where: Where = None,
    name: str = "blurpool",
) -> Algorithm:
    """Smooth before the subsampling of strided convolutions and max poolings.

    With the filter k = (1, 2, 1) x (1, 2, 1) / 16, applied to each channel with zeros around the image:

        a convolution of stride s     conv_s(k * x)                 with blur_first
                                      every s-th of k * conv_1(x)   otherwise, as in the paper
        a max pooling of stride s     every s-th of k * max_1(x)

    Max poolings are replaced if they are strided; convolutions if they are strided and have at least `min_channels`
    input channels. Weights are kept.

    Poolings with an overridden forward, hooks or parametrized tensors are not replaced. With `blur_first=False` the
    same is true of convolutions; with `blur_first=True` they are wrapped as they are.

    Events: INIT. Reads and replaces: the model, its parameters' names and the optimizer's state.

    Args:
        replace_convs: Replace strided convolutions.
        replace_maxpools: Replace strided max poolings.
        blur_first: Smooth the input of a convolution, at little cost. If False, smooth its output before subsampling,
            as in the paper, which multiplies the cost of the convolution by the product of the strides.
        min_channels: The least number of input channels of a convolution that is replaced; with 16, convolutions of
            the image itself are not.
        where: Pattern or patterns (`fnmatch`) of the names of modules to change, including their submodules, such as
            "student.*"; by default all except parts without trainable parameters, such as a frozen teacher.
        name: Name of the algorithm.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range, or nothing to replace.

    Warns:
        UserWarning: At INIT: the network has no layers to replace.

    Example:
        >>> blurpool()
        blurpool(replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=16)

    References:
        Richard Zhang: Making Convolutional Networks Shift-Invariant Again. ICML 2019. https://arxiv.org/abs/1904.11486
    """
    if not replace_convs and not replace_maxpools:
        raise ValueError("blurpool: expected replace_convs or replace_maxpools, got neither; leave the method out")

    def conv(module: nn.Conv2d, site: surgery.Site) -> nn.Module | None:
        del site
        if module.in_channels < min_channels or not _is_strided(module):
            return None
        return BlurConv2d(module, blur_first) if blur_first or is_plain(module, nn.Conv2d) else None

    def maxpool(module: nn.MaxPool2d, site: surgery.Site) -> nn.Module | None:
        del site
        if module.return_indices or not _is_strided(module) or not is_plain(module, nn.MaxPool2d):
            return None
        return BlurMaxPool2d.of(module)

    rules: dict[type[nn.Module], surgery.Rule | None] = {BlurConv2d: None, BlurMaxPool2d: None}
    if replace_convs:
        rules[nn.Conv2d] = conv
    if replace_maxpools:
        rules[nn.MaxPool2d] = maxpool
    return surgery_method(name, rules, where)


def _is_strided(module: nn.Conv2d | nn.MaxPool2d) -> bool:
    stride = module.stride
    return max(stride) > 1 if isinstance(stride, Sequence) else stride > 1
