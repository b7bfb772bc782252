"""Hypothesis strategies for everything that laws and users' own property tests are about."""

from collections.abc import Sequence

from hypothesis import strategies as st

from purecompose.testing.case import Case
from purecompose.testing.companions import COMPANIONS
from purecompose.testing.tasks import TASKS, Task


__all__ = ["cases"]


@st.composite
def cases(draw: st.DrawFn, tasks: Sequence[Task] = tuple(TASKS.values())) -> Case:
    """Cases on these tasks, at any point of a short run, among any companions."""
    others = tuple(draw(st.lists(st.sampled_from(sorted(COMPANIONS)), unique=True, max_size=3)))
    batches_per_epoch, epochs = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return Case(
        task=draw(st.sampled_from(list(tasks))),
        seed=draw(st.integers(0, 999)),
        batch_size=draw(st.integers(2, 6)),
        num_batches=draw(st.integers(1, 3)),
        start=draw(st.integers(0, batches_per_epoch * epochs - 1)),
        batches_per_epoch=batches_per_epoch,
        epochs=epochs,
        microbatches=draw(st.integers(1, 3)),
        others=others,
        place=draw(st.integers(0, len(others))),
    )
