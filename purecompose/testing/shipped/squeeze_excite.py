"""What `squeeze_excite` is tried with."""

from typing import Any

from hypothesis import strategies as st
from torch import nn

from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    latent = st.sampled_from([64, 1, 0.01, 1.0]) | st.integers(1, 8) | st.floats(0.01, 0.99)
    # The networks have four channels, fewer than by default.
    return st.fixed_dictionaries({"min_channels": st.integers(1, 4)}, optional={"latent_channels": latent})


ROW = Row(
    "squeeze_excite",
    examples=("squeeze_excite(0.5, 4)", "squeeze_excite(3, min_channels=1)"),
    neutral=None,
    tasks=("images",),
    settings=settings,
    needs=(nn.Conv2d,),
)
