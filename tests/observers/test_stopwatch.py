"""The stopwatch against a clock that the test controls."""

import types

import pytest
import torch

from purecompose import Event, State, losses, optim
from purecompose.observers import Stopwatch, stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    fake = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(stopwatch, "time", types.SimpleNamespace(monotonic=lambda: fake.now))
    return fake


def at(batch: int) -> State:
    state = State.create(torch.nn.Linear(1, 1), loss=losses.mse, optimizer=optim.sgd(0.1))
    return state.replace(timestamp=state.timestamp.replace(batch=batch))


def test_evaluation_is_timed_separately(clock) -> None:
    watch = Stopwatch()
    for event, seconds, batch in (
        (Event.FIT_START, 0, 10),
        (Event.BATCH_END, 2, 11),
        (Event.EVAL_BEFORE_ALL, 1, 11),
        (Event.EVAL_BATCH_END, 4, 11),
    ):
        clock.now += seconds
        watch(event, at(batch))
    assert (watch.seconds, watch.training_seconds) == (7.0, 3.0)
    for event, seconds, batch in ((Event.EVAL_AFTER_ALL, 1, 11), (Event.BATCH_END, 3, 13), (Event.FIT_END, 0, 13)):
        clock.now += seconds
        watch(event, at(batch))
    assert (watch.seconds, watch.training_seconds, watch.batches) == (11.0, 6.0, 3)
    assert watch.batches_per_second == 0.5


def test_a_new_run_starts_at_zero(clock) -> None:
    watch = Stopwatch()
    watch(Event.FIT_START, at(0))
    clock.now += 5
    watch(Event.BATCH_END, at(1))
    watch(Event.FIT_START, at(1))
    assert (watch.seconds, watch.batches, watch.batches_per_second) == (0.0, 0, 0.0)


def test_in_a_hand_written_loop_the_first_batch_counts(clock) -> None:
    watch = Stopwatch()
    watch(Event.BATCH_END, at(1))
    clock.now += 1
    watch(Event.BATCH_END, at(2))
    assert watch.batches == 2
