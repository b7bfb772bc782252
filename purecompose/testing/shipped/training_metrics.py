"""What `training_metrics` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {
        "metrics": st.sampled_from([("accuracy",), ()]),  # the networks have too few classes for top_5
        "reset": st.sampled_from(["1ep", "2ep", "1ba", "3ba", None]),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "training_metrics",
    examples=("training_metrics()", "training_metrics(reset='2ba')"),
    neutral="training_metrics(())",
    tasks=EVERY_TASK,
    settings=settings,
)
