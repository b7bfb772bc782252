"""One table of all shipped algorithms: what laws and property tests run them with.

A later algorithm joins by adding a file with its row; a test compares the table with the factories.
"""

from collections.abc import Mapping
from types import MappingProxyType

from purecompose.testing.shipped import (
    augmix,
    colout,
    cutmix,
    cutout,
    gradient_norm,
    gyro_dropout,
    label_smoothing,
    loss_scaling,
    mixup,
    progressive_resizing,
    randaugment,
    selective_backprop,
    seq_length_warmup,
    training_metrics,
)
from purecompose.testing.shipped.row import Row


__all__ = ["SHIPPED", "Row"]

_FILES = (
    augmix,
    colout,
    cutmix,
    cutout,
    gradient_norm,
    gyro_dropout,
    label_smoothing,
    loss_scaling,
    mixup,
    progressive_resizing,
    randaugment,
    selective_backprop,
    seq_length_warmup,
    training_metrics,
)

SHIPPED: Mapping[str, Row] = MappingProxyType({file.ROW.name: file.ROW for file in _FILES})
"""The rows by the factory's name."""
