"""The state from which a run starts, and the step that evaluates it."""

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from purecompose._support.messages import warn
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events
from purecompose.core.state import State
from purecompose.data.checks import StateStream, length_of
from purecompose.run.plateau import Adjuster
from purecompose.run.stopping import Stopper, with_memories
from purecompose.time import RunLength, Time, TimeUnit
from purecompose.time.units import named_time
from purecompose.transforms.compilation import CompiledStep


def evaluation_step(step: Step) -> Step:
    """Return the step that evaluates for a training step; it is not compiled."""
    composed = step.step if isinstance(step, CompiledStep) else step
    return composed.replace(program=eval_events)


def start_of_run(
    step: Step,
    state: State,
    data: Any,
    stoppers: Iterable[Stopper] = (),
    adjusters: Iterable[Adjuster] = (),
    duration: Time | str | None = None,
) -> tuple[State, float]:
    """Return the state from which a run starts, with its length and all memory, and the budget in seconds.

    Args: see `fit`.
    """
    state, budget = _with_duration(state, duration)
    state = _with_epoch_length(state, data)
    if any(algorithm.name not in state.context.initialised for algorithm in step.algorithms):
        state = step.init(state)
    state = with_memories(state, tuple(stoppers))
    for adjuster in adjusters:
        state = adjuster.init(state)
    return state, budget


def _with_duration(state: State, duration: Time | str | None) -> tuple[State, float]:
    """Return the state with the run's length, and the budget of this call in seconds."""
    run = state.timestamp.run
    wanted = run.duration if duration is None else named_time(duration, "fit: duration")
    if wanted is None:
        raise ValueError("no duration: give State.create or fit one, such as duration='20ep'")
    if wanted.unit is TimeUnit.SECOND:
        return state, float(wanted.value)
    return with_run(state, RunLength(wanted, run.batches_per_epoch)), math.inf


def _with_epoch_length(state: State, data: Any) -> State:
    """Return the state with the epoch's length, taken from sized data if unknown, otherwise checked against them."""
    run = state.timestamp.run
    length = length_of(data)
    if length == 0:
        raise ValueError("the data has no batch: an epoch of length 0 would never end")
    if run.batches_per_epoch is None:
        if isinstance(data, StateStream) and run.duration is not None and run.duration.unit is TimeUnit.EPOCH:
            raise ValueError(
                f"the run is counted in epochs ({run}), and data.stream has none: give State.create(batches_per_epoch="
                '...), or a duration in batches, such as "1000ba"'
            )
        return with_run(state, RunLength(run.duration, length))
    if length is not None and length < run.batches_per_epoch:
        raise ValueError(
            f"the data has {length} batches, but the state's batches_per_epoch is {run.batches_per_epoch}; "
            "leave batches_per_epoch out, or make it at most the data's length"
        )
    return state


def with_run(state: State, run: RunLength) -> State:
    """Return the state with another length of its run; warn if that changes a schedule in the middle of the run."""
    now, later = state.timestamp, state.timestamp.replace(run=run)
    if now.batch > 0 and now.run.duration not in (None, run.duration):
        for schedule in state.context.schedules:
            before = after = 0.0
            with suppress(Exception):  # a list of rates may end with the run
                before, after = schedule(now), schedule(later)
            if not math.isclose(before, after, rel_tol=1e-6, abs_tol=1e-9):
                warn(
                    f"the run is {run.duration} long, and was {now.run.duration}: at batch {now.batch} {schedule!r} is "
                    f"{after:.4g}, and was {before:.4g}. It follows the run's length unless it is given one, as in "
                    f"schedule.cosine(t_max={str(now.run.duration)!r})"
                )
    return state if run == now.run else state.replace(timestamp=later)
