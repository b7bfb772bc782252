"""What `augmix` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.algorithms.images import PRIMITIVES
from purecompose.testing.shipped.row import Row, scalars


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    numbers = st.sampled_from([3.0, 9, 0]) | st.floats(0, 10)
    optional = {
        "severity": scalars("augmix/severity", numbers),
        "depth": st.sampled_from([-1, 1, 2]),
        "width": st.integers(1, 3),
        "alpha": st.sampled_from([1.0, 0.2, 2]) | st.floats(0.01, 100),
        "augmentation_set": st.lists(st.sampled_from(sorted(PRIMITIVES)), min_size=1, max_size=3).map(tuple),
        "value_range": st.sampled_from([None, (-2.0, 2.0)]),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "augmix",
    # Few operations: RandAugment's examples have them all, and each is compiled for every step of a chain.
    examples=(
        "augmix(3, width=2, augmentation_set=('rotate', 'equalize', 'color'))",
        "augmix(5, depth=1, width=2, augmentation_set=('shear_x', 'brightness'))",
    ),
    neutral="augmix(0)",
    tasks=("images",),
    settings=settings,
)
