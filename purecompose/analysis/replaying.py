"""`replay`: the state of a run at any batch, computed again from the nearest checkpoint before it."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.checks import shown
from purecompose._support.shards import whole
from purecompose.analysis.recorded import Loaded, RecordedRun
from purecompose.core.state import State
from purecompose.data.loaders import StateStream, epoch_batches
from purecompose.errors import MismatchError
from purecompose.run.evaluation import Observer
from purecompose.run.outer import Run
from purecompose.run.saving.leaves import leaves_of
from purecompose.run.start import evaluation_step
from purecompose.time import RunLength, Time, TimeLike, TimeUnit
from purecompose.time.event import Event
from purecompose.time.units import named_time


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a state or a batch with its floating tensors in another dtype.

    A state then computes without autocast, and with losses in float64 if the dtype is. Its named scalars keep their
    dtype, float32.

    Args:
        value: A state or a batch.
        dtype: A floating dtype.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if not isinstance(value, State):
        return batches.map_tensors(cast, value)
    loss_dtype = torch.float64 if dtype is torch.float64 else value.context.loss_dtype
    converted = tree.map(lambda leaf: cast(leaf) if isinstance(leaf, Tensor) else leaf, value)
    return converted.replace(hparams=value.hparams, precision="fp32", loss_dtype=loss_dtype)


class MaxDifference(NamedTuple):
    """The largest difference of two states."""

    leaf: str
    """The leaf with the largest relative difference, such as `params['0.weight']`; empty if all values agree."""
    relative: float
    """The largest difference in it, divided by its largest magnitude; infinite if one of two values is not finite, or
    only one state has the leaf. NaNs in the same place count as equal."""
    absolute: float
    """The largest difference in it."""

    def __str__(self) -> str:
        return f"{self.relative:.2g} in {self.leaf}" if self.leaf else "none"


def max_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> MaxDifference:
    """Return the largest difference of floating tensors by name, relative to the magnitudes in the second mapping."""
    largest = MaxDifference("", 0.0, 0.0)
    for name in dict.fromkeys((*theirs, *ours)):
        if not all(one[name].is_floating_point() for one in (ours, theirs) if name in one):
            continue  # keys and counters have no magnitude
        found = MaxDifference(name, math.inf, math.inf)
        if name in ours and name in theirs and ours[name].shape == theirs[name].shape:
            found = _difference_of(name, *(whole(one).detach().cpu() for one in (ours[name], theirs[name])))
        if found.relative > largest.relative:
            largest = found
    return largest


def differing(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> Iterator[str]:
    """Yield a description of each leaf that differs, in the order of the first mapping.

    Args:
        ours: Tensors by name.
        theirs: The others.
        tolerance: See `tree.differences`.
    """
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours or name not in theirs:
            yield f"{name}: only in {'a' if name in ours else 'b'}"
            continue
        for found in tree.differences(ours[name], theirs[name], tolerance=tolerance):
            yield f"{name}{found}"


def _difference_of(name: str, ours: Tensor, theirs: Tensor) -> MaxDifference:
    ours, theirs = ours.double(), theirs.double()
    agree = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(agree.all()):
        return MaxDifference(name, 0.0, 0.0)
    absolute = float((ours - theirs).abs()[~agree].nan_to_num(math.inf).max())
    magnitudes = theirs.abs()
    is_finite = magnitudes.isfinite()
    scale = float(magnitudes[is_finite].max()) if bool(is_finite.any()) else 0.0
    return MaxDifference(name, absolute / scale if scale else math.inf, absolute)


@dataclass(frozen=True)
class Replay:
    """The result of `replay`."""

    state: State
    """The state at the batch."""
    checkpoint: Path
    """The checkpoint from which it was computed."""
    num_batches: int
    """Number of batches that were trained on again."""
    difference: MaxDifference | None = None
    """The largest difference from the run's state, for a replay in another precision or on another device."""
    is_strict: bool = True
    """False for a replay with `RecordedRun(strict=False)`, which may have other bits."""

    def __str__(self) -> str:
        now = self.state.timestamp
        many = "es" * (self.num_batches != 1)
        text = f"batch {now.batch} (epoch {now.epoch}), {self.num_batches} batch{many} after {self.checkpoint.name}"
        if self.difference is not None:
            return f"{text}: not the bits of the run; largest relative difference: {self.difference}"
        return f"{text}: {'' if self.is_strict else 'with strict=False, perhaps not '}the bits of the run"


def replay(
    run: RecordedRun,
    at: TimeLike | int,
    *,
    observers: Observer | Iterable[Observer] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Replay:
    """Return the state of a run at a batch, bit for bit, from the nearest checkpoint before it.

    Losses are compared with the run's records, where it has them. Nothing in the run's folder changes.

    Args:
        run: The run.
        at: The point of the run: a number of batches, or a time such as "1234ba", "3ep" or "0.5dur". The state is the
            first one there, between steps.
        observers: Functions `(event, state) -> None`, called as in `fit`, from the checkpoint on. A method
            `see_batch(state, batch)` is called before each step.
        dtype: A floating dtype, usually `torch.float64`, to which the state at the checkpoint and the batches are
            converted. The step then runs without autocast.
        device: The device on which to replay. With a `dtype` or `device` the step runs uncompiled.

    Returns:
        The state; with a `dtype` or `device`, also the difference from the run's own state.

    Raises:
        ValueError: `at` is before the first checkpoint or after the last one.
        MismatchError: The data or code differ, see `RecordedRun`; or a loss is not the recorded one.
        TypeError: `run` is not a `RecordedRun`, or `dtype` is not a floating dtype.

    Example::

        run = RecordedRun("runs/first", step, state, data)
        replay(run, at="1234ba").state
    """
    if not isinstance(run, RecordedRun):
        raise TypeError(f"replay: expected a RecordedRun(path, step, state, data), got {shown(run)}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"replay: dtype: expected a floating dtype such as torch.float64, got {shown(dtype)}")
    observers = (observers,) if callable(observers) else tuple(observers)
    at = point(at, "replay: at")
    if dtype is None and device is None:
        return _replayed(run, at, observers, None)

    def converted(value: Any) -> Any:
        value = value if dtype is None else as_dtype(value, dtype)
        return value if device is None or not isinstance(value, State) else value.to(device)

    exact, other = _replayed(run, at, (), None), _replayed(run, at, observers, converted)
    largest = max_difference(*(leaves_of(one.state).tensors for one in (other, exact)))
    return Replay(other.state, other.checkpoint, other.num_batches, largest, run.strict)


def point(at: Any, where: str) -> Time:
    """Return a point of a run from a number of batches or a time.

    Raises:
        TypeError, ValueError: It is not one, is negative, or is in seconds.
    """
    given = int(at) if isinstance(at, str) and at.isdecimal() else at
    time = named_time(given, where, TimeUnit.BATCH)
    if time.unit is TimeUnit.SECOND or time.value < 0:
        raise ValueError(f"{where}={at!r}: expected a point of the run: 1234, '1234ba', '3ep', '0.5dur'")
    return time


def states_from(
    run: RecordedRun,
    loaded: Loaded,
    length: RunLength,
    observers: tuple[Any, ...] = (),
    convert: Callable[[Any], Any] | None = None,
) -> Generator[State]:
    """Yield the state of a checkpoint, and those after each batch from there on, as in the run.

    Args:
        run: The run.
        loaded: The checkpoint.
        length: The run's length.
        observers: See `replay`.
        convert: Function of states and batches for another precision or device; losses are then not compared.
    """
    state, step, data = loaded.state, run.step, run.data
    state = state.replace(timestamp=state.timestamp.replace(run=length))
    if convert is None:
        observers = (_Recorded(run), *observers)
    else:
        state, step, data = convert(state), run.plain_step, _converted(data, loaded.position, convert)
    yield state
    decides = bool(run.stop or run.adjust)
    loop = Run(
        step,
        evaluation_step(step),
        data,
        run.evaluate if decides else (),  # pyright: ignore[reportArgumentType]
        observers,
        run.stop,  # pyright: ignore[reportArgumentType]
        run.adjust,  # pyright: ignore[reportArgumentType]
        is_adaptive=run.microbatches is not None,
        memory=loaded.memory,
        metrics=loaded.metrics,
        position=loaded.position,
    )
    yield from loop.states(state)


def _replayed(run: RecordedRun, at: Time, observers: tuple[Any, ...], convert: Callable[[Any], Any] | None) -> Replay:
    found, length = run.before(at)
    states = states_from(run, run.load(found), length, observers, convert)
    with contextlib.closing(states):
        for state in states:
            if state.timestamp.reached(at):
                num_batches = state.timestamp.batch - found.index.batch
                return Replay(state, found.path, num_batches, is_strict=run.strict)
    raise MismatchError(f"{run.path}: the replay from {found.path.name} ended before {at}", [])


class _Recorded:
    """An observer that compares losses with those in the run's records."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run

    def __call__(self, event: Event, state: State) -> None:
        batch = state.timestamp.batch
        if event is not Event.BATCH_END or batch not in self._run.losses or state.loss is None:
            return
        then, now = self._run.losses[batch], state.loss.tolist()
        if self._run.strict and repr(then) != repr(now):
            line = f"loss of batch {batch}: {then} in the records, {now} here"
            raise MismatchError(
                f"{self._run.path}: the replay is not the run: {line}. The step, the data or what they read from "
                "outside have changed in a way that the checkpoints do not know of",
                [line],
            )


def _converted(data: Any, position: Any, convert: Callable[[Any], Any]) -> Any:
    """Return the data with converted batches."""
    if isinstance(data, StateStream):
        return StateStream(lambda state: convert(data.batch(state)))
    return _Converted(data, position, convert)


class _Converted:
    """Data whose batches are converted, in the same order."""

    def __init__(self, data: Any, position: Any, convert: Callable[[Any], Any]) -> None:
        self._data, self._position, self._convert = data, position, convert

    def epoch(self, key: Tensor, epoch: int, start: int) -> Iterator[Any]:
        position, self._position = self._position, None
        return map(self._convert, epoch_batches(self._data, key.cpu(), epoch, start, position))
