"""Losses, their targets, and metrics.

A loss is any callable `(outputs, targets, reduction="mean")` with reduction "mean", "sum" or "none"; so
`torch.nn.functional.cross_entropy` is one.

A loss may say what its mean divides by, so that microbatches add up to the batch: by a method
`counted(outputs, targets)`, a bool tensor of the shape that reduction "none" gives, true where a position enters the
mean (padding does not); or by a method `num_terms(outputs, targets)`, the number itself, which may be a sum of weights.
A loss with neither is taken for a mean over all elements. Nothing here reads a value back from the device.
"""

from purecompose.losses.evaluation import check_loss, evaluate_loss, per_example
from purecompose.losses.from_model import ModelLoss, model_loss
from purecompose.losses.functions import (
    BinaryCrossEntropy,
    CrossEntropy,
    Dice,
    MeanSquaredError,
    binary_cross_entropy,
    cross_entropy,
    dice,
    mse,
)
from purecompose.losses.targets import Mixture, has_index_targets, num_examples, one_hot
from purecompose.losses.terms import counts_terms, num_terms, share_of_mean


__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Dice",
    "MeanSquaredError",
    "Mixture",
    "ModelLoss",
    "binary_cross_entropy",
    "check_loss",
    "counts_terms",
    "cross_entropy",
    "dice",
    "evaluate_loss",
    "has_index_targets",
    "model_loss",
    "mse",
    "num_examples",
    "num_terms",
    "one_hot",
    "per_example",
    "share_of_mean",
]
