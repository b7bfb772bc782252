"""What `cutout` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {
        "num_holes": st.integers(0, 4),
        "length": st.sampled_from([0.5, 1, 1.0, 0.01]) | st.floats(0, 1, exclude_min=True),
        "uniform_sampling": st.booleans(),
        "per_example": st.booleans(),
        "fill": st.sampled_from([0.0, 0, -1.5, (0.5, 2)]),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "cutout",
    examples=("cutout()", "cutout(2, 0.7, uniform_sampling=True, per_example=True, fill=(0.5, -1.0))"),
    neutral="cutout(0)",
    tasks=("images",),
    settings=settings,
)
