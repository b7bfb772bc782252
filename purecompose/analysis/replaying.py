"""Recorded runs: the folder of one, opened for reading, and `replay`: its state at any batch, computed again from the
nearest checkpoint before it."""

import contextlib
import copy
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from purecompose._support.messages import is_remote, warn
from purecompose._support.specs import shown
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data.loaders import describe_data, differences as data_differences, own_order
from purecompose.data.position import position_holder
from purecompose.errors import CheckpointWarning, MismatchError
from purecompose.observers import read_records
from purecompose.records.layout import RECORDS
from purecompose.run.evaluation import Evaluator, Observer
from purecompose.run.fit import start_of_run
from purecompose.run.outer import Run, Settings
from purecompose.run.rules import Adjuster, Stopper, with_modes
from purecompose.run.saving.checkpoint import outside_of, restore_extra, restored
from purecompose.run.saving.comparison import describe, differences, environment, listed, unequal
from purecompose.run.saving.files import time_from_plain
from purecompose.run.saving.folder import CHECKPOINTS, Found, all_in
from purecompose.run.saving.leaves import POSITION
from purecompose.time import RunLength, Time, TimeLike, TimeUnit
from purecompose.time.event import Event, named_time
from purecompose.transforms.compilation import CompiledStep


@dataclass(frozen=True)
class Loaded:
    """A state of a run that was read from a checkpoint, and what the loop around it needs to go on."""

    state: State
    path: Path
    memory: Mapping[str, Any]
    metrics: Mapping[str, Any]
    position: Any
    """The position of the data, if they have one."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A recorded run: the folder with its checkpoints, and the step, state and data that made it.

    The state is all that training depends on besides the step and the data, and draws depend only on (key, batch,
    name), so the state at any batch can be computed from an earlier checkpoint. Nothing in the folder is changed.

    Args:
        path: The run's folder, or a folder of checkpoints. `Checkpoints(keep="log")` spreads them over the run.
        step: The step that trained it; compiled in the same way, as compiled code computes other bits.
        state: The state that was given to `fit`. Its structure and its run's length are used, not its values.
        data: The data that were given to `fit`; those with a `state_dict` as they were then, at their start.
        evaluate, stop, adjust, microbatches: As they were given to `fit`. Evaluations are repeated only if a rule for
            stopping or an adjuster reads them.
        extra: The objects that were given to `Checkpoints(extra=...)`; a replay restores them in place.
        strict: True to raise if the settings, the data, the versions or the device are not those of the run. Otherwise
            there is a warning, and bits may differ.

    Raises:
        TypeError, ValueError: An argument has the wrong type, or `path` is a URL.
        FileNotFoundError, CheckpointError: There is no checkpoint in the folder, or none can be read.

    Example::

        run = pc.analysis.RecordedRun("runs/first", step, state, data)
        pc.analysis.replay(run, at="1234ba").state
    """

    path: Path | str
    step: Step
    state: State = field(repr=False)
    data: Any = field(repr=False)
    evaluate: Evaluator | Sequence[Evaluator] | None = ()
    stop: Stopper | Sequence[Stopper] | None = ()
    adjust: Adjuster | Sequence[Adjuster] | None = ()
    microbatches: str | None = None
    extra: Any = field(default=None, repr=False)
    strict: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.step, Step) or not isinstance(self.state, State):
            came = f"{shown(self.step)}, {shown(self.state)}"
            raise TypeError(f"RecordedRun(path, step, state, data): expected a Step and a State, got {came}")
        reporters = (*_listed(self.evaluate), *self.step.algorithms)  # a rule may leave it to the metric what is better
        for name in ("evaluate", "stop", "adjust"):
            object.__setattr__(self, name, with_modes(_listed(getattr(self, name)), reporters))
        object.__setattr__(self, "checkpoints", checkpoints_in(self.path))
        object.__setattr__(self, "_origin", _origin_of(self.data))

    checkpoints: tuple[Found, ...] = field(init=False, repr=False)
    """The checkpoints in the folder, the oldest first; at least one."""
    _origin: Any = field(init=False, repr=False)
    """The position of the data at the start, for those that would continue after an earlier replay."""

    @property
    def plain_step(self) -> Step:
        """The step, not compiled."""
        return self.step.step if isinstance(self.step, CompiledStep) else self.step

    @cached_property
    def start(self) -> State:
        """The state from which the run started, with all memory."""
        # The length of a run in seconds is not in its checkpoints; each state is given that of its own checkpoint.
        last = self.checkpoints[-1].index
        duration = last.time["duration"] or f"{last.batch + 1}ba"
        rules = (*self.stop, *self.adjust)  # pyright: ignore
        return start_of_run(self.step, self.state, self.data, rules, duration)[0]

    @cached_property
    def losses(self) -> dict[int, Any]:
        """The losses in the run's records by batch, a list of them for a population; empty without records."""
        file = Path(self.path) / RECORDS
        records = read_records(file) if file.is_file() else []
        return {record["batch"]: record["loss"] for record in records if "loss" in record}

    def before(self, at: Time) -> tuple[Found, RunLength]:
        """Return the last checkpoint that is not after a time, and the run's length that was valid from it to there.

        Args:
            at: The time.

        Raises:
            ValueError: The time is before the first checkpoint or after the last one.
        """
        times = [time_from_plain(one.index.time) for one in self.checkpoints]
        earlier = [one for one, now in zip(self.checkpoints, times, strict=True) if not now.passed(at)]
        if not earlier:
            raise ValueError(
                f"{self.path} has no checkpoint before {at}: the first one is of {times[0].batch}ba; "
                'Checkpoints(keep="log") keeps some of the whole run, from its start'
            )
        # A run that was continued may have another length from there on, which is in the next checkpoint.
        later = next((now for now in times[len(earlier) - 1 :] if now.reached(at)), None)
        if later is None:
            raise ValueError(f"{self.path} is recorded up to batch {times[-1].batch}, its last checkpoint, not to {at}")
        return earlier[-1], later.run

    def load(self, found: Found) -> Loaded:
        """Return the state of a checkpoint.

        Raises:
            MismatchError: The data or settings differ from those of the checkpoint, and `strict` is true; or the state
                has another structure.
            ValueError: The data cannot be read again.
            DamagedError: Its files are not complete.
        """
        self._check(found)
        path, index = found.path, found.index
        like = self.step.fire(Event.BEFORE_LOAD, self.start)
        state = restored(path, index, like, self.step, ignore=["microbatches"] * (self.microbatches is not None))
        state = self.step.fire(Event.AFTER_LOAD, state)
        outside = outside_of(path, index)
        restore_extra(self.extra, path, outside)
        memory = {"has_begun": index.batch > 0, **index.memory}
        position = outside.get(POSITION) if memory["has_begun"] else self._origin
        return Loaded(state, path, memory, index.metrics, position)

    def _check(self, found: Found) -> None:
        """Raise if the data or the settings are not those of a checkpoint; warn if not `strict`."""
        index = found.index
        has_position = POSITION in index.memory or index.batch == 0
        if (reason := own_order(self.data, has_position=has_position)) is not None:
            raise ValueError(f"{self.path} cannot be replayed: {reason}")
        lines = data_differences(index.memory.get("data", {}), describe_data(self.data))
        length, here = index.time["batches_per_epoch"], self.start.timestamp.run.batches_per_epoch
        if length != here and None not in (length, here):
            lines.append(f"batches_per_epoch: {length} in the run, {here} here")
        if self.strict:
            lines += differences(index.description, describe(self.start, self.step))
            now = environment(self.start, self.step)
            both = [name for name in index.environment if name in now and name not in _NO_BITS]
            lines += unequal(index.environment, now, place="the run", among=both)
            if self.microbatches is not None:
                lines = [line for line in lines if not line.startswith("microbatches:")]
            if lines:
                raise MismatchError(listed(f"{found.path} is of another run", lines, _HINT), lines)
        elif lines:
            warn(listed(f"{found.path} is replayed with differences", lines), CheckpointWarning)


_NO_BITS = ("optree", "python")
"""Versions that do not affect bits."""
_HINT = (
    "replay it with what it was trained with; with RecordedRun(strict=False) these are warnings, and bits may differ"
)


def checkpoints_in(path: Path | str) -> tuple[Found, ...]:
    """Return the checkpoints in a run's folder, or a folder of checkpoints, the oldest first; raise without any."""
    if is_remote(path):
        raise ValueError(f"{path} is in remote storage: give the folder of `with purecompose.saving.mirror(url)`")
    folder = Path(path)
    folder = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    found, damaged = all_in(folder)
    if not found and damaged:
        raise next(iter(damaged.values()))
    if not found:
        raise FileNotFoundError(
            f"{path} has no checkpoints to begin from; train with fit(..., checkpoints=Checkpoints(folder, keep='log'))"
        )
    return tuple(reversed(found))


def _origin_of(data: Any) -> dict[str, Any] | None:
    """Return the present position of data that continue there each time they are iterated; `None` for others."""
    holder = position_holder(data)
    # Loaders, and streams of Hugging Face, begin again.
    if holder is None or isinstance(holder, DataLoader) or hasattr(holder, "_starting_state_dict"):
        return None
    return {"state": copy.deepcopy(holder.state_dict()), "is_over": False}


def _listed(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) else (given,)


@dataclass(frozen=True)
class Replay:
    """The result of `replay`."""

    state: State
    """The state at the batch."""
    checkpoint: Path
    """The checkpoint from which it was computed."""
    num_batches: int
    """Number of batches that were trained on again."""
    is_strict: bool = True
    """False for a replay with `RecordedRun(strict=False)`, which may have other bits."""

    def __str__(self) -> str:
        now = self.state.timestamp
        many = "es" * (self.num_batches != 1)
        text = f"batch {now.batch} (epoch {now.epoch}), {self.num_batches} batch{many} after {self.checkpoint.name}"
        return f"{text}: {'' if self.is_strict else 'with strict=False, perhaps not '}bit-identical to the run"


def replay(run: RecordedRun, at: TimeLike | int, *, observers: Observer | Iterable[Observer] = ()) -> Replay:
    """Return the state of a run at a batch, bit for bit, from the nearest checkpoint before it.

    Losses are compared with the run's records, where it has them. Nothing in the run's folder changes.

    Args:
        run: The run.
        at: The point of the run: a number of batches, or a time such as "1234ba", "3ep" or "0.5dur". The state is the
            first one there, between steps.
        observers: Functions `(event, state) -> None`, called as in `fit`, from the checkpoint on. A method
            `see_batch(state, batch)` is called before each step.

    Raises:
        ValueError: `at` is before the first checkpoint or after the last one.
        MismatchError: The data or settings differ, see `RecordedRun`; or a loss is not the recorded one.
        TypeError: `run` is not a `RecordedRun`.

    Example::

        run = RecordedRun("runs/first", step, state, data)
        replay(run, at="1234ba").state
    """
    if not isinstance(run, RecordedRun):
        raise TypeError(f"replay: expected a RecordedRun(path, step, state, data), got {shown(run)}")
    observers = (observers,) if callable(observers) else tuple(observers)
    at = point(at, "replay: at")
    found, length = run.before(at)
    with contextlib.closing(states_from(run, run.load(found), length, observers)) as states:
        for state in states:
            if state.timestamp.reached(at):
                return Replay(state, found.path, state.timestamp.batch - found.index.batch, is_strict=run.strict)
    raise MismatchError(f"{run.path}: the replay from {found.path.name} ended before {at}", [])


def point(at: Any, where: str) -> Time:
    """Return a point of a run from a number of batches or a time that is not in seconds."""
    given = int(at) if isinstance(at, str) and at.isdecimal() else at
    time = named_time(given, where, TimeUnit.BATCH)
    if time.unit is TimeUnit.SECOND or time.value < 0:
        raise ValueError(f"{where}={at!r}: expected a point of the run: 1234, '1234ba', '3ep', '0.5dur'")
    return time


def states_from(
    run: RecordedRun, loaded: Loaded, length: RunLength, observers: tuple[Any, ...] = ()
) -> Generator[State]:
    """Yield the state of a checkpoint, and those after each batch from there on, as in a run of this length."""
    state = loaded.state.replace(timestamp=loaded.state.timestamp.replace(run=length))
    yield state
    decides = bool(run.stop or run.adjust)
    loop = Run(
        run.step,
        run.data,
        Settings(
            run.evaluate if decides else (),  # pyright: ignore[reportArgumentType]
            (_compared_with_records(run), *observers),
            run.stop,  # pyright: ignore[reportArgumentType]
            run.adjust,  # pyright: ignore[reportArgumentType]
        ),
        is_adaptive=run.microbatches is not None,
        memory=loaded.memory,
        metrics=loaded.metrics,
        position=loaded.position,
    )
    yield from loop.states(state)


def _compared_with_records(run: RecordedRun) -> Observer:
    """Return an observer that compares losses with those in the run's records."""

    def compare(event: Event, state: State) -> None:
        batch = state.timestamp.batch
        if event is not Event.BATCH_END or batch not in run.losses or state.loss is None:
            return
        then, now = run.losses[batch], state.loss.tolist()
        if run.strict and repr(then) != repr(now):
            line = f"loss of batch {batch}: {then} in the records, {now} here"
            raise MismatchError(
                f"{run.path}: the replay is not the run: {line}. The step, the data or what they read has changed in "
                "a way that the checkpoints do not know of",
                [line],
            )

    return compare
