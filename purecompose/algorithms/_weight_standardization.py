"""Weight standardization: convolutions with filters of mean 0 and variance 1."""

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from purecompose import surgery
from purecompose._support.checks import check_flag, check_whole
from purecompose.algorithms._parts.surgery import on_module, surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers.standardized import STANDARDIZED, plain_conv, standardized, standardized_conv


__all__ = [
    "apply_weight_standardization",
    "standardized",
    "weight_standardization",
    "weight_standardization_rules",
    "weight_standardization_undo_rules",
]


def weight_standardization_rules(n_last_layers_ignore: int = 0) -> surgery.Rules:
    """Return the rules that replace convolutions; for `purecompose.surgery`.

    Args:
        n_last_layers_ignore: See `weight_standardization`.

    Raises:
        TypeError, ValueError: As `weight_standardization`.

    Example:
        >>> [kind.__name__ for kind, rule in weight_standardization_rules().items() if rule is not None]
        ['Conv1d', 'Conv2d', 'Conv3d']
    """
    check_whole(n_last_layers_ignore, "weight_standardization: n_last_layers_ignore", 0)
    kinds = tuple(STANDARDIZED)

    # For each network, since rules may be applied to several.
    last: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()

    def conv(module: nn.Module, site: surgery.Site) -> nn.Module | None:
        if site.root not in last:
            # Those that are standardized already are among them: the last ones are the same a second time.
            convs = [found for found in site.root.modules() if isinstance(found, kinds)]
            last[site.root] = WeakSet(convs[max(0, len(convs) - n_last_layers_ignore) :])
        return None if module in last[site.root] else standardized_conv(module)

    return {**dict.fromkeys(kinds, conv), **dict.fromkeys(STANDARDIZED.values())}


def weight_standardization_undo_rules(*, is_baked: bool = False) -> surgery.Rules:
    """Return the rules that restore plain convolutions; for `purecompose.surgery`.

    Args:
        is_baked: Whether the filters become the standardized ones, in new parameters, tied where the old ones were, so
            that the network computes what it did, without the method; otherwise the parameters stay as they are, and
            the network is another function.

    Raises:
        TypeError: No flag.

    Example:
        >>> weight_standardization_undo_rules()[STANDARDIZED[nn.Conv2d]](standardized_conv(nn.Conv2d(3, 8, 1)), None)
        Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))
    """
    check_flag(is_baked, "weight_standardization_undo_rules: is_baked")

    # For each network, since rules may be applied to several: what became of a parameter, by its id.
    baked: WeakKeyDictionary[nn.Module, dict[int, nn.Parameter]] = WeakKeyDictionary()

    def conv(module: Any, site: surgery.Site) -> nn.Module | None:
        new: Any = plain_conv(module, is_baked=is_baked)
        if is_baked:
            new.weight = baked.setdefault(site.root, {}).setdefault(id(module.weight), new.weight)
        return new

    return dict.fromkeys(STANDARDIZED.values(), conv)


apply_weight_standardization = on_module("weight_standardization", weight_standardization_rules)


@factory
def weight_standardization(n_last_layers_ignore: int = 0, *, name: str = "weight_standardization") -> Algorithm:
    """Standardize the filters of convolutions.

        W' = (W - mean) / sqrt(var + 1e-10),   over all dims of W but the first, with the biased variance

    W trains, W' computes: gradients flow through the standardization, and the optimizer moves the raw weights. Names
    and values of parameters stay as they are; `surgery.operate` with `weight_standardization_undo_rules` gives plain
    convolutions back, with the raw weights or with the standardized ones.

    Transposed convolutions stay, and those with a forward of their own, hooks or parametrized tensors. Other subclasses
    keep what they have: a `MyConv` becomes a `StandardizedMyConv`, which is a `MyConv`.

    Events: INIT. Reads and replaces: the model only.

    Args:
        n_last_layers_ignore: How many convolutions at the end, in order of definition, stay as they are: those that
            give the answers.
        name: Names it.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range.

    Warns:
        UserWarning: At INIT: the network has no convolutions but those that are left out.

    Example:
        >>> weight_standardization(1)
        weight_standardization(n_last_layers_ignore=1)

    References:
        Siyuan Qiao, Huiyu Wang, Chenxi Liu, Wei Shen, Alan Yuille: Micro-Batch Training with Batch-Channel
        Normalization and Weight Standardization. 2019. https://arxiv.org/abs/1903.10520
    """
    rules = weight_standardization_rules(n_last_layers_ignore)
    return surgery_method(name, rules, {"n_last_layers_ignore": n_last_layers_ignore})
