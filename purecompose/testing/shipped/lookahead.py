"""What `lookahead` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row, scalars


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    numbers = st.sampled_from([0.5, 0.8, 0, 1, 1.0]) | st.floats(0, 1)
    optional = {"alpha": scalars("lookahead/alpha", numbers), "interval": st.integers(1, 6)}
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "lookahead",
    # Short intervals, so that it acts in short runs.
    examples=("lookahead(interval=1)", "lookahead(0.8, interval=2)"),
    neutral="lookahead(1)",
    tasks=EVERY_TASK,
    settings=settings,
)
