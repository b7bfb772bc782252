"""The methods' cores as plain functions, for use in any training loop.

Tensors and settings in, new tensors out (or, of `should_selective_backprop`, a bool). What comes in is never changed.
Where a function draws, the key comes first, and the same key gives the same result. There are no neutral settings
here: `mixup_batch(alpha=0)` still returns a `Mixture` of two terms, `smooth_labels(smoothing=0)` dense targets, and
`choose_by_loss(keep=1)` a random order of the whole batch; to switch a method off, leave the call out.

    mixup_batch(key, inputs, targets) -> (inputs, targets)
    smooth_labels(logits, targets) -> targets
    choose_by_loss(key, example_losses) -> positions in the batch
    select_using_loss(key, inputs, targets, forward_fn, loss_fn) -> (inputs, targets)
    should_selective_backprop(current_duration, batch_in_epoch) -> bool

The algorithms `mixup`, `label_smoothing` and `selective_backprop` are made of the first three, the drawing ones with
the key `state.rng(name)`. `select_using_loss` and `should_selective_backprop` say for a loop of one's own what the
third algorithm's `apply` and `match` say inside a step.
"""

from purecompose.algorithms.augmix import augmix_batch, augmix_transform
from purecompose.algorithms.label_smoothing import smooth_labels
from purecompose.algorithms.mixup import mixup_batch
from purecompose.algorithms.randaugment import randaugment_batch, randaugment_transform
from purecompose.algorithms.selective_backprop import (
    choose_by_loss,
    select_using_loss,
    should_selective_backprop,
)


__all__ = [
    "augmix_batch",
    "augmix_transform",
    "choose_by_loss",
    "mixup_batch",
    "randaugment_batch",
    "randaugment_transform",
    "select_using_loss",
    "should_selective_backprop",
    "smooth_labels",
]
