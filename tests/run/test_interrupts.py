"""Signals end a run between two batches, after its checkpoint is written."""

import multiprocessing
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import purecompose as pc
from purecompose import Checkpoints, Event, State, compose, fit, loop_events
from purecompose.run.fit import _states
from purecompose.run.outer import Run
from tests.helpers import assert_same, counter, make_batches, make_mlp, make_state, noise


BATCHES = make_batches(4)


@pytest.fixture(autouse=True)
def _interrupts_are_not_ignored() -> Iterator[None]:
    """Handle SIGINT as in a terminal: a shell without job control starts programs in the background without that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start() -> State:
    return make_state(make_mlp(dropout=0.3), key=3)


def step() -> Any:
    return compose(loop_events, [noise(), counter()])


def raising(number: signal.Signals, batch: int) -> Any:
    """Return an observer that raises a signal in a batch."""

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


def test_without_checkpoints_signals_are_not_handled() -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(step(), start(), BATCHES, observers=raising(signal.SIGINT, 1))


def test_a_second_signal_acts_immediately(tmp_path: pathlib.Path) -> None:
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


def test_between_two_states_signals_act_as_usual(tmp_path: pathlib.Path) -> None:
    """Also with several simultaneous runs, and with one that was abandoned but still has a reference."""
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    runs = [
        pc.training(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path / name, background=False))
        for name in ("a", "b")
    ]
    for _ in zip(*runs, strict=True):
        assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers
        break
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    del runs


def test_a_signal_during_the_last_evaluation_is_obeyed(tmp_path: pathlib.Path) -> None:
    def observer(event: Event, state: State) -> None:
        if event is Event.FIT_END:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        fit(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path), observers=observer)
    assert caught.value.code == 143 and "ba00000008" in caught.value.__notes__[0]


def test_a_child_of_the_run_is_ended_by_its_signal(tmp_path: pathlib.Path) -> None:
    codes: list[int | None] = []

    def observer(event: Event, state: State) -> None:
        if event is Event.BATCH_END and not codes:
            context = multiprocessing.get_context("fork")
            is_there = context.Event()
            child = context.Process(target=lambda: (is_there.set(), time.sleep(60)))
            child.start()
            assert is_there.wait(20)  # Python drops signals that reach a child during the fork
            child.terminate()
            child.join(20)
            codes.append(child.exitcode)

    fit(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path, background=False), observers=observer)
    assert codes == [-signal.SIGTERM]


def test_a_run_that_could_not_be_saved_reports_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("purecompose.run.saving.folder.sync", full)
    settings = Checkpoints(tmp_path, every="1ep", background=False)
    with pytest.warns(pc.errors.CheckpointWarning, match="No space left"), pytest.raises(SystemExit) as caught:
        fit(step(), start(), BATCHES, checkpoints=settings, observers=raising(signal.SIGTERM, 3))
    assert "the run could not be saved at batch 3; there is no checkpoint of it" in caught.value.__notes__[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_check_still_ends_the_process(
    number: signal.Signals, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = Run._handle_signal

    def late(self: Run, state: State, **settings: Any) -> None:
        look(self, state, **settings)
        looks.append(state.timestamp.batch)
        if looks.count(4) == 3:  # the last batch, the end, and the evaluation there
            signal.raise_signal(number)

    def halved(event: Event, state: State) -> State:
        return state.replace(params={name: value * 0.5 for name, value in state.params.items()})

    at_the_end = compose(loop_events, [pc.Algorithm("halved", pc.on(Event.FIT_END), halved)])
    last = [*pc.training(at_the_end, start(), BATCHES, duration="1ep")][-2]
    monkeypatch.setattr(Run, "_handle_signal", late)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        evaluator = pc.Evaluator(BATCHES[:1], every="9ep")  # only at the end
        fit(at_the_end, start(), BATCHES, duration="1ep", evaluate=evaluator, checkpoints=Checkpoints(tmp_path))
    saved = pc.load(tmp_path / "ep0001-ba00000004", last, step=at_the_end)
    assert pc.tree.equal(saved.params, last.params)  # without the changes of FIT_END
    assert looks[-3:] == [4, 4, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["ep0001-ba00000004"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_fit_a_signal_between_two_batches_is_noticed_too(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    settings = Checkpoints(tmp_path, every="1ep")
    states = _states(True, step(), start(), BATCHES, checkpoints=settings)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        for state in states:  # as fit iterates
            if state.timestamp.batch == 2:
                signal.raise_signal(number)
    assert [path.name for path in tmp_path.iterdir()] == ["ep0000-ba00000003"]
