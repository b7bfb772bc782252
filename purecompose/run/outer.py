"""The loop around the step: batches, events outside the step, evaluation, checkpoints, stopping.

A run can be interrupted between any two batches, once everything that belongs to the first one is done. At these points
("cuts") checkpoints are written, signals are handled, and states are yielded.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

from torch import Tensor

from purecompose._support.messages import warn, with_urls
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events
from purecompose.core.state import State
from purecompose.data.loaders import StateStream, describe_data, epoch_batches
from purecompose.data.position import PositionedBatches, position_at
from purecompose.data.reader import prefetch
from purecompose.errors import SpentStateError
from purecompose.run.evaluation import Evaluator, Observer, notify, run_evaluator
from purecompose.run.interruptions import Adaptive, Interrupts
from purecompose.run.rules import Adjuster, BestState, Stopper
from purecompose.run.saving.keeping import Keeper
from purecompose.run.saving.selection import newest
from purecompose.time import Time, Timestamp, TimeUnit
from purecompose.time.event import Event
from purecompose.time.timestamp import has_passed
from purecompose.transforms.compilation import CompiledStep


class EpochData(Protocol):
    """Data with an order of their own, so that a run continues in the middle of an epoch without skipping batches."""

    def epoch(self, key: Tensor, epoch: int, start: int, /) -> Iterable[Any]:
        """Return the batches of an epoch from batch `start` on, in an order that depends on the run's key only."""
        ...


EXHAUSTED = object()
"""The batch after the last one of an epoch."""
Position: TypeAlias = Callable[[Timestamp], Any]
"""A function that returns the position of the data at the time of a state; `None` if it is not known."""


def reader(data: Any, start: State, position: Any) -> tuple[Callable[[State], Any], Position]:
    """Return a function that reads the epoch's next batch, from `start` on, and one for the position of the data.

    The first is given the current state, to whose device it moves the batch. At the end it returns `EXHAUSTED`.
    """
    if isinstance(data, StateStream):
        return lambda state: next(prefetch([data.batch(state)], state.device)), lambda _: None
    now = start.timestamp
    # All members of a population train on the same batches, in the order of the first member.
    key = start.key.reshape(-1, 2)[0]
    batches = epoch_batches(data, key, now.epoch, now.batch_in_epoch, position)
    positioned = batches if isinstance(batches, PositionedBatches) else None
    # A batch read from an iterator is gone, and the next run must find the one that follows; a position is that after
    # the batch that is trained: no reading ahead.
    is_ordered = isinstance(data, Iterator) or positioned is not None
    sent = prefetch(batches, start.device, size=1 if is_ordered else 2)
    return lambda _: next(sent, EXHAUSTED), lambda at: None if positioned is None else position_at(positioned, now, at)


def check_exhausted(now: Timestamp) -> None:
    """Raise if the data end before the epoch does."""
    if now.batch_in_epoch == 0:
        raise ValueError(f"no batch came in epoch {now.epoch}: is the data empty, or an exhausted iterator?")
    if now.run.batches_per_epoch is not None:
        raise ValueError(
            f"the data ended after {now.batch_in_epoch} batches of epoch {now.epoch}, but the state's "
            f"batches_per_epoch is {now.run.batches_per_epoch}; leave it out, or give the number that comes"
        )


def check_moved(before: Timestamp, now: Timestamp) -> None:
    """Raise if the batch has none of the units that the run's length is counted in: the run would never end."""
    run = now.run
    if run.duration is None:
        return
    unit = run.duration.unit
    if unit in _REMEDIES and now.get(unit) == before.get(unit):
        raise ValueError(
            f"the run is counted in {unit.name.lower()}s (duration {run.duration}), but batch {before.batch} has none: "
            f"{_REMEDIES[unit]}, or give the duration in batches or epochs"
        )


_REMEDIES = {
    TimeUnit.TOKEN: "tokens are the elements of a batch's 'input_ids'; name the ids so",
    TimeUnit.SAMPLE: "leave empty batches out of the data",
}


class Settings(NamedTuple):
    """What evaluates, observes and decides in a run, after the checks of `fit`."""

    evaluators: tuple[Evaluator, ...] = ()
    observers: tuple[Observer, ...] = ()
    stoppers: tuple[Stopper, ...] = ()
    adjusters: tuple[Adjuster, ...] = ()

    @property
    def watchers(self) -> tuple[Adjuster, ...]:
        """Everything that decides by metrics."""
        return (*self.stoppers, *self.adjusters)


@dataclass
class Run:
    """The settings and bookkeeping of one call of `fit`. No state depends on the bookkeeping."""

    step: Step
    data: Any
    settings: Settings
    keeper: Keeper | None = None
    budget: float = math.inf
    """Seconds of wall-clock time."""
    is_adaptive: bool = False
    """True if the number of microbatches is found by trying."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Notes from earlier parts of the run, read from its checkpoint: `has_begun`, true if the algorithms have seen
    FIT_START, and `microbatches`, the number found by trying."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics that have been measured of the state that the run continues from."""
    position: Any = None
    """The position of the data after the batch that the run continues from, if they have one."""
    best: BestState | None = None
    """The best state so far, if the run is to return it."""

    def __post_init__(self) -> None:
        composed = self.step.step if isinstance(self.step, CompiledStep) else self.step
        self._eval_step = composed.replace(program=eval_events)
        self._observers = self.settings.observers
        self._deadline = time.monotonic() + self.budget
        self._position: Position = lambda _: self.position  # of a run that is already over
        self._evaluated: dict[int, int] = {}
        self._is_stopped = False
        self._metrics: dict[str, Any] = dict(self.metrics)
        self._measured_at: Timestamp | None = None
        self._adaptive = Adaptive(self.step, self.memory.get("microbatches")) if self.is_adaptive else None
        self._train: Callable[[State, Any], State] = self._adaptive or self.step
        self._interrupts = Interrupts(None if self.keeper is None else self.step.ranks)
        self._unsaved: State | None = None
        self._described_data = {} if self.keeper is None else describe_data(self.data)
        measured = {name for one in self.settings.evaluators for name in one.reported}
        self._by_training = {name: _period_of(self.step, name) for name in self._decisive - measured}
        """The decisive metrics that algorithms of the step report, with the periods over which they are measured."""
        self._see_batch = [see for one in self._observers if callable(see := getattr(one, "see_batch", None))]

    def states(self, state: State, *, defers_signals: bool = False) -> Iterator[State]:
        """Yield the states between batches, and finally the state at the end of the run.

        Signals that arrive during a batch are handled before the next one; in the caller's code between two states they
        act as usual. With `defers_signals`, for a caller that runs no code there, they are always deferred.
        """
        self._is_stopped = self._stops(state)
        self._measured_at = state.timestamp if self._metrics else None
        cuts = self._cuts(state)
        noted = nullcontext() if self.keeper is None else self._interrupts
        try:
            with noted if defers_signals else nullcontext():
                while True:
                    with nullcontext() if defers_signals else noted:
                        following = next(cuts, None)
                    if following is None:
                        return
                    yield following
        finally:
            self._handle_pending_signal()

    def _cuts(self, state: State) -> Iterator[State]:
        has_begun = self.memory.get("has_begun", False)
        if self.keeper is not None and self.keeper.settings.keep == "log" and not has_begun:
            self._save(state, has_begun=False)
        state = notify(self._observers, Event.FIT_START, state) if has_begun else self._fire(Event.FIT_START, state)
        while not self._is_over(state):
            before = state.timestamp
            for cut in self._epoch(state):
                if self.keeper is not None and self.keeper.is_due(before, cut.timestamp, self._measured(cut)):
                    self._save(cut)
                self._handle_signal(cut)
                self._see_best(cut)
                before, state, self._unsaved = cut.timestamp, cut, cut
                yield cut
        self._save(state, is_last=True)  # while signals are deferred; afterwards they would interrupt the writing
        self._handle_signal(state, is_at_end=True)
        self._unsaved = None  # the state after FIT_END is not saved, because a longer run could not continue from it
        end = self._evaluate(Event.FIT_END, self._fire(Event.FIT_END, state), state.timestamp)
        if end is state:
            self._save(state, is_last=True)  # again, with the metrics just measured
        self._handle_signal(state, is_at_end=True)
        if self.keeper is not None:
            self.keeper.report_missing(state.timestamp)
        end = self._see_best(end)
        if self.best is not None and self.best.state is None:
            warn(f"result='best': no value of {self.best.metric!r} is a number, so the last state is returned")
        yield end

    def _see_best(self, state: State) -> State:
        """Keep a state if it is the best so far, and return the one that the run returns if this is its last."""
        if self.best is None:
            return state
        self.best.see(state, self._measured(state))
        return state if self.best.state is None else self.best.state

    def _is_over(self, state: State) -> bool:
        """Return whether the run's length or time budget is used up, or a stopping rule has ended the run."""
        return self._is_stopped or state.timestamp.is_finished() or time.monotonic() >= self._deadline

    def _fire(self, event: Event, state: State) -> State:
        """Fire an event for the algorithms, then for the observers, which see the result."""
        if event not in self.step.events:
            state = self.step.fire(event, state)
        return notify(self._observers, event, state)

    def _evaluate(self, event: Event, state: State, before: Timestamp) -> State:
        """Run the evaluators that are due at an event; at FIT_END, those that have not just run."""
        due = [
            evaluator
            for evaluator in self.settings.evaluators
            if _is_due(evaluator.every, event, before, state.timestamp)
            and self._evaluated.get(id(evaluator)) != state.timestamp.batch
        ]
        if not due:
            return state

        current, found = self._fire(Event.EVAL_BEFORE_ALL, state), {}
        for evaluator in due:
            found |= run_evaluator(evaluator, current, self._eval_step, self._observers, self.step).metrics
            self._evaluated[id(evaluator)] = state.timestamp.batch
        self._check_decisive(found, state)
        self._fire(Event.EVAL_AFTER_ALL, current)
        self._note(found, state)
        return state if event is Event.FIT_END else self._decided(state, found)

    def _note(self, found: Mapping[str, Tensor], state: State) -> None:
        """Note what has been measured of a state."""
        self._metrics = {**(self._metrics if self._measured_at == state.timestamp else {}), **found}
        self._measured_at = state.timestamp

    def _decided(self, state: State, found: Mapping[str, Tensor]) -> State:
        """Return the state after the stopping rules and adjusters have seen new metrics."""
        metrics = _plain(found)
        for watcher in self.settings.watchers:
            state = watcher.see(state, metrics) if watcher.metric in metrics else state
        self._is_stopped = self._stops(state)
        return state

    def _stops(self, state: State) -> bool:
        return any(stopper.is_over(state) for stopper in self.settings.stoppers)

    def _decide_by_training(self, state: State, before: Timestamp, unit: TimeUnit) -> State:
        """Decide by the step's own metrics, at the end of the periods in this unit over which they are measured."""
        periods, now = self._by_training, state.timestamp
        wanted = {name for name, one in periods.items() if one.unit is unit and has_passed(one, before, now)}
        if not wanted:
            return state
        missing = wanted - state.metrics.keys()
        if missing:
            raise ValueError(
                f"no evaluator and no algorithm reports {min(missing)!r}: the step's metrics are "
                f"{', '.join(state.metrics) or 'none'}; algorithms.training_metrics reports train/accuracy"
            )
        found = {name: state.metrics[name] for name in wanted}
        self._check_decisive(found, state)
        self._note(found, state)
        return self._decided(state, found)

    @property
    def _decisive(self) -> set[str]:
        """Names of the metrics that decide about stopping, adjusting or the best checkpoint."""
        best = [None if self.keeper is None else self.keeper.settings.best, self.best and self.best.metric]
        return {watcher.metric for watcher in self.settings.watchers} | {name for name in best if name}

    def _check_decisive(self, found: Mapping[str, Tensor], state: State) -> None:
        """Raise if a metric that decides about stopping, adjusting or the best checkpoint is not a single number."""
        for name in self._decisive:
            if name in found and found[name].ndim != state.key.ndim - 1:
                raise TypeError(
                    f"{name}: expected a single number, since it decides when the run stops or which checkpoint is the "
                    f"best; got a tensor of shape {tuple(found[name].shape)}: reduce it, as by .mean()"
                )

    # Cuts

    def _handle_signal(self, state: State, *, is_at_end: bool = False) -> None:
        """Save the state and end the run if a signal has arrived, in a step of several processes at any of them."""
        if self.keeper is not None and self._interrupts.is_due(state, is_at_end=is_at_end):
            self._save(state, is_last=True)
            self._end(state)

    def _handle_pending_signal(self) -> None:
        """Handle a signal after which no check follows, as when it has also ended processes that read the data."""
        if self.keeper is None or self._interrupts.received is None:
            return
        if self._unsaved is not None and not self._interrupts.is_common:  # of several, another one may have ended
            with suppress(SpentStateError):  # the current batch has overwritten it
                self._save(self._unsaved, is_last=True)
        self._end(self._unsaved)

    def _end(self, state: State | None) -> NoReturn:
        """End the process by the signal that has arrived, with a text about the checkpoint of its last state."""
        assert self.keeper is not None
        self.keeper.settle()
        found, now = self.keeper.written or (newest(self.keeper.folder), None)
        path = found and with_urls(found)
        self.keeper.close()
        left = f"the newest checkpoint is {path}" if path is not None else "there is no checkpoint of it"
        if state is not None and now == state.timestamp:
            left = f"the run is saved in {path}; resume='auto' continues from there"
        elif state is not None:
            left = f"the run could not be saved at batch {state.timestamp.batch}; {left}"
        self._interrupts.obey(left)

    def _save(self, state: State, *, is_last: bool = False, has_begun: bool = True) -> None:
        if self.keeper is None:
            return
        for observer in self._observers:
            # All records up to here must be on the disk before a run can continue from this checkpoint.
            flush = getattr(observer, "flush", None)
            if callable(flush):
                flush()
        memory: dict[str, Any] = {"has_begun": has_begun, "data": self._described_data}
        if self._adaptive is not None and self._adaptive.found is not None:
            memory["microbatches"] = self._adaptive.found
        step = self.step if self._adaptive is None else self._adaptive.step
        keep = self.keeper.keep_last if is_last else self.keeper.keep
        keep(state, step, self._measured(state), memory, self._position)

    def _measured(self, state: State) -> dict[str, Any]:
        """Return the metrics measured of exactly this state, as numbers."""
        return _plain(self._metrics) if self._measured_at == state.timestamp else {}

    # Epochs

    def _epoch(self, state: State) -> Iterator[State]:
        """Yield the states between the remaining batches of one epoch."""
        start = state.timestamp
        if start.batch_in_epoch == 0:
            state = self._fire(Event.EPOCH_START, state)
        next_batch, self._position = reader(self.data, state, self.position)
        self.position = None
        while True:
            state = self._fire(Event.BEFORE_DATALOADER, state)
            batch = next_batch(state)
            before = state.timestamp
            if batch is EXHAUSTED:
                check_exhausted(before)
                yield self._end_epoch(state.replace(timestamp=before.advance_epoch()), before)
                return
            for see_batch in self._see_batch:
                see_batch(state, batch)
            state = self._train(state, batch)
            check_moved(before, state.timestamp)
            state = self._fire(Event.BATCH_END, state)
            state = self._decide_by_training(state, before, TimeUnit.BATCH)
            state = self._finished(Event.BATCH_END, state, before)
            yield state
            if state.timestamp.epoch != before.epoch or self._is_over(state):
                return

    def _end_epoch(self, state: State, before: Timestamp) -> State:
        """Fire the events after an epoch; the state's time is already after it, `before` is still in it."""
        state = self._decide_by_training(self._fire(Event.EPOCH_END, state), before, TimeUnit.EPOCH)
        return self._finished(Event.EPOCH_END, state, before)

    def _finished(self, event: Event, state: State, before: Timestamp) -> State:
        """Evaluate after a batch or epoch, whose event has been fired, and fire the events that follow."""
        state = self._evaluate(event, state, before)
        is_batch = event is Event.BATCH_END
        state = self._fire(Event.BATCH_CHECKPOINT if is_batch else Event.EPOCH_CHECKPOINT, state)
        if is_batch and state.timestamp.epoch != before.epoch:
            duration = state.timestamp.run.duration
            if not self._is_over(state) or duration is None or duration.unit is TimeUnit.EPOCH:
                # As in an epoch of unknown length, where this event precedes the discovery that it is exhausted.
                state = self._fire(Event.BEFORE_DATALOADER, state)
            return self._end_epoch(state, before)
        return state


def _is_due(interval: Any, event: Event, before: Timestamp, now: Timestamp) -> bool:
    """Return whether an evaluation is due at an event; epochs are counted at their end."""
    if event is Event.FIT_END:
        return True
    if not isinstance(interval, Time):
        # Called once for each batch, and once more if the end of the epoch was found only afterwards.
        return (event is Event.BATCH_END or before.batch == now.batch) and has_passed(interval, before, now)
    unit = interval.unit
    if event is Event.EPOCH_END:
        # Fractions of the run, too, because in epochs of unknown length they change only here.
        is_counted_here = unit in (TimeUnit.EPOCH, TimeUnit.DURATION)
    else:
        is_counted_here = unit is not TimeUnit.EPOCH
    return is_counted_here and has_passed(interval, before, now)


def _period_of(step: Step, metric: str) -> Time:
    """Return the period over which a step measures a metric: by default an epoch."""
    period, algorithms = Time(1, TimeUnit.EPOCH), [*step.algorithms]
    for algorithm in algorithms:
        algorithms += algorithm.parts
        if metric in algorithm.reported:
            period = Time.of(algorithm.config.get("reset") or period)
    return period


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as numbers; reading them waits for the device."""
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in metrics.items()}
