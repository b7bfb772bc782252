"""What `progressive_resizing` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    # Two shares of the run that leave some of it, or nothing.
    shares = st.sampled_from([(0.2, 0.5), (0.5, 0.5), (0.0, 0.0), (1.0, 0.0), (0, 1)]) | st.floats(0, 1).flatmap(
        lambda finetune: st.floats(0, 1 - finetune).map(lambda delay: (finetune, delay))
    )
    optional = {
        "mode": st.sampled_from(["resize", "crop"]),
        "initial_scale": st.sampled_from([0.5, 1, 1.0]) | st.floats(0.5, 1),  # the CNN takes images of half the size
        "size_increment": st.integers(1, 8),
        "interpolation": st.sampled_from(["bilinear", "nearest"]),
    }
    return st.builds(
        lambda shares, others: {"finetune_fraction": shares[0], "delay_fraction": shares[1], **others},
        shares,
        st.fixed_dictionaries({}, optional=optional),
    )


ROW = Row(
    "progressive_resizing",
    examples=("progressive_resizing()", "progressive_resizing('crop', 0.5, 0.1, 0, 1)"),
    neutral="progressive_resizing(initial_scale=1)",
    tasks=("images",),
    settings=settings,
)
