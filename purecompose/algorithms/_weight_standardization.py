"""Weight standardization: gives the filters of convolutions mean 0 and variance 1."""

from typing import Annotated
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from purecompose import surgery
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers.convolutions import STANDARDIZED, standardized_conv
from purecompose.schedule.declared import Within


@factory
def weight_standardization(
    n_last_layers_ignore: Annotated[int, Within(0)] = 0, *, where: Where = None, name: str = "weight_standardization"
) -> Algorithm:
    """Standardize the filters of convolutions.

        W' = (W - mean) / sqrt(var + 1e-10),   over all dims of W but the first, with the biased variance

    The convolution uses W', and W is trained: gradients flow through the standardization, and the optimizer updates the
    raw weights. Names and values of parameters do not change.

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
