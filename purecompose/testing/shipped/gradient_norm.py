"""What `gradient_norm` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    return st.fixed_dictionaries({}, optional={"total": st.booleans(), "each": st.booleans()})


ROW = Row(
    "gradient_norm",
    examples=("gradient_norm()", "gradient_norm(each=True)"),
    neutral="gradient_norm(total=False)",
    tasks=EVERY_TASK,
    settings=settings,
)
