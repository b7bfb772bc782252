"""The training methods, one file each: a factory that returns an `Algorithm`, and its functional core.

The cores are gathered in `purecompose.functional`.
"""

from collections.abc import Callable

from purecompose.algorithm import Algorithm
from purecompose.algorithms.augmix import augmix
from purecompose.algorithms.gradient_norm import gradient_norm
from purecompose.algorithms.label_smoothing import label_smoothing
from purecompose.algorithms.loss_scaling import loss_scaling
from purecompose.algorithms.mixup import mixup
from purecompose.algorithms.randaugment import randaugment
from purecompose.algorithms.selective_backprop import selective_backprop
from purecompose.algorithms.training_metrics import training_metrics


__all__ = [
    "FACTORIES",
    "augmix",
    "gradient_norm",
    "label_smoothing",
    "loss_scaling",
    "mixup",
    "randaugment",
    "selective_backprop",
    "training_metrics",
]

FACTORIES: dict[str, Callable[..., Algorithm]] = {
    "augmix": augmix,
    "gradient_norm": gradient_norm,
    "label_smoothing": label_smoothing,
    "loss_scaling": loss_scaling,
    "mixup": mixup,
    "randaugment": randaugment,
    "selective_backprop": selective_backprop,
    "training_metrics": training_metrics,
}
"""Every factory by its name, for those who choose methods by name, as the command line does."""
