"""What `no_op_model` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    return st.just({})


ROW = Row(
    "no_op_model",
    examples=("no_op_model()",),
    neutral=None,
    tasks=EVERY_TASK,
    settings=settings,
    is_alone=True,
)
