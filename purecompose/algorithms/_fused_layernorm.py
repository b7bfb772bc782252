"""Fused layer norm: the older name of low-precision layer norm."""

from purecompose.algorithms._low_precision_layernorm import low_precision_layernorm
from purecompose.core.algorithm import Algorithm, factory


__all__ = ["fused_layernorm"]


@factory
def fused_layernorm(*, name: str = "fused_layernorm") -> Algorithm:
    """`low_precision_layernorm` under its older name.

    It stood for a layer norm in one kernel. torch's own is one since long, and a compiled step fuses it with what is
    around it, so what is left of the method is what made it fast under autocast: half precision, without a way to
    float32 and back.

    Events: INIT, and last there. Reads and replaces: the model only.

    Args:
        name: Names it.

    Warns:
        UserWarning: At INIT: as `low_precision_layernorm`.

    Example:
        >>> fused_layernorm()
        fused_layernorm()
    """
    return low_precision_layernorm(name=name)
