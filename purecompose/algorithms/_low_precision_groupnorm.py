"""Low-precision group norm: computes group normalisation in half precision if the forward pass does."""

from torch import nn

from purecompose import surgery
from purecompose.algorithms._parts.low_precision import half_precision_method
from purecompose.algorithms._parts.surgery import on_module
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers._forms import is_plain
from purecompose.nn.layers.norms import LowPrecisionGroupNorm


def low_precision_groupnorm_rules() -> surgery.Rules:
    """Return the rules that replace group norms; for `purecompose.surgery`.

    The new layers use the dtype of autocast when it is active.

    Example:
        >>> type(low_precision_groupnorm_rules()[nn.GroupNorm](nn.GroupNorm(2, 4), None)).__name__
        'LowPrecisionGroupNorm'
    """

    def norm(module: nn.GroupNorm, site: surgery.Site) -> nn.Module | None:
        del site
        return LowPrecisionGroupNorm.of(module) if is_plain(module, nn.GroupNorm) else None

    return {nn.GroupNorm: norm, LowPrecisionGroupNorm: None}


apply_low_precision_groupnorm = on_module("low_precision_groupnorm", low_precision_groupnorm_rules)
"""`apply_low_precision_groupnorm(net, **settings)` returns a copy of a network with group norms in half precision; the
settings are those of `low_precision_groupnorm_rules`.
"""


@factory
def low_precision_groupnorm(*, name: str = "low_precision_groupnorm") -> Algorithm:
    """Compute group norms in half precision.

        y = (x - mean) / sqrt(var + eps) * w + b,   for each example over a group's channels and all positions, with
                                                    the biased variance; w and b for each channel

    As in low-precision layer norm, input, weight and bias have autocast's dtype, and sums are in float32.

    Events: INIT, after all other methods, together with low-precision layer norm. Reads and replaces: the model only.
    Under `precision="fp32"` and `"tf32"` it changes nothing, and warns. Parts of the network without trainable
    parameters are not changed.

    Args:
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no group norms, or the forward pass is in full precision.

    Example:
        >>> low_precision_groupnorm()
        low_precision_groupnorm()

    References:
        Yuxin Wu, Kaiming He: Group Normalization. ECCV 2018. https://arxiv.org/abs/1803.08494
    """
    return half_precision_method(name, low_precision_groupnorm_rules())
