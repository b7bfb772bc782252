"""What `selective_backprop` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    fractions = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(0, 1)
    windows = st.tuples(fractions, fractions).filter(lambda window: window[0] != window[1]).map(sorted)
    optional = {
        "keep": st.sampled_from([0.5, 1, 1.0]) | st.floats(0, 1, exclude_min=True),
        "interrupt": st.integers(0, 4),
    }
    if kind == "images":
        # The CNN takes images of half the size.
        optional["scale_factor"] = st.sampled_from([1.0, 0.5, 1]) | st.floats(0.5, 1)
    return st.builds(
        lambda window, settings: {"start": window[0], "end": window[1], **settings},
        st.just([0.0, 1.0]) | windows,
        st.fixed_dictionaries({}, optional=optional),
    )


ROW = Row(
    "selective_backprop",
    examples=(
        "selective_backprop(0, 1.0, interrupt=0)",
        "selective_backprop(0, 1.0, keep=0.5, interrupt=2)",
        "selective_backprop(0.5, 0.9, keep=0.3)",
    ),
    neutral="selective_backprop(keep=1)",
    tasks=EVERY_TASK,
    settings=settings,
)
