"""What `stochastic_depth` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import Row, scalars
from purecompose.testing.tasks import Residual


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    optional = {
        "stochastic_method": st.sampled_from(["block", "sample"]),
        "drop_rate": scalars("drop_rate", st.sampled_from([0.2, 1.0, 0, 0.0]) | st.floats(0, 1)),
        "drop_distribution": st.sampled_from(["linear", "uniform"]),
        "drop_warmup": st.sampled_from([0.0, 0.5, "2ba", "1ep"]),
    }
    return st.fixed_dictionaries({}, optional=optional)


ROW = Row(
    "stochastic_depth",
    examples=("stochastic_depth(drop_rate=0.5)", "stochastic_depth('sample', 0.5, drop_warmup=0.5)"),
    neutral="stochastic_depth(drop_rate=0.0)",
    tasks=("images",),
    settings=settings,
    needs=(Residual,),
)
