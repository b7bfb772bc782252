"""What `ghost_batchnorm` is tried with."""

from typing import Any

from hypothesis import strategies as st
from torch import nn

from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {"ghost_batch_size": st.sampled_from([32, 2, 1]) | st.integers(1, 8)}
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "ghost_batchnorm",
    examples=("ghost_batchnorm(2)", "ghost_batchnorm()"),
    neutral=None,
    tasks=("images",),
    settings=settings,
    needs=(nn.BatchNorm2d,),
)
