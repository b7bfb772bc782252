"""What `factorize` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    sizes = st.sampled_from([1, 2, 0.25, 0.5, 1.0]) | st.floats(0.01, 0.99)
    # The networks' layers have three to sixteen features.
    linears = {
        "min_features": st.integers(1, 3),
        "latent_features": st.sampled_from([1, 0.25, 1.0]) | st.floats(0.01, 0.5),
    }
    optional = {"min_channels": st.integers(1, 4), "latent_channels": sizes}
    if kind == "images":
        optional["factorize_convs"] = st.booleans()
    return st.fixed_dictionaries(linears, optional=optional)


ROW = Row(
    "factorize",
    examples=(
        "factorize(min_channels=4, latent_channels=0.5, min_features=3, latent_features=1)",
        "factorize(factorize_convs=False, min_features=1, latent_features=0.25)",
    ),
    neutral="factorize(False, False)",
    tasks=EVERY_TASK,
    settings=settings,
)
