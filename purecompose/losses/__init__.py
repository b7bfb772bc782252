"""Losses, their targets, and metrics.

A loss is any callable `(outputs, targets, reduction="mean")` with reduction "mean", "sum" or "none"; so
`torch.nn.functional.cross_entropy` is one.

A loss may report what its mean divides by, so that microbatches add up to the batch: by a method
`counted(outputs, targets)`, which returns a bool tensor of the shape of the losses with reduction "none", true where a
position enters the mean (padding does not); or by a method `num_terms(outputs, targets)`, which returns the number
itself, possibly a sum of weights. Any other loss is treated as a mean over all elements. Nothing here reads a value
back from the device.

A sum of means with different denominators has a method `denominators(targets)`, which returns a pytree of 0-d tensors
or numbers, and divides by the argument of that name in `loss(outputs, targets, denominators=...)`: those of the same
targets or, for a slice of a batch, the slice's share of those of the whole batch, so that the loss is again a mean over
examples.
"""

from purecompose._support import publish
from purecompose.losses.evaluation import (
    check_loss as check_loss,
    evaluate_loss as evaluate_loss,
    evaluate_parts as evaluate_parts,
    metrics_of_parts as metrics_of_parts,
    per_example as per_example,
)
from purecompose.losses.from_model import ModelLoss as ModelLoss, model_loss as model_loss
from purecompose.losses.functions import (
    BinaryCrossEntropy as BinaryCrossEntropy,
    BinaryFocal as BinaryFocal,
    CrossEntropy as CrossEntropy,
    Focal as Focal,
    MeanSquaredError as MeanSquaredError,
    binary_cross_entropy as binary_cross_entropy,
    binary_focal as binary_focal,
    cross_entropy as cross_entropy,
    focal as focal,
    mse as mse,
)
from purecompose.losses.structured import (
    CTC as CTC,
    Distillation as Distillation,
    InfoNCE as InfoNCE,
    ctc as ctc,
    distillation as distillation,
    info_nce as info_nce,
)
from purecompose.losses.targets import (
    Mixture as Mixture,
    has_index_targets as has_index_targets,
    num_examples as num_examples,
    one_hot as one_hot,
)
from purecompose.losses.terms import (
    counts_terms as counts_terms,
    couples_examples as couples_examples,
    num_terms as num_terms,
    over_batch as over_batch,
    share_of_mean as share_of_mean,
)


publish(__name__)
