"""What `gyro_dropout` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import EVERY_TASK, Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    banks = st.integers(1, 12).flatmap(lambda sigma: st.tuples(st.just(sigma), st.integers(1, sigma)))
    optional = {
        "p": st.sampled_from([0.5, 0.2, 0, 0.0]) | st.floats(0, 0.9),
        "feature_dim": st.sampled_from([None, 1, -1]),
    }
    return st.builds(
        lambda bank, settings: {"sigma": bank[0], "tau": bank[1], **settings},
        st.sampled_from([(256, 16), (4, 2), (1, 1)]) | banks,
        st.fixed_dictionaries({}, optional=optional),
    )


ROW = Row(
    "gyro_dropout",
    examples=("gyro_dropout(0.5, 4, 2)", "gyro_dropout(0.3, feature_dim=-1)"),
    neutral="gyro_dropout(0)",
    tasks=EVERY_TASK,
    settings=settings,
)
