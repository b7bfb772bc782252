"""Low-precision layer norm: computes layer normalisation in half precision if the forward pass does."""

from torch import nn

from purecompose import surgery
from purecompose.algorithms._parts.low_precision import half_precision_method
from purecompose.algorithms._parts.surgery import on_module
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers._forms import is_plain
from purecompose.nn.layers.norms import LowPrecisionLayerNorm


def low_precision_layernorm_rules() -> surgery.Rules:
    """Return the rules that replace layer norms; for `purecompose.surgery`.

    The new layers use the dtype of autocast when it is active.

    Example:
        >>> type(low_precision_layernorm_rules()[nn.LayerNorm](nn.LayerNorm(4), None)).__name__
        'LowPrecisionLayerNorm'
    """

    def norm(module: nn.LayerNorm, site: surgery.Site) -> nn.Module | None:
        del site
        return LowPrecisionLayerNorm.of(module) if is_plain(module, nn.LayerNorm) else None

    return {nn.LayerNorm: norm, LowPrecisionLayerNorm: None}


apply_low_precision_layernorm = on_module("low_precision_layernorm", low_precision_layernorm_rules)
"""`apply_low_precision_layernorm(net, **settings)` returns a copy of a network with layer norms in half precision; the
settings are those of `low_precision_layernorm_rules`.
"""


@factory
def low_precision_layernorm(*, name: str = "low_precision_layernorm") -> Algorithm:
    """Compute layer norms in half precision.

        y = (x - mean) / sqrt(var + eps) * w + b,   over the normalised dimensions, with the biased variance

    Under autocast, torch converts the input of a layer norm to float32 and returns float32. Here input, weight, bias
    and result have autocast's dtype; mean and variance are still summed in float32. Names and values of parameters do
    not change, so weights can be exchanged with plain layer norms.

    Events: INIT, after all other methods. Reads and replaces: the model only. Under `precision="fp32"` and `"tf32"` it
    changes nothing, and warns. Parts of the network without trainable parameters are not changed.

    Args:
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no layer norms, or the forward pass is in full precision.

    Example:
        >>> low_precision_layernorm()
        low_precision_layernorm()

    References:
        Jimmy Lei Ba, Jamie Ryan Kiros, Geoffrey E. Hinton: Layer Normalization. 2016. https://arxiv.org/abs/1607.06450
    """
    return half_precision_method(name, low_precision_layernorm_rules())
