"""fit: the loop around the step, with the outer events, evaluation and observers.

Nothing happens here that the fifteen-line loop could not do: `fit` asks for batches, calls the step and fires
the events that lie outside it.
"""

import math
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor

from purecompose.compilation import CompiledStep
from purecompose.compose import Step
from purecompose.data.loaders import draws_globally, keyed_batches
from purecompose.data.prefetch import prefetch
from purecompose.evaluation import Evaluator, Observer, run_evaluator
from purecompose.event import Event
from purecompose.loop import eval_events
from purecompose.state import State
from purecompose.time import RunLength, Time, Timestamp, TimeUnit


__all__ = ["EpochData", "fit"]


class EpochData(Protocol):
    """Data that bring their own order, so that a run goes on in the middle of an epoch without skipping."""

    def epoch(self, key: Tensor, epoch: int, start: int, /) -> Iterable[Any]:
        """The batches of an epoch from batch `start` on, in an order that follows from the run's key alone."""
        ...


def fit(
    step: Step | CompiledStep,
    state: State,
    data: Iterable[Any] | EpochData,
    *,
    duration: Time | str | None = None,
    evaluate: Evaluator | Iterable[Evaluator] = (),
    observers: Observer | Iterable[Observer] = (),
) -> State:
    """Trains until the run's length is reached, from wherever the state stands.

    Args:
        step: The training step. It is initialised here if that has not been done.
        state: The state to start from; it stays as it was.
        data: Batches, iterated anew for every epoch; or an object with `epoch(key, epoch, start)`, which gives an
            epoch's batches in an order that depends on the run's key alone. A `DataLoader` without a generator
            draws by the run's key, too. In the middle of an epoch, the batches already trained on are skipped.
            Data without an end need a duration in batches, samples, tokens or seconds, or `batches_per_epoch`.
        duration: Overrides the state's own duration, the whole run's length. In seconds it is a budget of
            wall-clock time for this call, on top of the state's own duration if it has one.
        evaluate: An `Evaluator`, or several, with their intervals.
        observers: Functions `(event, state) -> None`, or one, told at every event outside the step and at BATCH_END.

    Returns:
        The state at the end. Calling `fit` again with a longer duration goes on from there.

    Raises:
        TypeError: Something that is no step, state or evaluator.
        ValueError: No duration anywhere, one whose counter does not move with the batches, a step without
            `advance`, nothing left to train, no batch in the data, or fewer batches in it than the state's
            `batches_per_epoch`.
    """
    _check_arguments(step, state)
    evaluators = _as_evaluators(evaluate)
    observers = (observers,) if callable(observers) else tuple(observers)
    state, budget = _with_duration(state, duration)
    state = _with_epoch_length(state, data)
    composed = step.step if isinstance(step, CompiledStep) else step
    run = _Run(step, composed.replace(program=eval_events), evaluators, tuple(observers), budget)
    if state.timestamp.is_finished():
        raise ValueError(
            f"nothing left to train: the state stands at {state.timestamp!r}, at the end of its run; "
            "give fit a longer duration"
        )
    if any(algorithm.name not in state.context.initialised for algorithm in step.algorithms):
        state = step.init(state)
    state = run.fire(Event.FIT_START, state)
    while not run.is_over(state):
        state = _epoch(run, state, data)
    state = run.fire(Event.FIT_END, state)
    run.evaluate(Event.FIT_END, state, state.timestamp)
    return state


def _check_arguments(step: Any, state: Any) -> None:
    if not isinstance(step, (Step, CompiledStep)) or not isinstance(state, State):
        came = f"{type(step).__name__}, {type(state).__name__}"
        raise TypeError(f"fit(step, state, data): expected a Step and a State, got {came}")
    if not step.has_advance:
        raise ValueError(
            "fit: the step's program has no `advance`, so time would stand still and training never end; "
            "put `advance` after `update` and before Event.BATCH_END, as loop_events does"
        )


def _as_evaluators(given: Any) -> tuple[Evaluator, ...]:
    if isinstance(given, Evaluator):
        return (given,)
    # Batches for the test in an evaluator's place, a common slip: not iterated, which might load a whole data set.
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
    return tuple(evaluators)


class _Run:
    """What one call of `fit` works with; it remembers when it last evaluated, which no state depends on."""

    def __init__(
        self,
        step: Step | CompiledStep,
        eval_step: Step,
        evaluators: tuple[Evaluator, ...],
        observers: tuple[Observer, ...],
        budget: float,
    ) -> None:
        self.step, self.eval_step = step, eval_step
        self.evaluators, self.observers = evaluators, observers
        self._deadline = time.monotonic() + budget
        self._evaluated: dict[int, int] = {}

    def is_over(self, state: State) -> bool:
        """Whether the run's length or the time budget is used up."""
        return state.timestamp.is_finished() or time.monotonic() >= self._deadline

    def fire(self, event: Event, state: State) -> State:
        """Algorithms first, then observers, who see what the algorithms made."""
        if event not in self.step.events:
            state = self.step.fire(event, state)
        for observer in self.observers:
            observer(event, state)
        return state

    def evaluate(self, event: Event, state: State, before: Timestamp) -> None:
        """Runs the evaluators that are due at an event; at FIT_END those that have not just run."""
        due = [
            evaluator
            for evaluator in self.evaluators
            if _is_due(evaluator.interval, event, before, state.timestamp)
            and self._evaluated.get(id(evaluator)) != state.timestamp.batch
        ]
        if not due:
            return
        current = self.fire(Event.EVAL_BEFORE_ALL, state)
        for evaluator in due:
            run_evaluator(evaluator, current, self.eval_step, self.observers)
            self._evaluated[id(evaluator)] = state.timestamp.batch
        self.fire(Event.EVAL_AFTER_ALL, current)


def _epoch(run: _Run, state: State, data: Iterable[Any] | EpochData) -> State:
    """What is left of one epoch."""
    start = state.timestamp
    if _begins_iteration(start):
        state = run.fire(Event.ITERATION_START, state)
    if start.batch_in_epoch == 0:
        state = run.fire(Event.EPOCH_START, state)
    loader = _sent(data, _batches(data, state), state)
    while True:
        state = run.fire(Event.BEFORE_DATALOADER, state)
        batch = next(loader, _EXHAUSTED)
        before = state.timestamp
        if batch is _EXHAUSTED:
            _check_exhausted(before)
            return _end_epoch(run, state.replace(timestamp=before.advance_epoch()), before)
        state = run.step(state, batch)
        _check_moved(before, state.timestamp)
        state = run.fire(Event.BATCH_END, state)
        run.evaluate(Event.BATCH_END, state, before)
        state = run.fire(Event.BATCH_CHECKPOINT, state)
        if state.timestamp.epoch != before.epoch:
            if not run.is_over(state) or _counts_epochs(state):
                state = run.fire(Event.BEFORE_DATALOADER, state)  # the one that finds the epoch exhausted
            return _end_epoch(run, state, before)
        state = _end_iteration(run, state, before)
        if run.is_over(state):
            return state
        if state.timestamp.iteration != before.iteration:
            state = run.fire(Event.ITERATION_START, state)


def _end_epoch(run: _Run, state: State, before: Timestamp) -> State:
    """The events after an epoch; the time has moved on already, from `before`."""
    state = run.fire(Event.EPOCH_END, state)
    run.evaluate(Event.EPOCH_END, state, before)
    state = run.fire(Event.EPOCH_CHECKPOINT, state)
    return _end_iteration(run, state, before)


def _end_iteration(run: _Run, state: State, before: Timestamp) -> State:
    """The events after an iteration, if one is over since `before`. Those of tokens may end within an epoch."""
    if state.timestamp.iteration == before.iteration:
        return state
    state = run.fire(Event.ITERATION_END, state)
    return run.fire(Event.ITERATION_CHECKPOINT, state)


def _begins_iteration(now: Timestamp) -> bool:
    length = now.run.iteration_length
    is_at_seam = now.batch_in_epoch == 0 or (length is not None and length.unit is TimeUnit.TOKEN)
    return is_at_seam and now.epoch_in_iteration == 0 and now.token_in_iteration == 0


def _check_exhausted(now: Timestamp) -> None:
    """Raises where the data end before the epoch does."""
    if now.batch_in_epoch == 0:
        raise ValueError(f"no batch came in epoch {now.epoch}: is the data empty, or an iterator used up?")
    if now.run.batches_per_epoch is not None:
        raise ValueError(
            f"the data ended after {now.batch_in_epoch} batches of epoch {now.epoch}, but the state's "
            f"batches_per_epoch is {now.run.batches_per_epoch}; leave it out, or give the number that comes"
        )


def _check_moved(before: Timestamp, now: Timestamp) -> None:
    """Raises where the run's length is counted in what the batch has none of: the run would never end."""
    run = now.run
    if run.duration is None:
        return
    unit = run.duration.unit
    if unit is TimeUnit.ITERATION and run.iteration_length is not None:
        unit = run.iteration_length.unit
    if unit is TimeUnit.TOKEN and now.token == before.token:
        raise ValueError(
            f"the run is counted in tokens ({_in_words(run)}), but batch {before.batch} has none: tokens are the "
            "elements of a batch's 'input_ids'. Name the ids so, or give the duration in samples, batches or epochs"
        )
    if unit is TimeUnit.SAMPLE and now.sample == before.sample:
        raise ValueError(
            f"the run is counted in samples ({_in_words(run)}), but batch {before.batch} has none; leave empty "
            "batches out of the data, or give the duration in batches or epochs"
        )


def _in_words(run: RunLength) -> str:
    in_iterations = run.duration is not None and run.duration.unit is TimeUnit.ITERATION
    return f"duration {run.duration}" + (f" of {run.iteration_length}" if in_iterations else "")


_EXHAUSTED = object()


def _batches(data: Any, state: State) -> Iterator[Any]:
    """The epoch's batches from where the state stands."""
    now = state.timestamp
    # A population trains on batches of one order: the first member's.
    key = state.key.reshape(-1, 2)[0]
    if callable(getattr(data, "epoch", None)):
        return iter(data.epoch(key, now.epoch, now.batch_in_epoch))
    loader = keyed_batches(data, key, now.epoch) if draws_globally(data) else iter(data)
    for _ in range(now.batch_in_epoch):
        next(loader, None)
    return loader


def _sent(data: Any, loader: Iterator[Any], state: State) -> Iterator[Any]:
    """The batches on the state's device, those for a GPU sent ahead."""
    # What is read from an iterator stays read: where this run ends, the next must find the batch that follows.
    return prefetch(loader, state.device, size=1 if isinstance(data, Iterator) else 2)


def _with_duration(state: State, duration: Time | str | None) -> tuple[State, float]:
    """The state with the run's length, and the budget of this call in seconds."""
    run = state.timestamp.run
    wanted = run.duration if duration is None else Time.of(duration)
    if wanted is None:
        raise ValueError("no duration: give State.create or fit one, such as duration='20ep'")
    if wanted.unit is TimeUnit.SECOND:
        return state, float(wanted.value)
    return _with_run(state, RunLength(wanted, run.batches_per_epoch, run.iteration_length)), math.inf


def _with_epoch_length(state: State, data: Any) -> State:
    """Learns the epoch's length from sized data, or checks it."""
    run = state.timestamp.run
    length = _length(data)
    if length == 0:
        raise ValueError("the data has no batch: an epoch of length 0 would never end")
    if run.batches_per_epoch is None:
        return _with_run(state, RunLength(run.duration, length, run.iteration_length))
    if length is not None and length < run.batches_per_epoch:
        raise ValueError(
            f"the data has {length} batches, but the state's batches_per_epoch is {run.batches_per_epoch}; "
            "leave batches_per_epoch out, or make it at most the data's length"
        )
    return state


def _length(data: Any) -> int | None:
    """The number of batches. To have `__len__` is not to know it: a `DataLoader` over a stream raises."""
    try:
        return len(data) if hasattr(data, "__len__") else None
    except (TypeError, NotImplementedError):
        return None


def _with_run(state: State, run: RunLength) -> State:
    return state if run == state.timestamp.run else state.replace(timestamp=state.timestamp.replace(run=run))


def _counts_epochs(state: State) -> bool:
    duration = state.timestamp.run.duration
    return duration is None or duration.unit in (TimeUnit.EPOCH, TimeUnit.ITERATION)


def _is_due(interval: Any, event: Event, before: Timestamp, now: Timestamp) -> bool:
    """Whether a multiple of the interval was passed between two times; epochs are counted at their end."""
    if event is Event.FIT_END:
        return True
    unit = interval.unit
    if event is Event.EPOCH_END:
        # Fractions too: in epochs of unknown length they move here alone.
        is_counted_here = unit in (TimeUnit.EPOCH, TimeUnit.ITERATION, TimeUnit.DURATION)
    else:
        is_inside_epoch = before.epoch == now.epoch
        is_counted_here = unit is not TimeUnit.EPOCH and (unit is not TimeUnit.ITERATION or is_inside_epoch)
    if not is_counted_here:
        return False
    if unit is not TimeUnit.DURATION:
        return before.get(unit) // interval.value != now.get(unit) // interval.value
    past, present = before.elapsed(), now.elapsed()
    if past is None or present is None:
        raise ValueError(f"interval {str(interval)!r}: fractions of the run need a run with a duration")
    # A fraction's multiples round: 3 * 0.1 is above 0.3.
    return math.floor(past / interval.value + 1e-9) != math.floor(present / interval.value + 1e-9)
