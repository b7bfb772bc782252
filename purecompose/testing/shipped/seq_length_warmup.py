"""What `seq_length_warmup` is tried with."""

from typing import Any

from hypothesis import strategies as st

from purecompose.testing.shipped.row import Row


__all__ = ["ROW"]


def settings(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    del kind
    lengths = st.sampled_from([(2, 5), (5, 5), (8, 1024)]) | st.tuples(st.integers(1, 6), st.integers(1, 6)).map(
        lambda pair: (min(pair), max(pair))
    )
    optional = {
        "duration": st.sampled_from([0.3, 1, 0, 0.0]) | st.floats(0, 1),
        "step_size": st.sampled_from([1, 2, 100]),
        "truncate": st.booleans(),
    }
    return st.builds(
        lambda lengths, others: {"min_seq_length": lengths[0], "max_seq_length": lengths[1], **others},
        lengths,
        st.fixed_dictionaries({}, optional=optional),
    )


ROW = Row(
    "seq_length_warmup",
    examples=(
        "seq_length_warmup(0.6, 2, 5, 1)",
        "seq_length_warmup(1.0, 2, 5, 1, truncate=False)",
    ),
    neutral="seq_length_warmup(0)",
    tasks=("tokens",),
    settings=settings,
)
