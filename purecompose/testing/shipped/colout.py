"""What `colout` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    # Three of six rows are the fewest that the CNN takes.
    shares = st.sampled_from([0.15, 0.5, 0, 0.0]) | st.floats(0, 0.5)
    optional = {
        "p_row": shares,
        "p_col": shares,
        "per_example": st.booleans(),
        "resize_target": st.sampled_from(["auto", False]),  # targets are labels
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "colout",
    examples=("colout(0.2, 0.4)", "colout(0.5, 0.2, per_example=True, resize_target=False)"),
    neutral="colout(0, 0)",
    tasks=("images",),
    settings=settings,
)
