"""Passes: pure functions `(algorithms, event) -> algorithms` that order the algorithms at an event.

A pass receives the algorithms that matched at one event, in the order they were listed, and may reorder, drop or
add algorithms. Passes know algorithms by traits and names, never by import. The default passes first reverse the
order at AFTER events and then apply pins and constraints, which therefore are always satisfied.
"""

from purecompose._support import publish
from purecompose.core.passes import (
    DEFAULT_PASSES as DEFAULT_PASSES,
    Pass as Pass,
    compose_passes as compose_passes,
    order_by_constraints as order_by_constraints,
    set_filo_order as set_filo_order,
    sort_fused_layernorm_last as sort_fused_layernorm_last,
    sort_gradients_by_trait as sort_gradients_by_trait,
    sort_loss_scaling_innermost as sort_loss_scaling_innermost,
    sort_selective_backprop_first as sort_selective_backprop_first,
    sort_to_back as sort_to_back,
    sort_to_front as sort_to_front,
    warn_if_multiple_loss_interpolation as warn_if_multiple_loss_interpolation,
)
from purecompose.errors import MixedLossWarning as MixedLossWarning, OrderError as OrderError


publish(__name__)
