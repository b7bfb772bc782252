"""What `batch_size_warmup` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {
        "duration": st.sampled_from([0.3, 1, 1.0, 0, 0.0]) | st.floats(0, 1),
        "initial_share": st.sampled_from([0.125, 1, 1.0, 0, 0.0]) | st.floats(0, 1),
        "multiple": st.none() | st.sampled_from([1, 2, 100]),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "batch_size_warmup",
    examples=("batch_size_warmup(1.0, 0.25)", "batch_size_warmup(0.6, 0, 1)"),
    neutral="batch_size_warmup(0)",
    tasks=EVERY_TASK,
    settings=settings,
)
