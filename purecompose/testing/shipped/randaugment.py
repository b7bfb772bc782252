"""What `randaugment` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.algorithms.images import PRIMITIVES
from purecompose.testing.shipped.row import Row, scalars


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    numbers = st.sampled_from([9.0, 3, 10, 0, 0.0]) | st.floats(0, 10)
    names = st.lists(st.sampled_from(sorted(PRIMITIVES)), min_size=1, max_size=3).map(tuple)
    optional = {
        "severity": scalars("randaugment/severity", numbers),
        "depth": st.integers(0, 2),
        "augmentation_set": st.sampled_from(["all", "safe", "original"]) | names,
        "value_range": st.sampled_from([None, (-2.0, 2.0), (-1.0, (1.0, 2.0))]),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "randaugment",
    examples=("randaugment(9, 1)", "randaugment(5, 2, ('rotate', 'equalize', 'sharpness'))"),
    neutral="randaugment(0)",
    tasks=("images",),
    settings=settings,
)
