"""The training methods, one file each: a factory that returns an `Algorithm`, and its functional core.

The cores are gathered in `purecompose.functional`.
"""

from collections.abc import Callable

from purecompose.algorithm import Algorithm
from purecompose.algorithms.augmix import augmix
from purecompose.algorithms.colout import colout
from purecompose.algorithms.cutmix import cutmix
from purecompose.algorithms.cutout import cutout
from purecompose.algorithms.gradient_norm import gradient_norm
from purecompose.algorithms.gyro_dropout import gyro_dropout
from purecompose.algorithms.label_smoothing import label_smoothing
from purecompose.algorithms.loss_scaling import loss_scaling
from purecompose.algorithms.mixup import mixup
from purecompose.algorithms.progressive_resizing import progressive_resizing
from purecompose.algorithms.randaugment import randaugment
from purecompose.algorithms.selective_backprop import selective_backprop
from purecompose.algorithms.seq_length_warmup import seq_length_warmup
from purecompose.algorithms.training_metrics import training_metrics


__all__ = [
    "FACTORIES",
    "augmix",
    "colout",
    "cutmix",
    "cutout",
    "gradient_norm",
    "gyro_dropout",
    "label_smoothing",
    "loss_scaling",
    "mixup",
    "progressive_resizing",
    "randaugment",
    "selective_backprop",
    "seq_length_warmup",
    "training_metrics",
]

FACTORIES: dict[str, Callable[..., Algorithm]] = {
    "augmix": augmix,
    "colout": colout,
    "cutmix": cutmix,
    "cutout": cutout,
    "gradient_norm": gradient_norm,
    "gyro_dropout": gyro_dropout,
    "label_smoothing": label_smoothing,
    "loss_scaling": loss_scaling,
    "mixup": mixup,
    "progressive_resizing": progressive_resizing,
    "randaugment": randaugment,
    "selective_backprop": selective_backprop,
    "seq_length_warmup": seq_length_warmup,
    "training_metrics": training_metrics,
}
"""Every factory by its name, for those who choose methods by name, as the command line does."""
