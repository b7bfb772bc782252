"""One table of all shipped algorithms: what laws and property tests run them with.

A later algorithm joins by adding a file with its row; a test compares the table with the factories.
"""

from collections.abc import Mapping
from types import MappingProxyType

from purecompose.testing.shipped import (
    alibi,
    augmix,
    batch_size_warmup,
    blurpool,
    channels_last,
    colout,
    cutmix,
    cutout,
    decoupled_weight_decay,
    ema,
    factorize,
    fused_layernorm,
    gated_linear_units,
    ghost_batchnorm,
    gradient_accumulation,
    gradient_clipping,
    gradient_noise_scale,
    gradient_norm,
    gyro_dropout,
    label_smoothing,
    layer_freezing,
    lookahead,
    loss_scaling,
    low_precision_groupnorm,
    low_precision_layernorm,
    mixup,
    no_op_model,
    per_example_clipping,
    progressive_resizing,
    randaugment,
    sam,
    schedule_free,
    selective_backprop,
    seq_length_warmup,
    skip_nonfinite,
    squeeze_excite,
    stochastic_depth,
    swa,
    training_metrics,
    weight_standardization,
)
from purecompose.testing.shipped.row import Row


__all__ = ["SHIPPED", "Row"]

_FILES = (
    alibi,
    augmix,
    batch_size_warmup,
    blurpool,
    channels_last,
    colout,
    cutmix,
    cutout,
    decoupled_weight_decay,
    ema,
    factorize,
    fused_layernorm,
    gated_linear_units,
    ghost_batchnorm,
    gradient_accumulation,
    gradient_clipping,
    gradient_noise_scale,
    gradient_norm,
    gyro_dropout,
    label_smoothing,
    layer_freezing,
    lookahead,
    loss_scaling,
    low_precision_groupnorm,
    low_precision_layernorm,
    mixup,
    no_op_model,
    per_example_clipping,
    progressive_resizing,
    randaugment,
    sam,
    schedule_free,
    selective_backprop,
    seq_length_warmup,
    skip_nonfinite,
    squeeze_excite,
    stochastic_depth,
    swa,
    training_metrics,
    weight_standardization,
)

SHIPPED: Mapping[str, Row] = MappingProxyType({file.ROW.name: file.ROW for file in _FILES})
"""The rows by the factory's name."""
