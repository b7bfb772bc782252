"""What `gated_linear_units` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.algorithms._gated_linear_units import ACTIVATIONS
from purecompose.nn.layers.attention import FeedForward
from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {
        "act_fn": st.sampled_from([None, *ACTIVATIONS]),
        "gated_layer_bias": st.booleans(),
        "non_gated_layer_bias": st.booleans(),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "gated_linear_units",
    examples=("gated_linear_units()", "gated_linear_units('silu', True, True)"),
    neutral=None,
    tasks=("tokens",),
    settings=settings,
    needs=(FeedForward,),
)
