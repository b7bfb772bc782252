"""`fit` and `training`: give the state of a run its length and all memory, resume it if requested, and run the loop."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from purecompose._support.messages import naming_urls, warn
from purecompose._support.specs import check_keywords
from purecompose.core.application import with_updates
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data.loaders import StateStream, describe_data, differences, length_of, own_order
from purecompose.errors import CheckpointWarning, MismatchError, SkippingWarning
from purecompose.run.checking import check_arguments, checked_checkpoints, checked_result, checked_settings
from purecompose.run.evaluation import Evaluator, Observer
from purecompose.run.outer import EpochData, Run
from purecompose.run.rules import Adjuster, BestState, Stopper
from purecompose.run.saving.checkpoint import Resumed, best_before, restore_extra, resumed_from, resumed_from_newest
from purecompose.run.saving.keeping import Keeper
from purecompose.run.saving.leaves import POSITION
from purecompose.run.saving.remote import fetched
from purecompose.run.saving.selection import Checkpoints
from purecompose.schedule import Schedule, collect
from purecompose.time import RunLength, Time, Timestamp, TimeUnit
from purecompose.time.event import Event, named_time


P = ParamSpec("P")
T = TypeVar("T")


def _states(
    defers_signals: bool,
    step: Step,
    state: State,
    data: Iterable[Any] | EpochData | StateStream,
    *,
    duration: Time | str | None = None,
    evaluate: Evaluator | Iterable[Evaluator] | None = (),
    observers: Observer | Iterable[Observer] = (),
    stop: Stopper | Iterable[Stopper] = (),
    adjust: Adjuster | Iterable[Adjuster] = (),
    checkpoints: Checkpoints | None = None,
    resume: Path | str | None = None,
    microbatches: str | None = None,
    result: Literal["last", "best"] = "last",
) -> Iterator[State]:
    """Yield the states of a run with the settings of `fit`; for `defers_signals` see `Run.states`."""
    check_arguments(step, state, data, microbatches, resume)
    settings = checked_settings(step, state, evaluate, observers, stop, adjust)
    checkpoints = checked_checkpoints(checkpoints, step, state, data, settings)
    best = checked_result(result, checkpoints, step, state, settings)
    if checkpoints is not None and best is not None:  # so that a resumed run finds it
        checkpoints = replace(checkpoints, best=best.metric, mode=best.mode)
    state, budget = start_of_run(step, state, data, settings.watchers, duration)
    if step.ranks is not None:
        _check_ends_together(budget, microbatches)
    keeper = None if checkpoints is None else Keeper(checkpoints)
    try:
        if keeper is not None:
            keeper.open(state, step)
        is_adaptive = microbatches is not None
        resumed, position = _resumed(keeper, state, step, data, resume, ["microbatches"] * is_adaptive)
        if resumed is not None:
            if best is not None:
                _recall(best, resumed, state, step)
            state = step.fire(Event.AFTER_LOAD, _with_run(resumed.state, state.timestamp.run))
        elif state.timestamp.is_finished():
            raise ValueError(f"nothing left to train: {_at_the_end(state.timestamp)}")
        if keeper is not None:
            keeper.begin(state, step, from_here=resumed if resume == "auto" else None)
        run = Run(
            step,
            data,
            settings,
            keeper,
            budget,
            is_adaptive=is_adaptive,
            memory={} if resumed is None else {"has_begun": resumed.index.batch > 0, **resumed.index.memory},
            metrics={} if resumed is None else resumed.index.metrics,
            position=position,
            best=best,
        )
        yield from run.states(state, defers_signals=defers_signals)
    finally:
        if keeper is not None:
            keeper.close()


def _declare(states: Callable[Concatenate[bool, P], object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Return a decorator that gives a function the signature of `states` without its first parameter."""
    _, *parameters = inspect.signature(states).parameters.values()

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        vars(function)["__signature__"] = inspect.signature(function).replace(parameters=parameters)
        return function

    return decorate


@_declare(_states)
def fit(step: Step, state: State, data: Any = None, **settings: Any) -> State:
    """Train from the time of the state until the run's length is reached.

    Args:
        step: The training step. It is initialised here if that has not been done.
        state: The state to start from; it is not changed.
        data: Batches, iterated again for every epoch; or an object with `epoch(key, epoch, start)`, which returns an
            epoch's batches in an order that depends only on the run's key, as `data.arrays` and `data.loader` do. A
            `DataLoader` over a map-style data set without a generator also follows the run's key. Data with
            `state_dict` and `load_state_dict` continue at the position that is in the checkpoint; other data are read
            from the epoch's start, with a `SkippingWarning`. Endless data need a duration in batches, samples, tokens
            or seconds, or `batches_per_epoch`. `data.stream` makes each batch from the current state.
        duration: Length of the whole run, instead of the state's own duration. In seconds it is a budget of
            wall-clock time for this call, in addition to the state's own duration if it has one.
        evaluate: One or several `Evaluator`s, with their intervals. Each needs a different label.
        observers: One or several functions `(event, state) -> None`, called at every event outside the step except
            loading, and at BATCH_END.
        stop: Stopping rules, such as `EarlyStopping("eval/loss")`; checked after each evaluation.
        adjust: Changes of the state after each evaluation, such as `ReduceOnPlateau("eval/loss")`.
        checkpoints: Folder of the checkpoints, and how often to write one. With checkpoints, SIGINT and SIGTERM end the
            run after the current batch, once its checkpoint is written.
        resume: Checkpoint to continue from, to the same bits as the uninterrupted run: `"auto"` for the newest complete
            one of `checkpoints` (if there is none, the run starts at `state`), or a checkpoint's folder. `state` then
            defines the structure and the run's length, and `checkpoints.extra` is restored in its place. BEFORE_LOAD
            fires on `state` if there is a checkpoint, and AFTER_LOAD on the loaded state.
        microbatches: `"auto"` to double the number of slices whenever memory does not suffice, from that batch on.
        result: `"last"` for the state at the end, or `"best"` for that of the best evaluation, which is kept in memory.
            The metric is that of `Checkpoints(best=...)`, or else of `EarlyStopping`, or else the only one that the
            evaluators report; of equal values the first one is the best. With `checkpoints`, the best state is also
            kept there, for a resumed run.

    Returns:
        The state at the end, or the best one. Calling `fit` again with a longer duration continues from there.

    Raises:
        TypeError: An argument is not a step, state or evaluator.
        ValueError: No duration is given, or its counter does not move with the batches; the step has no `advance`;
            nothing is left to train; the data has no batch, or fewer than the state's `batches_per_epoch`; an evaluator
            reads the same stream; with `result="best"`, not one metric decides; in a step of several processes, a
            duration in seconds or `microbatches="auto"`.
        FileExistsError: `resume` is not given, but `checkpoints` contains checkpoints of a run that has come further.
        MismatchError, DamagedError: The checkpoint does not fit, or is incomplete; see `load`.

    Warns:
        UserWarning: The run has another length than before, which changes a schedule from this batch on; or with
            `result="best"` no evaluation has given a number, so that the last state is returned.

    Example:
        >>> import torch
        >>> from purecompose import compose, loop_events, losses, optim
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
        >>> state = fit(compose(loop_events), state, data)
        >>> state.timestamp.batch
        3
    """
    check_keywords(settings, fit)
    states = _states(True, step, state, data, **settings)
    del state  # the run may need its memory
    return deque(states, maxlen=1).pop()


@_declare(_states)
def training(step: Step, state: State, data: Any = None, **settings: Any) -> Iterator[State]:
    """Return the run of `fit` as a generator of states, for your own outer loop.

    Yields the state after each batch and all that belongs to it (evaluation, the end of an epoch, a checkpoint), and
    finally the state that `fit` returns, after FIT_END. Leaving the loop early keeps the checkpoints so far.

    Args:
        step, state, data, settings: As for `fit`, with the same errors, which come with the first state.

    Example:
        >>> import torch
        >>> from purecompose import compose, loop_events, losses, optim
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
        >>> [state.timestamp.batch for state in training(compose(loop_events), state, data)]
        [1, 2, 3, 3]
    """
    check_keywords(settings, training)
    return _states(False, step, state, data, **settings)


def _at_the_end(now: Timestamp) -> str:
    duration = now.run.duration
    assert duration is not None, "a run without one is never over"
    reached = Time(now.get(duration.unit), duration.unit)
    place = f"epoch {now.epoch} (batch {now.batch}), {'past ' * (reached > duration)}the end of its {duration}"
    return f'the state stands at {place}; give fit a longer duration, as in duration="{2 * reached}"'


def _resumed(
    keeper: Keeper | None, like: State, step: Step, data: Any, resume: Path | str | None, ignore: Collection[str]
) -> tuple[Resumed | None, Any]:
    """Return the checkpoint from which a run continues, and the position of its data, after a check of both.

    Restores `Checkpoints.extra`.
    """
    if resume is None:
        return None, None
    with naming_urls(), nullcontext() if resume == "auto" else fetched(resume) as given:
        if given is not None:
            resumed = resumed_from(given, like, step, ignore)
        elif keeper is not None:
            resumed = resumed_from_newest(keeper.folder, like, step, ignore)
        else:
            raise ValueError("resume='auto' looks for checkpoints: say where, checkpoints=Checkpoints(folder)")
        if resumed is None:
            return None, None
        _check_resumed(resumed, like, data)
        restore_extra(None if keeper is None else keeper.settings.extra, resumed.path, resumed.outside)
        return resumed, resumed.outside.get(POSITION)


def _recall(best: BestState, resumed: Resumed, like: State, step: Step) -> None:
    """Let the best state be that of the run up to the checkpoint from which it continues."""
    found = best_before(resumed, like, step, Checkpoints("", best=best.metric, mode=best.mode))
    if found is not None:
        rating, state = found
        run = like.timestamp.run
        best.rating = rating
        best.state = step.fire(Event.AFTER_LOAD, state.replace(timestamp=state.timestamp.replace(run=run)))


def _check_resumed(resumed: Resumed, like: State, data: Any) -> None:
    """Warn if the data differ from those of the checkpoint, as far as that is known."""
    now, length = resumed.state.timestamp, like.timestamp.run.batches_per_epoch
    saved = now.run.batches_per_epoch
    other = differences(resumed.index.memory.get("data", {}), describe_data(data))
    if saved is not None and length is not None and saved != length:
        line = f"batches_per_epoch: {saved} in the checkpoint, {length} here"
        if now.batch_in_epoch > 0:
            raise MismatchError(f"{resumed.path} stands in the middle of an epoch of other data: {line}", [line])
        other.insert(0, line)
    if other:
        warn(f"{resumed.path} continues with other data: {'; '.join(other)}", CheckpointWarning)
    # Only for another duration: a run in samples or tokens usually ends a little past its own.
    has_other_length = now.run.duration != like.timestamp.run.duration
    share = now.replace(run=like.timestamp.run).elapsed()
    if has_other_length and share is not None and share > 1:
        line = f"duration: past batch {now.batch} in the checkpoint, {like.timestamp.run.duration} here"
        raise MismatchError(f"{resumed.path} stands past the end of the run: {line}", [line])
    # In the middle of an epoch, reading it from the start warns of a missing position.
    reason = own_order(data, has_position=POSITION in resumed.index.memory or now.batch_in_epoch > 0)
    if reason is not None and now.batch > 0:
        warn(f"continuing from batch {now.batch}: {reason}", SkippingWarning)


def _check_ends_together(budget: float, microbatches: str | None) -> None:
    """Raise for settings with which one of several processes could continue or end without the others."""
    if microbatches:
        raise ValueError("microbatches='auto': one process that tries again leaves the others waiting; give a number")
    if budget < math.inf:
        raise ValueError(
            f"duration={budget:g}s: processes that share their batches must end after the same one, and clocks differ; "
            "give a number of batches or epochs"
        )


def start_of_run(
    step: Step, state: State, data: Any, watchers: Iterable[Adjuster] = (), duration: Time | str | None = None
) -> tuple[State, float]:
    """Return the state from which `fit` starts, with its length and all memory, and the budget in seconds."""
    state, budget = _with_duration(state, duration)
    state = with_updates(_with_epoch_length(state, data), step.algorithms)
    if any(algorithm.name not in state.context.initialised for algorithm in step.algorithms):
        state = step.init(state)
    if state.timestamp.batch == 0:  # later, a schedule may have ended with the time in which its method acts
        for schedule in collect([dict(algorithm.config) for algorithm in step.algorithms], Schedule):
            schedule(state.timestamp)  # what has no value in this run is an error at its start, whenever a method acts
    for watcher in watchers:
        state = watcher.init(state)
    return state, budget


def _with_duration(state: State, duration: Time | str | None) -> tuple[State, float]:
    """Return the state with the run's length, and the budget of this call in seconds."""
    run = state.timestamp.run
    wanted = run.duration if duration is None else named_time(duration, "fit: duration")
    if wanted is None:
        raise ValueError("no duration: give State.create or fit one, such as duration='20ep'")
    if wanted.unit is TimeUnit.SECOND:
        return state, float(wanted.value)
    return _with_run(state, replace(run, duration=wanted)), math.inf


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
        return _with_run(_with_ended_epochs(state, length), replace(run, batches_per_epoch=length))
    if length is not None and length < run.batches_per_epoch:
        raise ValueError(
            f"the data has {length} batches, but the state's batches_per_epoch is {run.batches_per_epoch}; leave it out"
        )
    return state


def _with_ended_epochs(state: State, length: int | None) -> State:
    """Return a state of a loop of your own, which knew no epochs, at the end of those that it has trained."""
    now = state.timestamp
    if length is None or now.batch_in_epoch < length:
        return state
    epochs, rest = divmod(now.batch_in_epoch, length)
    if rest:
        raise ValueError(
            f"the state is at batch {now.batch_in_epoch} of epoch {now.epoch}, but the data have {length} batches: in "
            f"a loop of your own, give State.create(batches_per_epoch={length})"
        )
    ended = {"batch_in_epoch": 0, "sample_in_epoch": 0, "token_in_epoch": 0}
    return state.replace(timestamp=now.replace(epoch=now.epoch + epochs, **ended))


def _with_run(state: State, run: RunLength) -> State:
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
