"""What `weight_standardization` is tried with."""

from typing import Any

from hypothesis import strategies as st
from torch import nn

from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {"n_last_layers_ignore": st.integers(0, 1)}
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "weight_standardization",
    examples=("weight_standardization()", "weight_standardization(1)"),
    neutral=None,
    tasks=("images",),
    settings=settings,
    needs=(nn.Conv2d,),
)
