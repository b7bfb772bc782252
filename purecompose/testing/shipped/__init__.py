"""One table of all shipped algorithms: what laws and property tests run them with.

A later algorithm joins by adding a file with its row; a test compares the table with the factories.
"""

from collections.abc import Mapping
from types import MappingProxyType

from purecompose.testing.shipped import (
    alibi,
    augmix,
    blurpool,
    channels_last,
    colout,
    cutmix,
    cutout,
    factorize,
    fused_layernorm,
    gated_linear_units,
    ghost_batchnorm,
    gradient_norm,
    gyro_dropout,
    label_smoothing,
    loss_scaling,
    low_precision_groupnorm,
    low_precision_layernorm,
    mixup,
    no_op_model,
    progressive_resizing,
    randaugment,
    selective_backprop,
    seq_length_warmup,
    squeeze_excite,
    stochastic_depth,
    training_metrics,
    weight_standardization,
)
from purecompose.testing.shipped.row import Row


__all__ = ["SHIPPED", "Row"]

_FILES = (
    alibi,
    augmix,
    blurpool,
    channels_last,
    colout,
    cutmix,
    cutout,
    factorize,
    fused_layernorm,
    gated_linear_units,
    ghost_batchnorm,
    gradient_norm,
    gyro_dropout,
    label_smoothing,
    loss_scaling,
    low_precision_groupnorm,
    low_precision_layernorm,
    mixup,
    no_op_model,
    progressive_resizing,
    randaugment,
    selective_backprop,
    seq_length_warmup,
    squeeze_excite,
    stochastic_depth,
    training_metrics,
    weight_standardization,
)

SHIPPED: Mapping[str, Row] = MappingProxyType({file.ROW.name: file.ROW for file in _FILES})
"""The rows by the factory's name."""
