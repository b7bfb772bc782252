"""Weight standardization: gives the filters of convolutions mean 0 and variance 1."""

from typing import Annotated, Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from purecompose import surgery
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import on_module, surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers.convolutions import STANDARDIZED, plain_conv, standardized_conv
from purecompose.schedule.declared import Within, checked


NumIgnored: TypeAlias = Annotated[int, Within(0)]


@checked
def weight_standardization_rules(n_last_layers_ignore: NumIgnored = 0) -> surgery.Rules:
    """Return the rules that replace convolutions; for `purecompose.surgery`.

    Args:
        n_last_layers_ignore: See `weight_standardization`.

    Example:
        >>> [kind.__name__ for kind, rule in weight_standardization_rules().items() if rule is not None]
        ['Conv1d', 'Conv2d', 'Conv3d']
    """
    kinds = tuple(STANDARDIZED)

    # Kept for each network, since the rules may be applied to several.
    last: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()

    def conv(module: nn.Module, site: surgery.Site) -> nn.Module | None:
        if site.root not in last:
            # Includes convolutions that are already standardized, so that a second application ignores the same ones.
            convs = [found for found in site.reach if isinstance(found, kinds)]
            last[site.root] = WeakSet(convs[max(0, len(convs) - n_last_layers_ignore) :])
        return None if module in last[site.root] else standardized_conv(module)

    return {**dict.fromkeys(kinds, conv), **dict.fromkeys(STANDARDIZED.values())}


@checked
def weight_standardization_undo_rules(*, is_baked: bool = False) -> surgery.Rules:
    """Return the rules that restore plain convolutions; for `purecompose.surgery`.

    Args:
        is_baked: Store the standardized filters in new parameters, tied like the old ones, so that the network still
            computes the same function. If False, the raw parameters are kept, and the network is a different
            function.

    Example:
        >>> weight_standardization_undo_rules()[STANDARDIZED[nn.Conv2d]](standardized_conv(nn.Conv2d(3, 8, 1)), None)
        Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))
    """

    # Maps the id of an old parameter to the new one, for each network, since the rules may be applied to several.
    baked: WeakKeyDictionary[nn.Module, dict[int, nn.Parameter]] = WeakKeyDictionary()

    def conv(module: Any, site: surgery.Site) -> nn.Module | None:
        new: Any = plain_conv(module, is_baked=is_baked)
        if is_baked:
            new.weight = baked.setdefault(site.root, {}).setdefault(id(module.weight), new.weight)
        return new

    return dict.fromkeys(STANDARDIZED.values(), conv)


apply_weight_standardization = on_module("weight_standardization", weight_standardization_rules)
"""`apply_weight_standardization(net, **settings)` returns a copy of a network with convolutions with standardized
filters; the settings are those of `weight_standardization_rules`.
"""


@factory
def weight_standardization(
    n_last_layers_ignore: NumIgnored = 0, *, where: Where = None, name: str = "weight_standardization"
) -> Algorithm:
    """Standardize the filters of convolutions.

        W' = (W - mean) / sqrt(var + 1e-10),   over all dims of W but the first, with the biased variance

    The convolution uses W', and W is trained: gradients flow through the standardization, and the optimizer updates the
    raw weights. Names and values of parameters do not change; `surgery.operate` with
    `weight_standardization_undo_rules` restores plain convolutions, with the raw or the standardized weights.

    Transposed convolutions, and convolutions that override forward or have hooks or parametrized tensors, are not
    changed. Other subclasses keep their attributes and methods: a `MyConv` becomes a `StandardizedMyConv`, which is a
    subclass of `MyConv`.

    Events: INIT. Reads and replaces: the model only.

    Args:
        n_last_layers_ignore: The number of last convolutions, in order of definition, that are not changed, such as
            those that compute the network's output.
        where: Pattern or patterns (`fnmatch`) of the names of modules to change, including their submodules, such as
            "student.*"; by default all except parts without trainable parameters, such as a frozen teacher.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no convolutions besides the ignored ones.

    Example:
        >>> weight_standardization(1)
        weight_standardization(n_last_layers_ignore=1)

    References:
        Siyuan Qiao, Huiyu Wang, Chenxi Liu, Wei Shen, Alan Yuille: Micro-Batch Training with Batch-Channel
        Normalization and Weight Standardization. 2019. https://arxiv.org/abs/1903.10520
    """
    return surgery_method(name, weight_standardization_rules(n_last_layers_ignore), where)
