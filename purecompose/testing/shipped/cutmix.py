"""What `cutmix` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import Row, scalars


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    # Numbers that float32 rounds to 0 are no parameters of a Beta distribution.
    numbers = st.sampled_from([1.0, 0.2, 0, 0.0]) | st.floats(1e-6, 1e6)
    optional = {
        "alpha": scalars("cutmix/alpha", numbers),
        "interpolate_loss": st.booleans(),
        "uniform_sampling": st.booleans(),
        "per_example": st.booleans(),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "cutmix",
    examples=("cutmix(1.0)", "cutmix(0.5, interpolate_loss=True, uniform_sampling=True, per_example=True)"),
    neutral="cutmix(0)",
    tasks=("images",),
    settings=settings,
)
