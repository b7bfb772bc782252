"""What `schedule_free` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    return st.fixed_dictionaries({}, optional={"beta": st.sampled_from([0.9, 0.98, 0.0]) | st.floats(0, 0.99)})


ROW = Row(
    "schedule_free",
    examples=("schedule_free()", "schedule_free(0.0)"),
    neutral=None,
    tasks=EVERY_TASK,
    settings=settings,
)
