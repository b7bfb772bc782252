"""The guard against NaN: it names the first bad batch, at most one group late, and makes no batch wait."""

import math
import warnings

import pytest
import torch

from purecompose import Event, State
from purecompose.observers import NaNs
from tests.observers.observer_helpers import at, make_population, make_state


def feed(guard: NaNs, losses: list[float], state: State | None = None) -> None:
    state = state or make_state()
    guard(Event.FIT_START, at(state, 0))
    for batch, loss in enumerate(losses, start=1):
        guard(Event.BATCH_END, at(state, batch, loss=torch.tensor(loss)))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_the_first_bad_batch_is_named(loss: float) -> None:
    guard = NaNs()
    feed(guard, [1.0, 2.0, loss, 1.0, math.nan])
    with pytest.raises(FloatingPointError, match=f"^batch 3: the loss is {loss}$"):
        guard(Event.FIT_END, make_state())


def test_it_is_late_by_a_group_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FloatingPointError, match="batch 1:"):
        feed(NaNs(), [math.nan] + 99 * [1.0])
    feed(NaNs(), [math.nan] + 98 * [1.0])
    now = [0.0]
    monkeypatch.setattr("purecompose.observers.recorder.time.monotonic", lambda: now[0])
    guard = NaNs()
    feed(guard, [math.nan])
    now[0] = 2.5
    with pytest.raises(FloatingPointError, match="batch 1:"):
        guard(Event.BATCH_END, at(make_state(), 2, loss=torch.tensor(1.0)))


@pytest.mark.parametrize("event", [Event.EPOCH_CHECKPOINT, Event.EVAL_BEFORE_ALL])
def test_it_is_not_late_where_a_checkpoint_is_written(event: Event) -> None:
    guard = NaNs()
    feed(guard, [math.nan])
    with pytest.raises(FloatingPointError):
        guard(event, make_state())


def test_a_warning_comes_once_a_run() -> None:
    guard = NaNs(action="warn")
    for _ in range(2):
        feed(guard, [1.0, math.nan])
        with pytest.warns(RuntimeWarning, match="batch 2: the loss is nan. This warning is shown once per run"):
            guard.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            guard(Event.BATCH_END, at(make_state(), 3, loss=torch.tensor(math.nan)))
            guard.flush()


def test_batches_that_are_not_due_are_not_checked() -> None:
    guard = NaNs(every="3ba")
    feed(guard, [math.nan, math.nan, 1.0, math.nan])
    guard.flush()
    feed(guard, [1.0, 1.0, math.nan])
    with pytest.raises(FloatingPointError, match="batch 3:"):
        guard.flush()


def test_members_are_named() -> None:
    guard = NaNs()
    guard(Event.BATCH_END, at(make_population(3), 1, loss=torch.tensor([1.0, math.nan, math.inf])))
    with pytest.raises(FloatingPointError, match="^batch 1: the loss of member 1 is nan, 2 is inf$"):
        guard.flush()


def test_overwritten_tensors_are_not_read_afterwards() -> None:
    guard, loss = NaNs(), torch.tensor(1.0)
    guard(Event.BATCH_END, at(make_state(), 1, loss=loss))
    loss.fill_(math.nan)
    guard.flush()
