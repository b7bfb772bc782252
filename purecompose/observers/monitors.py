"""Monitors: functions `(state) -> dict` that add numbers of the run and its layers, or samples, to the records."""

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from purecompose._support.specs import check_whole, is_number, shown, suggests_keywords
from purecompose.core.state import State
from purecompose.observers.progress import Pace, Stopwatch
from purecompose.observers.recorder import Due, Image, Monitor, batch_before
from purecompose.optim.by_pattern import ByPattern
from purecompose.schedule import Hparam, Product, Schedule, collect, resolve
from purecompose.surgery.weights import to_module
from purecompose.time import TimeLike, Timestamp
from purecompose.time.event import Event


try:
    import resource
except ImportError:  # Windows
    resource = None


def learning_rate(*names: str) -> Monitor:
    """Return a monitor of the optimizer's settings, as the batch used them; by default `lr`.

    A setting appears under its name, or under `name/pattern`, such as `lr/*.bias`, for a parameter group. Numbers,
    hparams, schedules and products of them are reported as numbers. A schedule is evaluated at the time before the
    batch, which is the value that the batch was trained with. Settings that the optimizer does not have are left out.

    Args:
        names: Names of settings, such as `"lr", "momentum"`.

    Raises:
        TypeError: A name is not a string.

    Example:
        >>> from purecompose import losses, optim, schedule
        >>> optimizer = optim.sgd(0.5 * schedule.linear(), groups={"bias": {"lr": 0.25}})
        >>> state = State.create(torch.nn.Linear(1, 1), loss=losses.mse, optimizer=optimizer, duration="4ba")
        >>> learning_rate()(state.replace(timestamp=state.timestamp.advance_by(3)))
        {'lr': 0.25, 'lr/bias': 0.25}
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"learning_rate: expected names of settings, such as 'momentum', got {shown(name)}")
    return _Settings(names or ("lr",))


def memory() -> Monitor:
    """Return a monitor of memory in bytes, of the state's GPU or otherwise of the process.

    On a GPU it reports `memory/allocated`, `memory/reserved` and `memory/peak` (the most that was allocated), as
    counted by torch's allocator, without waiting for the device. Elsewhere it reports `memory/resident` and
    `memory/peak`, if the system provides them.

    Example:
        >>> from purecompose import losses, optim
        >>> state = State.create(torch.nn.Linear(1, 1), loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> found = memory()(state)
        >>> all(value > 0 for value in found.values())
        True
    """
    return _memory


@suggests_keywords
def speed(window: int = 100) -> Monitor:
    """Return a monitor of the rates over the last batches and of the run's remaining time.

    It reports `speed/batches` and, if the run counts them, `speed/samples` and `speed/tokens`, per second of training
    without evaluations, for each member of a population. `time/left` is in seconds and includes evaluations, at their
    share so far, if the run has a duration. There are no values before the second batch, because the first one may
    compile. Times are those of the host, from which a GPU lags.

    Args:
        window: Number of batches over which the rates are measured.

    Raises:
        TypeError, ValueError: The window is not an int, or below 1.

    Example::

        Records("run.jsonl", monitors=[speed(window=50)])
    """
    return _Speed(check_whole(window, "speed: window", 1))


class _Settings:
    """The monitor of `learning_rate`, which observes the run to know the time before each batch."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._before: Timestamp | None = None
        self._now: Timestamp | None = None

    def observe(self, event: Event, state: State) -> None:
        if event is Event.FIT_START:
            self._before = self._now = None
        if not event.is_eval:
            if self._now is not None and state.timestamp.batch != self._now.batch:
                self._before = self._now
            self._now = state.timestamp

    def __call__(self, state: State) -> dict[str, float | Tensor]:
        used = self._before
        if used is None or used.batch != state.timestamp.batch - 1:
            used = batch_before(state.timestamp)
        return {name: _value(setting, state, used) for name, setting in _settings(state.optimizer, self._names)}


def _settings(optimizer: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the named scalars of an optimizer and of its groups; of `by_pattern`, those of all its optimizers."""
    if isinstance(optimizer, ByPattern):
        yield from _settings(optimizer.rest, names)
        for pattern, own in optimizer.groups:
            yield from ((f"{name}/{pattern}", value) for name, value in _settings(own, names))
        return
    fields = {field.name for field in dataclasses.fields(optimizer)} if dataclasses.is_dataclass(optimizer) else ()
    for name in names:
        if name in fields and _is_scalar(value := getattr(optimizer, name)):
            yield name, value
    for pattern, options in getattr(optimizer, "groups", ()):
        for name, value in options:
            if name in names and _is_scalar(value):
                yield f"{name}/{pattern}", value


def _is_scalar(value: Any) -> bool:
    return is_number(value) or isinstance(value, (Hparam, Schedule, Product))


def _value(setting: Any, state: State, timestamp: Timestamp) -> float | Tensor:
    # Reading the hparams of a compiled step's state copies them, so they are read only if needed.
    hparams = state.hparams if collect(setting, Hparam) else {}
    return resolve(setting, hparams=hparams, scheduled=lambda schedule: schedule(timestamp))


def _memory(state: State) -> dict[str, float]:
    device = state.device
    if device.type == "cuda":
        return {
            "memory/allocated": torch.cuda.memory_allocated(device),
            "memory/reserved": torch.cuda.memory_reserved(device),
            "memory/peak": torch.cuda.max_memory_allocated(device),
        }
    found = {}
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:  # Linux only
        found["memory/resident"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resource is not None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        # The system counts the two separately, so its peak may be a little below the current value.
        found["memory/peak"] = max(peak, found.get("memory/resident", 0))
    return found


class _Speed:
    """The monitor of `speed`, with its own stopwatch."""

    def __init__(self, window: int) -> None:
        self._stopwatch = Stopwatch()
        self._pace = Pace(self._stopwatch, window + 1)
        self._batch = -1

    def observe(self, event: Event, state: State) -> None:
        self._stopwatch(event, state)
        if event is Event.FIT_START:
            self._pace.clear()
            self._batch = -1
        # Two recorders that share a monitor call it twice for each event.
        if event is Event.BATCH_END and state.timestamp.batch != self._batch:
            self._batch = state.timestamp.batch
            self._pace.read(state.timestamp)

    def __call__(self, state: State) -> dict[str, float]:
        num_members = len(state.key) if state.key.ndim > 1 else 1
        found = {"speed/batches": self._pace.per_second("batch"), "time/left": self._pace.seconds_left()}
        for name, counter in (("speed/samples", "sample"), ("speed/tokens", "token")):
            rate = self._pace.per_second(counter)
            found[name] = None if rate is None else rate * num_members
        return {name: value for name, value in found.items() if value is not None}


def updates() -> Monitor:
    """Return a monitor of the change of each parameter since the last record: `update/NAME`, `update_ratio/NAME`.

    `update/0.weight` is the norm of the difference, `update_ratio/0.weight` that norm divided by the earlier norm of
    the parameter, or 0 if that was 0. There are no values in the first record, nor for a parameter whose shape changed.
    A population has a value for each member. The monitor keeps a copy of the parameters.

    Example:
        >>> from purecompose import losses, optim
        >>> state = State.create(torch.nn.Linear(1, 1, bias=False), loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> monitor, one = updates(), state.replace(params={"weight": torch.tensor([[2.0]])})
        >>> monitor(one), monitor(one.replace(params={"weight": torch.tensor([[3.0]])}))
        ({}, {'update/weight': tensor(1.), 'update_ratio/weight': tensor(0.5000)})
    """
    return _Updates()


class _Updates:
    """The monitor of `updates`, with the parameters of the last record."""

    def __init__(self) -> None:
        self._before: Mapping[str, Tensor] = {}

    def __call__(self, state: State) -> dict[str, Tensor]:
        before, self._before = self._before, state.params
        num_dims = state.key.ndim - 1  # the members of a population come first
        found = {}
        for name, param in state.params.items():
            if name in before and before[name].shape == param.shape and param.is_floating_point():
                update, size = (_norm(value, num_dims) for value in (param - before[name], before[name]))
                found[f"update/{name}"] = update
                found[f"update_ratio/{name}"] = torch.where(size > 0, update / torch.where(size > 0, size, 1), 0)
        return found


def _norm(value: Tensor, num_dims: int) -> Tensor:
    return value.detach().reshape(*value.shape[:num_dims], -1).float().norm(dim=-1)


_GAP = 2
"""Number of pixels between the images of a grid."""


def image_samples(
    make: Callable[[nn.Module], Tensor], *, every: TimeLike | int = "1ep", name: str = "samples", num_columns: int = 8
) -> Monitor:
    """Return a monitor that adds a grid of images generated by the network to the records.

    `Records` writes them as PNG files, the recorders of tracking services log them as images. `make` is called without
    gradients, with torch's generator seeded by the number of batches, and restored afterwards.

    Args:
        make: Function `(net) -> images`, called with the network in evaluation mode with copies of the weights. Returns
            images (N, C, H, W) with C 1 or 3, uint8, or floating with values in [0, 1] (values outside are clipped).
        every: Interval between samples: "1ep", "1000ba", ... They are made only at batches that have a record.
        name: Name in the records.
        num_columns: Number of images in a row of the grid.

    Raises:
        TypeError, ValueError: An argument has the wrong kind; when called: `make` returned something else, or the state
            is a population's.

    Example:
        >>> from purecompose import losses, optim
        >>> state = State.create(nn.Linear(2, 16), loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> monitor = image_samples(lambda net: net(torch.ones(10, 2)).reshape(10, 1, 4, 4))
        >>> monitor(state.replace(timestamp=state.timestamp.advance().advance_epoch()))["samples"].pixels.shape
        torch.Size([10, 46, 3])
    """
    num_columns = check_whole(num_columns, "image_samples: num_columns", 1)

    def values(made: Any) -> dict[str, Image]:
        return {name: Image(_grid(_images(made), num_columns))}

    return _Samples("image_samples", make, values, every)


def text_samples(
    make: Callable[[nn.Module], str | Iterable[str]], *, every: TimeLike | int = "1ep", name: str = "samples"
) -> Monitor:
    """Return a monitor that adds texts generated by the network, such as continuations of prompts, to the records.

    `Records` writes them as text files, the recorders of tracking services log them as texts; see `image_samples`.

    Args:
        make: Function `(net) -> texts`, called with the network in evaluation mode with copies of the weights. Returns
            a str, which is recorded under `name`, or several, under `name/0`, `name/1`, ...
        every: Interval between samples: "1ep", "1000ba", ... They are made only at batches that have a record.
        name: Name in the records.

    Raises:
        TypeError: An argument has the wrong kind; when called: `make` returned something else.
        ValueError: When called: the state is a population's.

    Example:
        >>> from purecompose import losses, optim
        >>> state = State.create(nn.Linear(2, 3), loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> monitor = text_samples(lambda net: ["abc"[i] for i in net(torch.zeros(2, 2)).argmax(1) * 0])
        >>> monitor(state.replace(timestamp=state.timestamp.advance().advance_epoch()))
        {'samples/0': 'a', 'samples/1': 'a'}
    """

    def values(made: Any) -> dict[str, str]:
        if isinstance(made, str):
            return {name: made}
        texts = list(made) if isinstance(made, Iterable) else [made]
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"text_samples: expected make(net) to return a str or several, got {shown(made)}")
        return {f"{name}/{i}": text for i, text in enumerate(texts)}

    return _Samples("text_samples", make, values, every)


class _Samples:
    """A monitor that is due less often than the recorder that calls it."""

    def __init__(
        self, where: str, make: Callable[[nn.Module], Any], values: Callable[[Any], Mapping[str, Any]], every: Any
    ) -> None:
        self._make, self._values, self._due = make, values, Due(every, f"{where}: every")

    def observe(self, event: Event, state: State) -> None:
        if event is Event.FIT_START:
            self._due.start(state.timestamp)

    def __call__(self, state: State) -> Mapping[str, Any]:
        if not self._due(state.timestamp):
            return {}
        net = to_module(state).eval()
        gpus = [state.device] if state.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=gpus):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu.index] for gpu in gpus)):
                generator.manual_seed(state.timestamp.batch)
            return self._values(self._make(net))


def _images(made: Any) -> Tensor:
    """Return images as (N, 3, H, W), uint8, on the CPU."""
    if not isinstance(made, Tensor) or not (made.dtype is torch.uint8 or made.is_floating_point()):
        raise TypeError(f"image_samples: expected make(net) to return a floating or uint8 tensor, got {shown(made)}")
    if made.ndim != 4 or made.shape[1] not in (1, 3) or not made.numel():
        raise ValueError(
            f"image_samples: expected make(net) to return images (N, C, H, W) with 1 or 3 channels, got the shape "
            f"{tuple(made.shape)}"
        )
    if made.is_floating_point():
        made = (made.float().nan_to_num() * 255).round().clamp(0, 255).to(torch.uint8)
    return made.expand(-1, 3, -1, -1).cpu()


def _grid(images: Tensor, num_columns: int) -> Tensor:
    """Arrange (N, 3, H, W) as (height, width, 3), row by row, with black gaps."""
    num_columns = min(num_columns, len(images))
    num_rows = math.ceil(len(images) / num_columns)
    height, width = images.shape[2] + _GAP, images.shape[3] + _GAP
    cells = images.new_zeros(num_rows * num_columns, 3, height, width)
    cells[: len(images), :, :-_GAP, :-_GAP] = images
    grid = cells.reshape(num_rows, num_columns, 3, height, width).permute(0, 3, 1, 4, 2)
    return grid.reshape(num_rows * height, num_columns * width, 3)[:-_GAP, :-_GAP].contiguous()
