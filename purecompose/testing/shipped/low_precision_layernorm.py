"""What `low_precision_layernorm` is tried with."""

from typing import Any

from hypothesis import strategies as st
from torch import nn

from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    return st.just({})


ROW = Row(
    "low_precision_layernorm",
    examples=("low_precision_layernorm()",),
    neutral=None,
    tasks=("bf16_tokens",),  # in full precision it does nothing, and says so
    settings=settings,
    needs=(nn.LayerNorm,),
)
