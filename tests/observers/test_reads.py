"""No observer makes a batch wait for the device: values are read in groups."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest

from purecompose import compose, fit, loop_events, optim, schedule
from purecompose.observers import History, NaNs, Progress, Recorder, learning_rate, memory, nans, speed
from tests.observers.observer_helpers import count_reads, make_batches, make_state


class Nowhere:
    """A sink that keeps nothing."""

    def write(self, records: list[dict[str, Any]]) -> None:
        del records


def recorder(**options: Any) -> Recorder:
    return Recorder(Nowhere(), group=1000, **options)


@pytest.mark.parametrize(
    ("make", "num_reads"),
    [
        (History, 0),
        (recorder, 3),  # one for each of the three epochs
        # One group of losses and of rates for each epoch; the speed's stopwatch waits at FIT_END.
        (lambda: recorder(monitors=[learning_rate(), memory(), speed()]), 4),
        (lambda: NaNs(check="params"), 6),  # the losses and the parameters of each epoch
        # The first batch, the ends of the epochs and of the run.
        (lambda: Progress(file=io.StringIO(), reads_per_second=1e-3), 7),
    ],
    ids=["history", "recorder", "monitors", "nans", "progress"],
)
def test_values_are_read_once_an_epoch(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], num_reads: int
) -> None:
    monkeypatch.setattr(nans, "_SECONDS", math.inf)
    state, read = (
        make_state("60ba", optim.sgd(schedule.hparam("lr", 0.5) * schedule.linear())),
        count_reads(monkeypatch),
    )
    fit(compose(loop_events), state, make_batches(20))
    without = len(read)
    read.clear()
    fit(compose(loop_events), state, make_batches(20), observers=make())
    assert len(read) - without <= num_reads


def test_a_history_reads_all_losses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    fit(compose(loop_events), make_state(), make_batches(), observers=history)
    read = count_reads(monkeypatch)
    assert len(history.records) == 12 and read == ["tolist"]
