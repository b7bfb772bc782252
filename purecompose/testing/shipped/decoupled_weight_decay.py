"""What `decoupled_weight_decay` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.schedule import hparam, linear
from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    numbers = st.sampled_from([1e-5, 0.0, 1e-3]) | st.floats(0, 0.05)
    moving = numbers.map(lambda default: hparam("weight_decay", default)) | numbers.map(lambda top: top * linear())
    optional = {
        "weight_decay": numbers | moving,
        "min_dims": st.sampled_from([0, 2, 9]),
        "exclude": st.sampled_from([(), ("*bias",), ("*weight", "*")]),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "decoupled_weight_decay",
    examples=("decoupled_weight_decay(0.01)", "decoupled_weight_decay(0.05, 2, ('*bias',))"),
    neutral="decoupled_weight_decay(0.0)",
    tasks=EVERY_TASK,
    settings=settings,
)
