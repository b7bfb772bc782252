"""What `sam` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row, scalars


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    numbers = st.sampled_from([0.05, 0.5, 0, 0.0]) | st.floats(1e-6, 10)
    optional = {
        "rho": scalars("sam/rho", numbers),
        "epsilon": st.sampled_from([1e-12, 1e-30, 1.0]) | st.floats(1e-12, 1),
        "interval": st.integers(1, 4),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "sam",
    examples=("sam()", "sam(0.5, interval=2)"),
    neutral="sam(0)",
    tasks=EVERY_TASK,
    settings=settings,
)
