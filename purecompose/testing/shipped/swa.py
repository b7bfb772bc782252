"""What `swa` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    # Without swa_lr: the tasks' learning rate is an hparam, which it refuses.
    optional = {
        "swa_start": st.sampled_from([0.25, 0.0, "1ba", 0.5]),
        "swa_end": st.sampled_from([0.75, 1.0, "5ba"]),
        "update_interval": st.sampled_from(["1ba", "2ba", "1ep", "0.25dur", "9sp"]),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "swa",
    examples=("swa(0.25, 0.75, '1ba')", "swa('1ba', 1.0, '1ba')"),
    neutral=None,
    tasks=EVERY_TASK,
    settings=settings,
)
