"""What `label_smoothing` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row, scalars


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    numbers = st.sampled_from([0.1, 1, 0, 1.0, 0.0]) | st.floats(0, 1)
    return st.fixed_dictionaries({}, optional={"smoothing": scalars("label_smoothing/smoothing", numbers)})


ROW = Row(
    "label_smoothing",
    examples=("label_smoothing(0.1)", "label_smoothing(1)"),
    neutral="label_smoothing(0)",
    tasks=EVERY_TASK,
    settings=settings,
)
