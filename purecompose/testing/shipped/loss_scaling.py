"""What `loss_scaling` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {
        # Not so large that a float32 gradient of a small network overflows.
        "init_scale": st.sampled_from([2.0**16, 2.0**10, 1.0, 3.0]) | st.floats(2.0**-20, 2.0**20),
        "growth_factor": st.sampled_from([2.0, 1.0, 1]) | st.floats(1, 4),
        "backoff_factor": st.sampled_from([0.5, 1.0, 1]) | st.floats(0.1, 1),
        "growth_interval": st.integers(1, 4) | st.just(2000),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "loss_scaling",
    examples=("loss_scaling()", "loss_scaling(1024.0, growth_factor=4.0, growth_interval=1)"),
    neutral="loss_scaling(1.0, growth_factor=1.0, backoff_factor=1.0)",
    tasks=EVERY_TASK,
    settings=settings,
)
