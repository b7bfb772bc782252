"""What `mixup` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import Row, scalars


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    # Numbers that float32 rounds to 0 are no parameters of a Beta distribution.
    numbers = st.sampled_from([0.2, 1, 0, 0.0]) | st.floats(1e-6, 1e6)
    required = {"alpha": scalars("mixup/alpha", numbers)}
    optional = {"interpolate_loss": st.booleans(), "per_example": st.booleans()}
    return st.fixed_dictionaries(required, optional=optional)


ROW = Row(
    "mixup",
    examples=("mixup(0.2)", "mixup(0.3, interpolate_loss=True, per_example=True)"),
    neutral="mixup(0)",
    tasks=(
        "vectors",
        "soft",
        "images",
        "frozen",
        "zero_head",
        "double",
        "bf16_weights",
    ),  # not tokens: ids cannot be mixed
    settings=settings,
)
