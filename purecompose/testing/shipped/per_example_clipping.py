"""What `per_example_clipping` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import Row, scalars


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    bounds = st.sampled_from([1.0, 1, 0.1]) | st.floats(1e-3, 1e3)
    # Noise of many times the bound would lead the laws' networks out of the range of float32.
    noise = st.sampled_from([0.0, 0, 0.5]) | st.floats(0, 1)
    required = {"max_norm": scalars("per_example_clipping/max_norm", bounds)}
    optional = {
        "noise_multiplier": scalars("per_example_clipping/noise_multiplier", noise),
        "chunk_size": st.sampled_from([None, 1, 3]),
    }
    return st.fixed_dictionaries(required, optional=optional)


ROW = Row(
    "per_example_clipping",
    examples=("per_example_clipping(0.5)", "per_example_clipping(0.5, 0.3, chunk_size=2)"),
    neutral="per_example_clipping(1e999)",
    tasks=(
        "vectors",
        "soft",
        "tokens",
        "frozen",
        "zero_head",
        "double",
        "bf16_weights",
    ),  # not images: BatchNorm mixes their examples
    settings=settings,
)
