"""Signals end a run between two batches, after its checkpoint is written."""

import pathlib
import signal
import threading
from typing import Any

import pytest
from helpers import assert_same, counter, make_batches, make_mlp, make_state, noise

import purecompose as pc
from purecompose import Checkpoints, Event, State, compose, fit, loop_events
from purecompose.interrupts import Interrupts


BATCHES = make_batches(4)


def start() -> State:
    return make_state(make_mlp(dropout=0.3), key=3)


def step() -> Any:
    return compose(loop_events, [noise(), counter()])


def raising(number: signal.Signals, batch: int) -> Any:
    """An observer in whose batch a signal comes."""

    def observer(event: Event, state: State) -> None:
        if event is Event.BATCH_END and state.timestamp.batch == batch:
            signal.raise_signal(number)

    return observer


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_the_run(number: signal.Signals, background: bool, tmp_path: pathlib.Path) -> None:
    settings = Checkpoints(tmp_path, every="1ep", background=background)
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        fit(step(), start(), BATCHES, checkpoints=settings, observers=raising(number, 3))
    if number is signal.SIGTERM:
        assert isinstance(caught.value, SystemExit) and caught.value.code == 143
        said = caught.value.__notes__[0]
    else:
        assert isinstance(caught.value, KeyboardInterrupt)
        said = str(caught.value)
    assert "saved in" in said and "resume='auto'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["ep0000-ba00000003"]
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers
    assert_same(fit(step(), start(), BATCHES, checkpoints=settings, resume="auto"), fit(step(), start(), BATCHES))


def test_without_checkpoints_signals_are_left_alone() -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(step(), start(), BATCHES, observers=raising(signal.SIGINT, 1))


def test_a_second_signal_acts_at_once(tmp_path: pathlib.Path) -> None:
    def twice(event: Event, state: State) -> None:
        if event is Event.BATCH_END:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path), observers=twice)
    assert not list(tmp_path.iterdir())


def test_other_threads_may_train_with_checkpoints(tmp_path: pathlib.Path) -> None:
    ends: list[State] = []
    settings = Checkpoints(tmp_path)
    thread = threading.Thread(target=lambda: ends.append(fit(step(), start(), BATCHES, checkpoints=settings)))
    thread.start()
    thread.join()
    assert_same(ends[0], fit(step(), start(), BATCHES))


def test_leaving_a_loop_early_restores_the_handlers(tmp_path: pathlib.Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    states = pc.training(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path))
    next(states)
    assert signal.getsignal(signal.SIGINT) != handler
    states.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert signal.getsignal(signal.SIGINT) == handler
    assert Interrupts().received is None
