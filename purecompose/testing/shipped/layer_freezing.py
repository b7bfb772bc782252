"""What `layer_freezing` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {
        "freeze_start": st.sampled_from([0.5, 0.0, 0, 1.0, 1]) | st.floats(0, 1),
        "freeze_level": st.sampled_from([1.0, 1, 0, 0.0]) | st.floats(0, 1),
        "num_stages": st.none() | st.integers(2, 8),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "layer_freezing",
    examples=("layer_freezing(0.0, num_stages=None)", "layer_freezing(0.3, num_stages=3)"),
    neutral="layer_freezing(freeze_level=0)",
    tasks=EVERY_TASK,
    settings=settings,
)
