"""Factorize: replaces wide linear and convolution layers by two thinner ones with no activation between them."""

import dataclasses
from typing import Annotated, TypeAlias

from torch import nn

from purecompose import surgery
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import surgery_method
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.nn.layers._forms import check_latent, is_plain, is_tied, latent_size
from purecompose.nn.layers.factorized import FactorizedConv2d, FactorizedLinear, max_latent
from purecompose.schedule.declared import Within


Least: TypeAlias = Annotated[int, Within(1)]
Latent: TypeAlias = Annotated[float, check_latent]


@factory
def factorize(
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: Least = 256,
    latent_channels: Latent = 0.25,
    min_features: Least = 256,
    latent_features: Latent = 128,
    *,
    where: Where = None,
    name: str = "factorize",
) -> Algorithm:
    """Replace wide layers by products of two thinner ones.

        linear, in -> out                      in -> k without bias, k -> out
        convolution, in -> out, kernel h x w   in -> k with h x w, its stride, padding and dilation; k -> out with 1 x 1

    The factors come from the truncated singular value decomposition of the layer's weight, so that the network
    continues from the closest function of this rank; at full rank it is the same function. The bias is kept.

    k is an integer, or, if below 1, a share of the smaller of the layer's numbers of inputs and outputs (channels or
    features). A layer is replaced if this smaller number reaches a minimum; if the two factors need fewer
    multiplications than the layer, k < F out / (F + out) with F the number of inputs of one output; and if it has one
    group, a weight that is not shared, no hooks, and no forward set on the instance. The first factor of a layer of
    zeros is not zero, so that the layer can train.

    Events: INIT, after the methods that look for complete layers (`Trait.REPLACES_LAYERS`). Reads and replaces: the
    model, its parameters and the optimizer's state.

    Args:
        factorize_convs: Replace convolutions.
        factorize_linears: Replace linear layers.
        min_channels: The least number of input channels and of output channels of a convolution that is replaced.
        latent_channels: The number of channels between the factors of a convolution: an integer of at least 1, or, if
            below 1, a share of the smaller of its numbers of input and output channels, rounded down, at least 1.
        min_features: As `min_channels`, for the features of linear layers.
        latent_features: As `latent_channels`, for the features of linear layers.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no layers that factorizing makes faster.

    Example:
        >>> factorize(factorize_linears=False, latent_channels=0.5).config["latent_channels"]
        0.5

    References:
        Xiangyu Zhang et al.: Accelerating Very Deep Convolutional Networks for Classification and Detection. TPAMI
        2016. https://arxiv.org/abs/1505.06798
    """

    def conv(module: nn.Conv2d, site: surgery.Site) -> nn.Module | None:
        smaller = min(module.in_channels, module.out_channels)
        latent = latent_size(latent_channels, smaller)
        is_wanted = _is_itself(module, nn.Conv2d) and module.groups == 1 and smaller >= min_channels
        return FactorizedConv2d(module, latent) if is_wanted and _is_worth_it(module, latent, site) else None

    def linear(module: nn.Linear, site: surgery.Site) -> nn.Module | None:
        smaller = min(module.in_features, module.out_features)
        latent = latent_size(latent_features, smaller)
        is_wanted = _is_itself(module, nn.Linear) and smaller >= min_features
        return FactorizedLinear(module, latent) if is_wanted and _is_worth_it(module, latent, site) else None

    rules: dict[type[nn.Module], surgery.Rule | None] = {FactorizedConv2d: None, FactorizedLinear: None}
    if factorize_convs:
        rules[nn.Conv2d] = conv
    if factorize_linears:
        rules[nn.Linear] = linear
    is_neutral = not factorize_convs and not factorize_linears
    traits = frozenset({Trait.REQUIRED_ON_LOAD})
    method = surgery_method(name, rules, where, is_neutral=is_neutral, traits=traits)
    # Methods that look for complete layers would otherwise find the factors.
    return dataclasses.replace(method, runs_after=(Trait.REPLACES_LAYERS,))


def _is_itself(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module) is kind and is_plain(module, kind)


def _is_worth_it(module: nn.Linear | nn.Conv2d, latent: int, site: surgery.Site) -> bool:
    # Factors of a weight that is shared with another layer would add parameters instead of saving them.
    return latent <= max_latent(module) and not is_tied(module, site.root)
