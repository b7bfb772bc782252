"""What `skip_nonfinite` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    return st.just({})


ROW = Row(
    "skip_nonfinite",
    examples=("skip_nonfinite()",),
    neutral=None,
    tasks=EVERY_TASK,
    settings=settings,
)
