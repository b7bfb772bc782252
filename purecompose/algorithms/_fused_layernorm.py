"""Fused layer norm: the older name of low-precision layer norm."""

from purecompose.algorithms._low_precision_layernorm import low_precision_layernorm
from purecompose.core.algorithm import Algorithm, factory


@factory
def fused_layernorm(*, name: str = "fused_layernorm") -> Algorithm:
    """Return `low_precision_layernorm` under its older name.

    The name referred to a layer norm in one kernel. torch's layer norm is now a single kernel, and a compiled step
    fuses it with neighbouring operations, so only the other advantage of the method under autocast remains: half
    precision, without conversions to float32 and back.

    Events: INIT, after all other methods. Reads and replaces: the model only.

    Args:
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: see `low_precision_layernorm`.

    Example:
        >>> fused_layernorm()
        fused_layernorm()
    """
    return low_precision_layernorm(name=name)
