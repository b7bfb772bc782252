"""A message appears while the run waits for slow data."""

import threading
import time
import warnings
from collections.abc import Iterator

import pytest

from purecompose import compose, evaluate, fit, loop_events
from purecompose.data import waiting
from tests.helpers import Batch, make_batch, make_state


class Slow:
    """Three batches, the second of which takes long."""

    def __iter__(self) -> Iterator[Batch]:
        for index in range(3):
            time.sleep(0.3 if index == 1 else 0)
            yield make_batch(index)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_batch_that_takes_long_is_warned_about_once(is_training, monkeypatch):
    monkeypatch.setattr(waiting, "LONGEST", 0.1)
    with pytest.warns(
        UserWarning, match=r"still waiting for batch 1 of this pass from Slow after 0\.1 s.*timeout"
    ) as caught:
        if is_training:
            fit(compose(loop_events), make_state(), Slow(), duration="3ba")
        else:
            evaluate(make_state(), Slow())
    assert len(caught) == 1


def watching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "purecompose data"}


def test_data_in_memory_and_finished_passes_are_not_watched(monkeypatch):
    monkeypatch.setattr(waiting, "LONGEST", 0.01)
    before = watching()  # another test may have an unfinished pass over its data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = waiting.watched(iter([1, 2]), [1, 2])
        next(batches)
        assert watching() <= before
        assert list(waiting.watched(iter([1, 2]), object())) == [1, 2]
        time.sleep(0.05)
    assert watching() <= before
