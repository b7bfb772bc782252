"""What `gradient_accumulation` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    return st.fixed_dictionaries({"num_steps": st.integers(1, 5)})


ROW = Row(
    "gradient_accumulation",
    examples=("gradient_accumulation(2)", "gradient_accumulation(3)"),
    neutral="gradient_accumulation(1)",
    tasks=EVERY_TASK,
    settings=settings,
)
