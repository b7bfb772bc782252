"""What `alibi` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.nn.layers.attention import SelfAttention
from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    scaling = st.sampled_from([0.25, 1, 1.0, 0.5]) | st.floats(0.01, 1)
    return st.fixed_dictionaries({}, optional={"train_sequence_length_scaling": scaling})


ROW = Row(
    "alibi",
    examples=("alibi(0.6)", "alibi(1)"),
    neutral=None,
    tasks=("tokens",),
    settings=settings,
    needs=(SelfAttention,),
)
