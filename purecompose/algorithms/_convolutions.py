"""Methods on convolutions: BlurPool, earlier pooling, squeeze-and-excitation, weight standardization, memory format."""

from collections.abc import Sequence
from typing import Annotated, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from purecompose import surgery, tree
from purecompose.algorithms._parts import Derived, Where, changed, surgery_method, warn_of_nothing
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.layers.convolutions import (
    STANDARDIZED,
    BlurConv2d,
    BlurMaxPool2d,
    SqueezeExciteConv2d,
    standardized_conv,
)
from purecompose.nn.layers.replacing import check_latent, is_plain
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import on


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

    Max poolings are replaced if they are strided; convolutions if they are strided and have enough channels. Weights
    are kept.

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
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
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
        raise ValueError("blurpool: expected replace_convs or replace_maxpools, got neither")

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


@factory
def pool_first(norms: bool = True, *, where: Where = None, name: str = "pool_first") -> Algorithm:
    """Move max poolings before the activations and batch norms that they follow.

        pool(relu(norm(conv(x))))   becomes   relu(norm(pool(conv(x))))

    The norm and the activation then compute a share of the values, a quarter for poolings of 2 x 2. Before a batch norm
    this changes the network: the norm has the statistics of the pooled values, and where its weight is negative the
    minimum would have been needed.

    It looks at the children of each `nn.Sequential`. Names and parameters are kept.

    Events: INIT. Reads and replaces: the model.

    Args:
        norms: Move poolings before batch norms, too. If False, only before activations that do not decrease: ReLU,
            leaky ReLU (with a slope of at least 0), ReLU6, sigmoid, tanh and hardtanh; the network's function is then
            the same, but for roundings of sigmoid and tanh.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no such poolings.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        >>> from purecompose.functional import apply_surgery
        >>> [type(module).__name__ for module in apply_surgery(net, pool_first())]
        ['Conv2d', 'MaxPool2d', 'BatchNorm2d', 'ReLU']

    References:
        Keller Jordan: 94% on CIFAR-10 in 3.29 Seconds on a Single GPU. 2024. https://arxiv.org/abs/2404.00498
    """

    def reordered(module: nn.Sequential, site: surgery.Site) -> nn.Module | None:
        if not _has_moved_pools(module, norms):
            return None
        for inner in module.modules():  # the surgery does not look into what it has replaced
            if inner in site.reach:
                _has_moved_pools(inner, norms)
        return module

    return surgery_method(name, {PooledFirst: None, nn.Sequential: reordered}, where)


_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_INCREASING = (nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.Sigmoid, nn.Tanh)
"""Activations that do not decrease; ReLU6 is a hardtanh."""


class PooledFirst(Derived):
    """Result of `pool_first`: a sequence of modules in another order, under the names that they had."""


def _has_moved_pools(module: nn.Module, norms: bool) -> bool:
    """Move the poolings of a sequence, and return whether there were any."""
    if isinstance(module, PooledFirst) or not is_plain(module, nn.Sequential):
        return False
    # named_children() leaves out the second of two places of a module.
    order: list[tuple[str, Any]] = list(module._modules.items())
    for i, (_, child) in enumerate(order):
        if any(is_plain(child, kind) for kind in _POOLS) and not child.return_indices:
            first = i
            while first and _commutes(order[first - 1][1], norms):
                first -= 1
            order.insert(first, order.pop(i))
    if order == list(module._modules.items()):
        return False
    module.__class__ = type(changed(module, PooledFirst))
    vars(module)["_modules"] = dict(order)
    return True


def _commutes(module: nn.Module, norms: bool) -> bool:
    """Return whether a max pooling may come before the module."""
    kinds = (*_INCREASING, _BatchNorm) if norms else _INCREASING
    return any(is_plain(module, kind) for kind in kinds) and getattr(module, "negative_slope", 0) >= 0


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
        latent_channels: The hidden width: an integer of at least 1, or, if below 1, a share of the output channels.
        min_channels: The least number of input and of output channels of a convolution that is replaced.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm and of the draws of its weights.

    Warns:
        UserWarning: At INIT: the network has no convolutions to replace.

    Example:
        >>> squeeze_excite(0.125)
        squeeze_excite(latent_channels=0.125, min_channels=128)

    References:
        Jie Hu et al.: Squeeze-and-Excitation Networks. CVPR 2018. https://arxiv.org/abs/1709.01507
    """

    def conv(module: nn.Conv2d, site: surgery.Site) -> nn.Module | None:
        del site
        is_wide = min(module.in_channels, module.out_channels) >= min_channels
        return SqueezeExciteConv2d(module, latent_channels) if is_wide else None

    return surgery_method(name, {nn.Conv2d: conv, SqueezeExciteConv2d: None}, where)


@factory
def weight_standardization(
    n_last_layers_ignore: Annotated[int, Within(0)] = 0, *, where: Where = None, name: str = "weight_standardization"
) -> Algorithm:
    """Standardize the filters of convolutions.

        W' = (W - mean) / sqrt(var + 1e-10),   over all dims of W but the first, with the biased variance

    The convolution uses W', and W is trained: gradients flow through the standardization, and the optimizer updates the
    raw weights. Names and values of parameters do not change.

    Transposed convolutions, and convolutions that override forward or have hooks or parametrized tensors, are not
    changed. Other subclasses become the standardized form of torch's class, with their attributes.

    Events: INIT. Reads and replaces: the model only.

    Args:
        n_last_layers_ignore: The number of last convolutions, in order of definition, that are not changed, such as
            those that compute the network's output.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no convolutions besides the ignored ones.

    Example:
        >>> weight_standardization(1)
        weight_standardization(n_last_layers_ignore=1)

    References:
        Siyuan Qiao et al.: Micro-Batch Training with Batch-Channel Normalization and Weight Standardization. 2019.
        https://arxiv.org/abs/1903.10520
    """
    kinds = tuple(STANDARDIZED)

    # Kept for each network, since the method may act on several.
    last: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()

    def conv(module: nn.Module, site: surgery.Site) -> nn.Module | None:
        if site.root not in last:
            # Includes convolutions that are already standardized, so that a second application ignores the same ones.
            convs = [found for found in site.reach if isinstance(found, kinds)]
            last[site.root] = WeakSet(convs[max(0, len(convs) - n_last_layers_ignore) :])
        return None if module in last[site.root] else standardized_conv(module)

    return surgery_method(name, {**dict.fromkeys(kinds, conv), **dict.fromkeys(STANDARDIZED.values())}, where)


@checked
def to_channels_last(tensors: Any) -> Any:
    """Return a tree whose four-dimensional tensors are stored in the order (N, H, W, C), with the same values.

    Args:
        tensors: A tensor, or any tree of tensors.

    Returns:
        The tree. Four-dimensional tensors are copied, unless they already have this layout; all other leaves are the
        same objects.

    Example:
        >>> to_channels_last(torch.zeros(2, 3, 4, 5)).stride()
        (60, 1, 15, 3)
    """
    return tree.map(_moved, tensors)


@factory
def channels_last(*, name: str = "channels_last") -> Algorithm:
    """Store weights with channels last.

    Four-dimensional tensors (N, C, H, W) keep their shape and values; their strides become those of (N, H, W, C), the
    layout that half-precision kernels on GPUs read. The batch is not changed: the first convolution with such filters
    returns its output in this layout, and the following layers keep it.

    Events: INIT, after the methods that change the model. Reads and replaces: parameters, buffers, and the optimizer's
    state.

    Args:
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no four-dimensional tensors.

    Example:
        >>> channels_last()
        channels_last()

    References:
        Channels Last Memory Format in PyTorch.
        https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """

    def apply(event: Event, state: State) -> State:
        del event
        tensors = {**state.params, **state.buffers}
        if not any(tensor.ndim == 4 for tensor in tensors.values()):
            warn_of_nothing(name, "tensors of four dimensions", state.model.module, "Leave it out")
            return state
        lasting = {field: getattr(state, field) for field in ("params", "buffers", "opt_state")}
        return state.replace(**to_channels_last(lasting))

    return Algorithm(name, on(Event.INIT), apply, runs_after=(Trait.REQUIRED_ON_LOAD,))


def _moved(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.ndim != 4 or leaf.layout is not torch.strided:
        return leaf
    if leaf.shape[1] == 1 < leaf.shape[2:].numel():
        # Its order in memory is right, so contiguous() would do nothing; but kernels recognize the layout by strides.
        return leaf.to(memory_format=torch.channels_last)
    return leaf.contiguous(memory_format=torch.channels_last)
