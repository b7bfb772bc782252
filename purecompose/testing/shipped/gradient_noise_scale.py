"""What `gradient_noise_scale` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    return st.fixed_dictionaries(
        {}, optional={"decay": st.sampled_from([0.95, 0, 0.0]) | st.floats(0, 1, exclude_max=True)}
    )


ROW = Row(
    "gradient_noise_scale",
    examples=("gradient_noise_scale()", "gradient_noise_scale(0)"),
    neutral=None,
    tasks=EVERY_TASK,
    settings=settings,
)
