"""What `gradient_clipping` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row, scalars


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    numbers = st.sampled_from([1.0, 0.1, 1]) | st.floats(1e-6, 1e6)  # not infinity, which prints as no literal
    required = {
        "clipping_type": st.sampled_from(["norm", "value", "adaptive"]),
        "clipping_threshold": scalars("gradient_clipping/threshold", numbers),
    }
    return st.fixed_dictionaries(required, optional={"exclude": st.sampled_from([(), ("*bias",), ("*weight", "*")])})


ROW = Row(
    "gradient_clipping",
    examples=(
        "gradient_clipping('norm', 0.1)",
        "gradient_clipping('value', 0.01)",
        "gradient_clipping('adaptive', 0.01, exclude=('*.bias',))",
    ),
    neutral="gradient_clipping('norm', 1e999)",  # infinity, as a literal
    tasks=EVERY_TASK,
    settings=settings,
)
