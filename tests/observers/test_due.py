"""Which batches are due, against manually counted multiples."""

import pytest
from hypothesis import given, strategies as st

from purecompose.observers.recorder import Due
from purecompose.time import RunLength, Timestamp


def due_batches(every: object, points: list[Timestamp], start: Timestamp | None = None) -> list[int]:
    due = Due(every, "every")  # type: ignore[arg-type]
    if start is not None:
        due.start(start)
    return [point.batch for point in points if due(point)]


def walk(batches: int, run: RunLength, samples: int = 8) -> list[Timestamp]:
    points = [Timestamp(run=run)]
    for _ in range(batches):
        points.append(points[-1].advance(samples, tokens=3 * samples))
    return points[1:]


@given(st.integers(1, 7), st.integers(0, 20))
def test_multiples_of_batches_are_due_wherever_the_run_resumes(every: int, start: int) -> None:
    points = walk(40, RunLength())
    first = points[start - 1] if start else Timestamp()
    expected = [batch for batch in range(start + 1, 41) if batch % every == 0]
    assert due_batches(every, points[start:], first) == expected
    assert due_batches(f"{every}ba", points[start:]) == expected  # in a loop that fires no FIT_START


def test_epochs_are_due_at_their_last_batch() -> None:
    assert due_batches("2ep", walk(20, RunLength("5ep", batches_per_epoch=4))) == [8, 16]


def test_samples_and_tokens_are_due_where_a_multiple_is_passed() -> None:
    points = walk(9, RunLength())
    assert due_batches("20sp", points) == [3, 5, 8]  # 24, 40 and 64 are the first ones from 20, 40, 60 on
    assert due_batches("48tok", points) == [2, 4, 6, 8]


def test_fractions_of_the_run_are_due_in_its_batches() -> None:
    assert due_batches("0.1dur", walk(50, RunLength("50ba"))) == list(range(5, 51, 5))
    with pytest.raises(ValueError, match="need a run with a duration"):
        due_batches("0.1dur", walk(1, RunLength()))
