"""The methods' cores as plain functions, for use in any training loop.

Tensors and settings in, new tensors out; some give a number or a bool, as stands below. What comes in is never changed.
Where a function draws, the key comes first, and the same key gives the same result: give every batch a key of its own,
`random.fold_in(key, step)`. Cores do not switch themselves off. `severity=0` or `num_holes=0` leave images alone, but
`mixup_batch(alpha=0)` still returns a `Mixture` of two terms, `smooth_labels(smoothing=0)` dense targets, and
`choose_by_loss(keep=1)` a random order of the whole batch; leave the call out instead.

    mixup_batch(key, inputs, targets) -> (inputs, targets)
    cutmix_batch(key, inputs, targets) -> (inputs, targets)
    cutmix_box(key, height, width) -> box
    cutout_batch(key, images) -> images
    colout_batch(key, inputs, targets) -> (inputs, targets), or inputs where there are no targets
    randaugment_batch(key, images) -> images
    augmix_batch(key, images) -> images
    smooth_labels(logits, targets) -> targets
    resize_batch(key, inputs, targets, scale_factor) -> (inputs, targets)
    progressive_scale(elapsed) -> float
    set_batch_sequence_length(batch, length) -> batch
    warmup_length(elapsed) -> int
    gyro_drop(key, inputs) -> inputs, in training
    gyro_dropout_mask(key, shape) -> mask
    gyro_dropout_period(total_batches) -> int
    choose_by_loss(key, example_losses) -> positions in the batch
    select_using_loss(key, inputs, targets, forward_fn, loss_fn) -> (inputs, targets)
    should_selective_backprop(current_duration, batch_in_epoch) -> bool

For the samples of a data set, PIL images or tensors, each a function `(sample, rng=None) -> sample`:

    cutout_transform(num_holes, length) -> transform
    colout_transform(p_row, p_col) -> transform
    randaugment_transform(severity, depth) -> transform
    augmix_transform(severity, depth, width) -> transform

The algorithms are made of these, the drawing ones with the key `state.rng(name)`. `select_using_loss` and
`should_selective_backprop` say for a loop of one's own what selective backprop's `apply` and `match` say inside a step.
"""

from purecompose.algorithms.augmix import augmix_batch, augmix_transform
from purecompose.algorithms.colout import colout_batch, colout_transform
from purecompose.algorithms.cutmix import cutmix_batch, cutmix_box
from purecompose.algorithms.cutout import cutout_batch, cutout_transform
from purecompose.algorithms.gyro_dropout import gyro_drop, gyro_dropout_mask, gyro_dropout_period
from purecompose.algorithms.label_smoothing import smooth_labels
from purecompose.algorithms.mixup import mixup_batch
from purecompose.algorithms.progressive_resizing import progressive_scale, resize_batch
from purecompose.algorithms.randaugment import randaugment_batch, randaugment_transform
from purecompose.algorithms.selective_backprop import (
    choose_by_loss,
    select_using_loss,
    should_selective_backprop,
)
from purecompose.algorithms.seq_length_warmup import set_batch_sequence_length, warmup_length


__all__ = [
    "augmix_batch",
    "augmix_transform",
    "choose_by_loss",
    "colout_batch",
    "colout_transform",
    "cutmix_batch",
    "cutmix_box",
    "cutout_batch",
    "cutout_transform",
    "gyro_drop",
    "gyro_dropout_mask",
    "gyro_dropout_period",
    "mixup_batch",
    "progressive_scale",
    "randaugment_batch",
    "randaugment_transform",
    "resize_batch",
    "select_using_loss",
    "set_batch_sequence_length",
    "should_selective_backprop",
    "smooth_labels",
    "warmup_length",
]
