"""Hypothesis strategies for the inputs of laws and of users' own property tests.

All of them shrink to the simplest example of their kind: no companions, one microbatch, the smallest sizes, the first
batch of a run, an MLP on vectors. Their examples are made from seeds and do not change global generators.
"""

from collections.abc import Sequence

from hypothesis import strategies as st

from purecompose import batch as batches
from purecompose._support import publish
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.testing.case import COMPANIONS, Case, Subject, find_moments
from purecompose.testing.tasks import KINDS, TASKS, Task, make_task


publish(__name__)


_BATCH_SIZES = st.sampled_from([2, 3, 4, 5, 6, 1])
_RATES = st.sampled_from([0.1, 0.1, 0.1, 1.0, 0.0])
_SEEDS = st.integers(0, 999)


# Networks and data


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Generate tasks, of `TASKS` and of other networks with fitting batches, which shrink to `TASKS["vectors"]`."""
    if draw(st.booleans()):
        kind = draw(st.sampled_from(KINDS))
        return make_task(
            kind,
            dropout=draw(st.sampled_from([0.0, 0.2, 0.5])),
            tied=kind == "tokens" and draw(st.booleans()),
            frozen=draw(st.booleans()),
            form=draw(st.sampled_from(["tuple", "dict"])),
            targets=draw(st.sampled_from(["index", "soft"])),
        )
    return draw(st.sampled_from(list(TASKS.values())))


def states(task: Task | None = None, *, algorithms: Sequence[Algorithm] = ()) -> st.SearchStrategy[State]:
    """Generate states at any point of a short run, with the slots of algorithms and of some companions.

    Args:
        task: The network and its loss; by default any of `TASKS`.
        algorithms: Algorithms that are initialised, so that the state has their slots.

    Example::

        @given(states())
        def test_state(state):
            assert state.loss is not None
    """
    drawn = cases(tuple(TASKS.values()) if task is None else (task,))
    return drawn.map(lambda case: case.step(*algorithms).init(case.state()))


# Cases


@st.composite
def cases(
    draw: st.DrawFn, tasks: Sequence[Task] = tuple(TASKS.values()), algorithm: Algorithm | Subject | str | None = None
) -> Case:
    """Generate cases on these tasks, at any point of a short run, with any companions.

    They shrink to the first task, two examples, one batch and microbatch, no companions, the first batch at which the
    algorithm acts.

    Args:
        tasks: The tasks to choose from.
        algorithm: An algorithm, or a text as for `Subject.of`. Most cases then begin where it acts, the others near the
            batches at which it begins or ends to act, and the run is long enough for that. The answers of a plain
            function for `match` are not known in advance.

    The run continues for at least `2 * num_batches + 1` batches from the start, because a law cannot judge what happens
    beyond the end of a run. An algorithm that acts only in the last batches of any run does not allow that; its cases
    have one batch.
    """
    others = tuple(draw(st.lists(st.sampled_from(sorted(COMPANIONS)), unique=True, max_size=3)))
    task, batch_size = draw(st.sampled_from(list(tasks))), draw(_BATCH_SIZES)
    return Case(
        task=task,
        batch_size=batch_size,
        **draw(_spans(task, batch_size, algorithm)),
        seed=draw(_SEEDS),
        microbatches=draw(st.integers(1, 3)),
        lr=draw(_RATES),
        others=others,
        place=draw(st.integers(0, len(others))),
    )


@st.composite
def _spans(draw: st.DrawFn, task: Task, batch_size: int, algorithm: Algorithm | Subject | str | None) -> dict[str, int]:
    """Generate the length of a case and its place in a run, as arguments of `Case`; see `cases`."""
    batches_per_epoch, epochs, num_batches = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    room = 2 * num_batches + 1
    if algorithm is None:
        epochs = max(epochs, -(-room // batches_per_epoch))
        start = draw(st.integers(0, batches_per_epoch * epochs - room))
    else:
        found = find_moments(
            Subject.of(algorithm).algorithm.predicate,
            batches_per_epoch=batches_per_epoch,
            epochs=epochs,
            samples=batch_size,
            tokens=batches.num_tokens(task.make_batch(0, batch_size)),
            room=room,
        )
        batches_per_epoch, epochs = found.batches_per_epoch, found.epochs
        last = batches_per_epoch * epochs - room
        is_off = not found.acting or draw(st.integers(0, 4)) == 4
        if found.acting and found.acting[0] > last:  # one batch may have the room that several have not
            num_batches, last = 1, batches_per_epoch * epochs - 3
        near = [start for start in found.near if start <= last]
        acting = [start for start in found.acting if start <= last] or found.acting
        start = draw(st.sampled_from(near if is_off else acting))
        num_batches = num_batches if start <= last else 1
    return {"num_batches": num_batches, "start": start, "batches_per_epoch": batches_per_epoch, "epochs": epochs}
