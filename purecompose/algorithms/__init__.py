"""The training methods, one file each: a factory that returns an `Algorithm`, and its functional core.

The cores are gathered in `purecompose.functional`.
"""

from collections.abc import Callable

from purecompose.algorithm import Algorithm
from purecompose.algorithms.label_smoothing import label_smoothing
from purecompose.algorithms.mixup import mixup
from purecompose.algorithms.selective_backprop import selective_backprop


__all__ = [
    "FACTORIES",
    "label_smoothing",
    "mixup",
    "selective_backprop",
]

FACTORIES: dict[str, Callable[..., Algorithm]] = {
    "label_smoothing": label_smoothing,
    "mixup": mixup,
    "selective_backprop": selective_backprop,
}
"""Every factory by its name, for those who choose methods by name, as the command line does."""
