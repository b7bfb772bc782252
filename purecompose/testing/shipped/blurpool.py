"""What `blurpool` is tried with."""

from typing import Any

from hypothesis import strategies as st
from torch import nn

from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    # The strided convolution has four channels, fewer than by default.
    return st.fixed_dictionaries(
        {"min_channels": st.integers(1, 4)},
        optional={"replace_maxpools": st.booleans(), "blur_first": st.booleans()},
    )


ROW = Row(
    "blurpool",
    examples=("blurpool(min_channels=4)", "blurpool(blur_first=False, min_channels=1)"),
    neutral=None,
    tasks=("images",),
    settings=settings,
    needs=(nn.Conv2d,),
)
