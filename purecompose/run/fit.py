"""`fit` and `training`: check the settings of a run, then run the loop of `outer`.

A loop of fifteen lines could do the same: it reads batches, calls the step, and fires the events outside the step.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from purecompose._support.checks import is_callable_with, shown
from purecompose._support.keywords import check_keywords
from purecompose._support.urls import naming_urls
from purecompose._support.warnings import warn
from purecompose.core.algorithm import Trait
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data.checks import check_batches
from purecompose.data.identity import describe_data, differences
from purecompose.data.loaders import SkippingWarning, own_order
from purecompose.data.stream import StateStream
from purecompose.run.evaluation import Evaluator, Observer, check_other_data
from purecompose.run.outer import EpochData, Run
from purecompose.run.plateau import Adjuster
from purecompose.run.saving.checkpoint import restore_extra, saved_outside
from purecompose.run.saving.errors import CheckpointWarning, MismatchError
from purecompose.run.saving.extra import POSITION
from purecompose.run.saving.fetching import fetched
from purecompose.run.saving.keeping import Keeper
from purecompose.run.saving.resuming import Resumed, resumed_from, resumed_from_newest
from purecompose.run.saving.settings import Checkpoints
from purecompose.run.start import evaluation_step, start_of_run, with_run
from purecompose.run.stopping import Stopper
from purecompose.time import Time, Timestamp
from purecompose.time.event import Event


__all__ = ["EpochData", "fit", "training"]

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
) -> Iterator[State]:
    """Yield the states of a run; see `fit` and `training`, which take the same settings.

    Args:
        defers_signals: True if no code of the caller runs between two batches; see `Run.states`.
    """
    _check_arguments(step, state)
    if not isinstance(data, StateStream):
        check_batches(data, "fit: data")
    if microbatches not in (None, "auto"):
        raise ValueError(f"microbatches={microbatches!r}: expected 'auto'; a number is given to compose")
    evaluators = _as_evaluators(evaluate)
    stoppers = _members(stop, "stop", "begin", 'EarlyStopping("eval/loss")')
    adjusters = _members(adjust, "adjust", "init", 'ReduceOnPlateau("eval/loss")')
    observers = _as_observers(observers)
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise TypeError(f"checkpoints: expected Checkpoints(folder), got {shown(checkpoints)}")
    if checkpoints is not None:
        check_other_data(evaluators, data)
    _check_metrics(state, step, evaluators, stoppers, adjusters, checkpoints)
    if state.context.precision == "fp16" and not any(Trait.SCALES_LOSS in a.traits for a in step.algorithms):
        warn("precision='fp16' without loss scaling: small gradients become 0; add algorithms.loss_scaling()")
    state, budget = start_of_run(step, state, data, stoppers, adjusters, duration)
    if step.ranks is not None:
        _check_ends_together(budget, microbatches)
    keeper = None if checkpoints is None else Keeper(checkpoints)
    try:
        if keeper is not None:
            keeper.open(state, step)
        with naming_urls(), nullcontext() if resume in (None, "auto") else fetched(resume) as given:
            resumed = _resumed(keeper, state, step, given or resume, is_adaptive=microbatches is not None)
            position = None if resumed is None else _restored(resumed, state, data, checkpoints)
        if resumed is not None:
            state = step.fire(Event.AFTER_LOAD, with_run(resumed.state, state.timestamp.run))
        elif state.timestamp.is_finished():
            raise ValueError(f"nothing left to train: the state stands at {_at_the_end(state.timestamp)}")
        if keeper is not None:
            keeper.begin(state, step, from_here=resumed if resume == "auto" else None)
        run = Run(
            step,
            evaluation_step(step),
            data,
            evaluators,
            observers,
            stoppers,
            adjusters,
            keeper,
            budget,
            is_adaptive=microbatches is not None,
            memory={} if resumed is None else {"has_begun": resumed.index.batch > 0, **resumed.index.memory},
            metrics={} if resumed is None else resumed.index.metrics,
            position=position,
        )
        yield from run.states(state, defers_signals=defers_signals)
    except Exception:
        if keeper is not None:
            keeper.give_up()
        raise
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


_INSTEAD = {
    "callbacks": "observers=...",
    "epochs": 'duration="3ep"',
    "seed": "State.create(..., key=3)",
    "validation_data": "evaluate=Evaluator(data, metrics)",
}
"""What to write in place of settings that other libraries have."""


@_declare(_states)
def fit(step: Any, state: Any, data: Any, **settings: Any) -> State:
    """Train from the time of the state until the run's length is reached.

    Args:
        step: The training step. It is initialised here if that has not been done.
        state: The state to start from; it is not changed.
        data: Batches, iterated again for every epoch; or an object with `epoch(key, epoch, start)`, which returns an
            epoch's batches in an order that depends only on the run's key, as `data.arrays` and `data.loader` do. A
            `DataLoader` over a map-style data set without a generator also follows the run's key, and can start in the
            middle of an epoch. Data with `state_dict` and `load_state_dict` continue at the position that is in the
            checkpoint. Other data are read from the epoch's start, with a `SkippingWarning`. Endless data need
            a duration in batches, samples, tokens or seconds, or `batches_per_epoch`. `data.stream` makes each batch
            from the current state.
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

    Returns:
        The state at the end. Calling `fit` again with a longer duration continues from there.

    Raises:
        TypeError: An argument is not a step, state or evaluator.
        ValueError: No duration is given, or its counter does not move with the batches; the step has no `advance`;
            nothing is left to train; the data has no batch, or fewer than the state's `batches_per_epoch`; an evaluator
            reads the same stream; in a step of several processes, a duration in seconds or `microbatches="auto"`.
        FileExistsError: `resume` is not given, but `checkpoints` contains checkpoints of a run that has come further.
        MismatchError, DamagedError: The checkpoint does not fit, or is incomplete; see `load`.

    Example:
        >>> import torch
        >>> from purecompose import compose, loop_events, losses, optim
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
        >>> state = fit(compose(loop_events), state, data)
        >>> state.timestamp.batch
        3
    """
    check_keywords(settings, fit, _INSTEAD)
    states = _states(True, step, state, data, **settings)
    del state  # the run may need its memory
    return deque(states, maxlen=1).pop()


@_declare(_states)
def training(step: Any, state: Any, data: Any, **settings: Any) -> Iterator[State]:
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
    check_keywords(settings, training, _INSTEAD)
    return _states(False, step, state, data, **settings)


def _at_the_end(now: Timestamp) -> str:
    """Return a text that describes the time of a finished run, and how to continue it."""
    duration = now.run.duration
    assert duration is not None, "a run without one is never over"
    reached = Time(now.get(duration.unit), duration.unit)
    place = f"epoch {now.epoch} (batch {now.batch}), {'past ' * (reached > duration)}the end of its {duration}"
    return f'{place}; give fit a longer duration, as in duration="{2 * reached}"'


def _check_ends_together(budget: float, microbatches: str | None) -> None:
    """Raise for settings with which one of several processes could continue or end without the others."""
    if microbatches:
        raise ValueError(
            "microbatches='auto': one process that tries again would leave the others waiting; give a number"
        )
    if budget < math.inf:
        raise ValueError(
            f"duration={budget:g}s: processes that share their batches must end after the same one, and clocks differ; "
            "give a number of batches or epochs"
        )


def _resumed(
    keeper: Keeper | None, like: State, step: Any, how: Path | str | None, *, is_adaptive: bool
) -> Resumed | None:
    if how is None:
        return None
    if isinstance(how, Path):
        return resumed_from(how, like, step, is_adaptive=is_adaptive)
    if keeper is None:
        raise ValueError("resume='auto' looks for checkpoints: say where, checkpoints=Checkpoints(folder)")
    return resumed_from_newest(keeper.folder, like, step, is_adaptive=is_adaptive)


def _check_metrics(
    state: State,
    step: Step,
    evaluators: Iterable[Evaluator],
    stoppers: Iterable[Stopper],
    adjusters: Iterable[Adjuster],
    checkpoints: Checkpoints | None,
) -> None:
    """Raise if a setting uses a metric that is not reported."""
    known = [name for one in evaluators for name in one.reported]
    wanted = {f"stop: {stopper.name.removeprefix('.')}": stopper.metric for stopper in stoppers}
    wanted |= {f"adjust: {adjuster.name.removeprefix('.')}": adjuster.metric for adjuster in adjusters}
    if checkpoints is not None and checkpoints.best is not None:
        if state.key.ndim > 1:
            raise ValueError("checkpoints: best: a population has no single best; keep=... counts the newest")
        wanted["checkpoints: best"] = checkpoints.best
    own = {"train", *(algorithm.name for algorithm in step.algorithms)}
    for where, metric in wanted.items():
        # The metrics that algorithms report are known only at the end of the first epoch.
        may_be_own = where != "checkpoints: best" and metric.partition("/")[0] in own
        if metric not in known and not may_be_own:
            raise ValueError(f"{where}: no evaluator reports {metric!r}; there are {', '.join(known) or 'no metrics'}")


def _restored(resumed: Resumed, like: State, data: Any, checkpoints: Checkpoints | None) -> Any:
    """Put what the run keeps outside the state back in its place, and return the position of the data, if it is known.

    Raises and warns if the checkpoint does not fit the run or its data.
    """
    _check_resumed(resumed, like, data)
    restore_extra(None if checkpoints is None else checkpoints.extra, resumed.path, resumed.index)
    return saved_outside(POSITION, resumed.path, resumed.index)


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


def _check_arguments(step: Any, state: Any) -> None:
    if not isinstance(step, Step) or not isinstance(state, State):
        came = f"{type(step).__name__}, {type(state).__name__}"
        raise TypeError(f"fit(step, state, data): expected a Step and a State, got {came}")
    if not step.has_advance:
        raise ValueError(
            "fit: the step's program has no `advance`, so time would stand still and training never end; "
            "put `advance` after `update` and before Event.BATCH_END, as loop_events does"
        )


def _members(given: Any, role: str, method: str, example: str) -> tuple[Any, ...]:
    """Return one or several objects, which need a metric and a method of this name, as a tuple."""
    if given is None:
        return ()
    members = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for member in members:
        if isinstance(member, type) or not (hasattr(member, "metric") and callable(getattr(member, method, None))):
            raise TypeError(f"{role}: expected an object such as {example}, got {shown(member)}")
    return members


def _as_observers(given: Any) -> tuple[Observer, ...]:
    given = () if given is None else given
    observers: tuple[Any, ...] = (given,) if callable(given) or not isinstance(given, Iterable) else tuple(given)
    for observer in observers:
        if isinstance(observer, type):
            raise TypeError(
                f"observers: expected an observer, got the class {observer.__name__}: make one, "
                f"{observer.__name__}(...)"
            )
        if not callable(observer):
            raise TypeError(f"observers: expected functions (event, state) -> None, got {shown(observer)}")
        if not is_callable_with(observer, 2):
            raise TypeError(f"observers: {shown(observer)} cannot be called as observer(event, state)")
    return observers


def _as_evaluators(given: Any) -> tuple[Evaluator, ...]:
    if given is None:
        return ()
    if isinstance(given, Evaluator):
        return (given,)
    # Test batches instead of an evaluator are a common slip. They are not iterated, which might load a whole data set.
    members: Iterable[Any] = given if isinstance(given, (Collection, Iterator)) else (given,)
    evaluators = []
    for member in members:
        if not isinstance(member, Evaluator):
            came = type(given).__name__ if member is given else f"{type(member).__name__} in a {type(given).__name__}"
            raise TypeError(
                f"evaluate: expected Evaluator(data, metrics), or several, got {came}; "
                "write evaluate=Evaluator(test_batches, {'accuracy': pc.metrics.accuracy})"
            )
        evaluators.append(member)
    twice = [label for label, count in Counter(one.label for one in evaluators).items() if count > 1]
    if twice:
        raise ValueError(
            f"evaluate: two evaluators are labelled {twice[0]!r}, so their metrics would be confused; give one "
            "of them another label, as in Evaluator(validation_batches, metrics, label='validation')"
        )
    return tuple(evaluators)
