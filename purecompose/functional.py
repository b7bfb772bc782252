"""The methods' cores as plain functions, for use in any training loop.

They return new tensors, or a number; arguments are never modified. Functions that draw random numbers take the key
first: use a new one for every batch, `random.fold_in(key, step)`. Neutral settings do not switch a core off: with
`alpha=0` `mixup_batch` returns a `Mixture` of two terms, with `keep=1` `choose_by_loss` a random order.

`sample_transform` makes a core for images a transform of single samples of a data set. `apply_surgery` does what
methods on the model do at INIT, for a plain `nn.Module`: it returns a changed copy with separate weights, in the same
mode (train or eval); create the optimizer from the copy. Several gradients or weights are given as a mapping from
parameter names. `select_using_loss` does what selective backprop does in a step.
"""

from purecompose._support import publish
from purecompose.algorithms._around_updates import (
    perturb_params as perturb_params,
    pull_back as pull_back,
    schedule_free_step as schedule_free_step,
)
from purecompose.algorithms._averages import add_to_mean as add_to_mean, compute_ema as compute_ema
from purecompose.algorithms._batch_sizes import warmup_batch_size as warmup_batch_size
from purecompose.algorithms._convolutions import to_channels_last as to_channels_last
from purecompose.algorithms._cutmix import cutmix_batch as cutmix_batch, cutmix_box as cutmix_box
from purecompose.algorithms._dropout import (
    gyro_dropout_mask as gyro_dropout_mask,
    gyro_dropout_period as gyro_dropout_period,
)
from purecompose.algorithms._erasing import colout_batch as colout_batch, cutout_batch as cutout_batch
from purecompose.algorithms._image_operations import (
    augmix_batch as augmix_batch,
    randaugment_batch as randaugment_batch,
)
from purecompose.algorithms._initial_weights import whitening_filters as whitening_filters
from purecompose.algorithms._layer_freezing import frozen_layers as frozen_layers, layers_of as layers_of
from purecompose.algorithms._measurements import (
    critical_batch_size as critical_batch_size,
    estimate_noise as estimate_noise,
)
from purecompose.algorithms._optimizer_settings import (
    clip_adaptively as clip_adaptively,
    clip_by_norm as clip_by_norm,
    clip_by_value as clip_by_value,
)
from purecompose.algorithms._parts import apply_surgery as apply_surgery
from purecompose.algorithms._per_example_clipping import (
    clip_per_example as clip_per_example,
    norms_per_example as norms_per_example,
)
from purecompose.algorithms._progressive_resizing import (
    progressive_scale as progressive_scale,
    resize_batch as resize_batch,
)
from purecompose.algorithms._selective_backprop import (
    choose_by_loss as choose_by_loss,
    select_using_loss as select_using_loss,
)
from purecompose.algorithms._seq_length_warmup import (
    set_batch_sequence_length as set_batch_sequence_length,
    warmup_length as warmup_length,
)
from purecompose.algorithms._targets import mixup_batch as mixup_batch, smooth_labels as smooth_labels
from purecompose.algorithms._views import (
    alternating_flip_batch as alternating_flip_batch,
    average_over_views as average_over_views,
    random_crop_batch as random_crop_batch,
)
from purecompose.algorithms.images.samples import sample_transform as sample_transform
from purecompose.nn.layers.convolutions import (
    blur_2d as blur_2d,
    blurmax_pool2d as blurmax_pool2d,
    standardized as standardized,
)
from purecompose.nn.layers.transformer import alibi_bias as alibi_bias, alibi_slopes as alibi_slopes


publish(__name__)
