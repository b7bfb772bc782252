"""The events around steps, fired as `fit` fires them, for laws that take steps themselves."""

from collections.abc import Iterable
from typing import Any

from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.time.event import Event


_BEGINNING = (Event.FIT_START, Event.ITERATION_START)
_ENDING = (Event.ITERATION_END, Event.ITERATION_CHECKPOINT, Event.FIT_END)


def begun(step: Step, state: State) -> State:
    """Return the state after `step.init` and the events that `fit` fires before the first batch."""
    return fired(step, _BEGINNING, step.init(state))


def after_batch(step: Step, state: State, batch: Any) -> State:
    """Return the state after a step and the events around it, including those of an epoch that begins or ends."""
    before = opened(step, state)
    return closed(step, before, step(before, batch))


def opened(step: Step, state: State) -> State:
    """Return the state after the events between steps that `fit` fires before a batch."""
    opening = [Event.EPOCH_START] if state.timestamp.batch_in_epoch == 0 else []
    return fired(step, [*opening, Event.BEFORE_DATALOADER], state)


def closed(step: Step, before: State, state: State) -> State:
    """Return the state after the events that `fit` fires after a step from the state `before`."""
    closing = [Event.EPOCH_END, Event.EPOCH_CHECKPOINT] if state.timestamp.epoch != before.timestamp.epoch else []
    return fired(step, [Event.BATCH_CHECKPOINT, *closing], state)


def ended(step: Step, state: State) -> State:
    """Return the state after the events that `fit` fires at the end of a run."""
    return fired(step, _ENDING, state)


def fired(step: Step, events: Iterable[Event], state: State) -> State:
    """Return the state after these events; the states of evaluation and prediction are discarded."""
    for event in events:
        after = step.fire(event, state)
        state = state if event.is_eval or event.is_predict else after
    return state
