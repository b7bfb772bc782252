"""What `ema` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    paces = st.fixed_dictionaries({"half_life": st.sampled_from(["2ba", "1ep", "5sp", "0.25dur"])}) | (
        st.fixed_dictionaries({"smoothing": st.sampled_from([0.9, 0.0, 1.0, 1]) | st.floats(0, 1)})
    )
    optional = {
        "ema_start": st.sampled_from([0.0, "1ba", "1ep", 0.5, 1.0]),
        "update_interval": st.sampled_from(["1ba", "2ba", "1ep", "0.5dur", "9sp"]),
    }
    return st.builds(lambda pace, others: {**pace, **others}, paces, st.fixed_dictionaries({}, optional=optional))


ROW = Row(
    "ema",
    examples=("ema('2ba')", "ema(smoothing=0.9, update_interval='2ba')"),
    neutral=None,
    tasks=EVERY_TASK,
    settings=settings,
)
