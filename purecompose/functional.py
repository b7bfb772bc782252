"""The methods as plain functions of tensors, for use in any training loop.

All of one form: `fn(key, tensors ..., settings) -> new tensors`, the key first where the function draws. What
comes in is never changed, and the same key gives the same result. Settings that switch a method off give back
what came in. The algorithms of `purecompose.algorithms` call these functions, with the key `state.rng(name)`.

    mixup_batch(key, inputs, targets) -> (inputs, targets)
    smooth_labels(logits, targets) -> targets
    choose_by_loss(key, example_losses) -> positions in the batch
    select_using_loss(key, inputs, targets, forward_fn, loss_fn) -> (inputs, targets)
    should_selective_backprop(current_duration, batch_in_epoch) -> bool
"""

from purecompose.algorithms.label_smoothing import smooth_labels
from purecompose.algorithms.mixup import mixup_batch
from purecompose.algorithms.selective_backprop import (
    choose_by_loss,
    select_using_loss,
    should_selective_backprop,
)


__all__ = [
    "choose_by_loss",
    "mixup_batch",
    "select_using_loss",
    "should_selective_backprop",
    "smooth_labels",
]
