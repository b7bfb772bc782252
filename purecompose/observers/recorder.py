"""Numbers of a run: records in memory by `History`, and for a sink by `Recorder`.

They stay on the device until they are read in groups, so that no batch waits for them.
"""

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from purecompose._support import instead
from purecompose._support.messages import columns, fragment, warn
from purecompose._support.specs import check_number, check_whole, is_callable_with, is_number, shown
from purecompose.core.state import State
from purecompose.time import TimeLike, Timestamp, TimeUnit
from purecompose.time.event import Event
from purecompose.time.timestamp import checked_interval, has_passed


T = TypeVar("T")


Monitor: TypeAlias = Callable[[State], Mapping[str, Any]]
"""A function that returns values to add to a batch's record, by name: numbers, 0-d tensors, texts (`str`) and `Image`s.

It is called at BATCH_END, when a record is due. If it has a method `observe(event, state)`, that is called at every
event that the recorder sees, before the monitor itself: this is how `speed` knows when evaluation began.
"""

_MOST_UNWRITTEN = 10_000
"""Maximal number of records that wait to be written again after an error, such as a full disk."""
_MOST_UNREAD = 1000
"""Number of records at which their tensors are read from the device."""


@dataclass(frozen=True)
class Image:
    """An image in a record.

    Args:
        pixels: Red, green and blue values, (height, width, 3), uint8; kept on the CPU.

    Raises:
        TypeError, ValueError: The dtype or the shape is wrong.
    """

    pixels: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.pixels, Tensor) or self.pixels.dtype is not torch.uint8:
            raise TypeError(f"Image: expected a uint8 tensor (height, width, 3), got {shown(self.pixels)}")
        if self.pixels.ndim != 3 or self.pixels.shape[2] != 3:
            raise ValueError(f"Image: expected the shape (height, width, 3), got {tuple(self.pixels.shape)}")
        object.__setattr__(self, "pixels", self.pixels.detach().cpu())


class History:
    """An observer that collects one record for each batch and one for each evaluation.

    A record is a dict of plain numbers. Every record has `batch` and `epoch`, the numbers of completed batches and
    epochs. A batch's record adds `loss` and the 0-d metrics that the algorithms reported; an evaluation's record adds
    its metrics under the evaluator's label, such as `eval/accuracy`. For a population, these are lists with a number
    for each member.

    Metrics that are not single numbers are left out, with one warning each. Values stay on the device until they are
    read.

    Example:
        >>> from purecompose import compose, fit, loop_events, losses, optim
        >>> import torch
        >>> net = torch.nn.Linear(3, 2)
        >>> state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="2ep")
        >>> data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))]
        >>> history = History()
        >>> state = fit(compose(loop_events), state, data, observers=[history])
        >>> [sorted(record) for record in history.records]
        [['batch', 'epoch', 'loss'], ['batch', 'epoch', 'loss']]
        >>> history.series("loss")[0]
        [1, 2]
    """

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._unread = 0
        self._left_out: set[str] = set()

    def __call__(self, event: Event, state: State) -> None:
        """Add a record at BATCH_END and EVAL_END."""
        record = record_of(event, state, self._left_out)
        if record is None:
            return
        self._records.append(record)
        self._unread += 1
        if self._unread >= _MOST_UNREAD:
            self._read()

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far, in order of time; reading them waits for the device."""
        self._read()
        return [dict(record) for record in self._records]

    def __getattr__(self, name: str) -> Any:
        hint = instead(name)
        raise AttributeError(f"a history has no attribute {name!r}{hint and ';' + hint}", name=name)

    def __getitem__(self, name: Any) -> Any:
        raise TypeError(f"a history is not a mapping: history.series({name!r}) returns batches and values")

    def __repr__(self) -> str:
        last = ", ".join(f"{name}={value}" for name, _, value, *_ in self._table())
        batch = self._records[-1]["batch"] if self._records else 0
        return f"History({len(self._records):,} records, the last of batch {batch:,}{': ' * bool(last)}{last})"

    def _repr_html_(self) -> str:
        return fragment(columns(("", "records", "last", "lowest", "highest"), self._table()))

    def _table(self) -> list[tuple[str, ...]]:
        """Return a row for each quantity; of a population, the numbers of its members are taken together."""
        found: dict[str, list[Any]] = {}
        for record in self.records:
            for name, value in record.items():
                if name not in ("batch", "epoch"):
                    found.setdefault(name, []).append(value if isinstance(value, list) else [value])
        rows = []
        for name, values in found.items():
            every = [one for members in values for one in members if math.isfinite(one)] or [math.nan]
            last = " to ".join(f"{one:.4g}" for one in dict.fromkeys((min(values[-1]), max(values[-1]))))
            rows.append((name, f"{len(values):,}", last, f"{min(every):.4g}", f"{max(every):.4g}"))
        return rows

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return a quantity over the run: the batches at which it was recorded, and its values.

        Raises:
            KeyError: No record has that name; the message lists the existing names.
        """
        found = [record for record in self.records if name in record]
        if not found:
            known = sorted({key for record in self._records for key in record})
            raise KeyError(f"no record has {name!r}; there are {', '.join(known) or 'no records yet'}")
        return [record["batch"] for record in found], [record[name] for record in found]

    def _read(self) -> None:
        read(self._records[len(self._records) - self._unread :])
        self._unread = 0


class Sink(Protocol):
    """A destination of records. Only `write` is required.

    Three optional methods are called as well: `begin(batch)` when a run starts or continues, with the number of batches
    trained on so far (records of all later batches will follow, even if they have been written before); `sync()` before
    a checkpoint is written, to put on disk all that was written; and `close()` when the recorder is closed.
    """

    def write(self, records: list[dict[str, Any]], /) -> None:
        """Write some records, in order. After an `OSError` the recorder warns once, and passes them again later.

        Values are numbers (for a population, lists of them), and the texts and `Image`s of monitors.
        """
        ...


class Recorder:
    """An observer that passes one record for each batch that is due and one for each evaluation to a sink.

    Records have the form of `History`'s, with `time/sample`, `time/token` (if there are tokens), and the values of the
    monitors in those of batches.

    Values stay on the device until a group is passed on: when `group` records wait, or after `seconds`; at the end of
    evaluations, at EPOCH_CHECKPOINT and FIT_END; and when `flush` or `close` is called. If a sink raises `OSError`, as
    of a full disk, there is one warning, and the records are passed again with the next group.

    Args:
        sink: An object with `write(records)`; see `Sink`.
        every: Interval between the batches with a record: "10ba", "1ep", "4096sp", ...; a bare number means batches.
            Evaluations always have a record.
        monitors: One or several functions `(state) -> dict` that add values to the batches' records; see `Monitor`.
        group: Number of waiting records at which they are passed on.
        seconds: Seconds after which a waiting record is passed on, together with the next one.

    Raises:
        TypeError, ValueError: An argument has the wrong kind; the message names it.

    Example:
        >>> import torch
        >>> from purecompose import compose, fit, loop_events, losses, optim
        >>> class Print:
        ...     def write(self, records):
        ...         for record in records:
        ...             print(record["batch"], record["time/sample"], sorted(record)[-1])
        >>> state = State.create(
        ...     torch.nn.Linear(3, 2), loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="3ep"
        ... )
        >>> data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))]
        >>> state = fit(compose(loop_events), state, data, observers=Recorder(Print(), every="2ba"))
        2 8 time/sample
    """

    def __init__(
        self,
        sink: Sink,
        *,
        every: TimeLike | int = "1ba",
        monitors: Monitor | Iterable[Monitor] = (),
        group: int = 100,
        seconds: float = 10.0,
    ) -> None:
        where = type(self).__name__
        if not callable(getattr(sink, "write", None)):
            raise TypeError(f"{where}: expected a sink, an object with write(records), got {shown(sink)}")
        self.monitors: tuple[Monitor, ...] = (monitors,) if callable(monitors) else tuple(monitors)
        for monitor in self.monitors:
            if not callable(monitor) or not is_callable_with(monitor, 1):
                raise TypeError(f"{where}: monitors: expected functions (state) -> dict, got {shown(monitor)}")
        self._watching = [monitor.observe for monitor in self.monitors if hasattr(monitor, "observe")]  # pyright: ignore[reportFunctionMemberAccess]
        self._due = Due(every, f"{where}: every")
        group = check_whole(group, f"{where}: group", 1)
        self._outbox = _Outbox(sink, where, group, check_number(seconds, f"{where}: seconds", 0))
        self._left_out: set[str] = set()
        self._began_at: int | None = None
        self._has_batches = False
        # The outbox must not refer to the recorder, because the finalizer would then keep it alive.
        self._finalizer = weakref.finalize(self, _last_words, self._outbox)

    def __call__(self, event: Event, state: State) -> None:
        """Add a record at BATCH_END, if one is due, and at EVAL_END."""
        if event is Event.FIT_START or self._began_at is None:
            self._begin(event, state)
        for observe in self._watching:
            observe(event, state)
        is_batch_over = event is Event.BATCH_END
        self._has_batches |= is_batch_over
        if event is Event.EVAL_END or (is_batch_over and self._due(state.timestamp)):
            self._outbox.add(self._record(event, state))
        if event in _FLUSHES:
            self._outbox.flush()

    @property
    def num_unwritten(self) -> int:
        """Number of records that the sink could not write; the newest 10,000 of them will be passed to it again."""
        return self._outbox.num_unwritten

    @property
    def newest(self) -> Mapping[str, Any]:
        """The newest number of each name in the records that have been passed to the sink, written or not."""
        return self._outbox.newest

    def flush(self) -> None:
        """Pass all waiting records to the sink, and put them on disk; this waits for the device.

        `fit` calls it before a checkpoint is written, so that no checkpoint is newer than its records.
        """
        self._outbox.flush()
        self._outbox.sync()

    def close(self) -> None:
        """Pass all waiting records to the sink, put them on disk and close it; another run opens it again."""
        self._began_at = None
        self._outbox.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, event: Event, state: State) -> None:
        # In a manual loop the first event may be the end of the first batch.
        now = batch_before(state.timestamp) if event is Event.BATCH_END else state.timestamp
        self._due.start(now)
        # An evaluation before FIT_START belongs to the run that starts.
        if self._began_at != now.batch or self._has_batches:
            self._outbox.begin(now.batch)
        self._began_at, self._has_batches = now.batch, False

    def _record(self, event: Event, state: State) -> dict[str, Any]:
        found = record_of(event, state, self._left_out) or {}
        now = state.timestamp
        counters = {"batch": now.batch, "epoch": now.epoch, "time/sample": now.sample}
        if now.token:
            counters["time/token"] = now.token
        if event is Event.BATCH_END:
            for monitor in self.monitors:
                found.update(_checked(monitor(state), monitor, state))
        return {**counters, **found, **counters}


class _Outbox:
    """The records that wait for a sink."""

    def __init__(self, sink: Sink, owner: str, group: int, seconds: float) -> None:
        self._sink, self._owner = sink, owner
        self._pile = Pile[dict[str, Any]](group, seconds)
        self._unwritten: list[dict[str, Any]] = []
        self._num_dropped = 0
        self._has_warned = False
        self.newest: dict[str, Any] = {}

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten) + self._num_dropped

    def add(self, record: dict[str, Any]) -> None:
        if self._pile.add(record):
            self.flush()

    def begin(self, batch: int) -> None:
        self.flush()
        if batch < self.newest.get("batch", 0):
            self.newest.clear()
        self._call("begin", batch)

    def sync(self) -> None:
        self._call("sync")

    def flush(self) -> None:
        fresh = self._pile.take()
        read(fresh)
        for record in fresh:
            self.newest.update({name: value for name, value in record.items() if not isinstance(value, (str, Image))})
        waiting = [*self._unwritten, *fresh]
        if waiting:
            self._unwritten = [] if self._call("write", waiting) else waiting[-_MOST_UNWRITTEN:]
            self._num_dropped += len(waiting) - len(self._unwritten) if self._unwritten else 0

    def close(self) -> None:
        self.flush()
        self.sync()
        self._call("close")

    def _call(self, name: str, *arguments: Any) -> bool:
        """Call a method of the sink, if it exists; return whether that succeeded."""
        try:
            getattr(self._sink, name, lambda *_: None)(*arguments)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"{self._owner}: records cannot be written: {error}. Training continues, and they are written with "
                    "the next group. This warning is shown once",
                    RuntimeWarning,
                )
            return False
        return True


def _last_words(outbox: _Outbox) -> None:
    # After a failure of the device no tensor can be read; its exception is being raised already.
    with contextlib.suppress(RuntimeError):
        outbox.close()


def _checked(values: Mapping[str, Any], monitor: Monitor, state: State) -> dict[str, Any]:
    """Return a monitor's values; tensors are copied, since a later step may overwrite them."""
    who = getattr(monitor, "__name__", type(monitor).__name__)
    if not isinstance(values, Mapping):
        raise TypeError(f"monitor {who}: expected a dict of numbers by name, got {shown(values)}")
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.ndim <= state.key.ndim - 1:
            checked[name] = value.detach().clone()
        elif isinstance(value, (str, Image)):
            checked[name] = value
        elif is_number(value):
            checked[name] = value if type(value) in (int, float) else float(value)
        else:
            raise TypeError(
                f"monitor {who}: {name!r}: expected a number, a 0-d tensor, a str or an Image, got {shown(value)}; "
                "leave out numbers that are not known yet"
            )
    return checked


# Not BATCH_CHECKPOINT, which fires after every batch. EVAL_AFTER_ALL of the last evaluation comes after FIT_END.
_FLUSHES = frozenset({Event.EVAL_AFTER_ALL, Event.EPOCH_CHECKPOINT, Event.FIT_END})


class Due:
    """A predicate for the batches in which a multiple of an interval is passed.

    Epochs count at their last batch, or at the next batch if their length is not known.
    """

    def __init__(self, every: TimeLike | int, where: str) -> None:
        self._interval = checked_interval(every, where, TimeUnit.BATCH)
        self._before: Timestamp | None = None

    def start(self, timestamp: Timestamp) -> None:
        """Count from this point on."""
        self._before = timestamp

    def __call__(self, timestamp: Timestamp) -> bool:
        """Return whether a multiple was passed since the last call, given the time after a batch."""
        before, self._before = self._before or batch_before(timestamp), timestamp
        return has_passed(self._interval, before, timestamp)


def batch_before(timestamp: Timestamp) -> Timestamp:
    """Estimate the time before a batch in loops that call an observer only at BATCH_END."""
    if timestamp.batch <= 1:
        return Timestamp(run=timestamp.run)
    return timestamp.replace(batch=timestamp.batch - 1)


class Pile(Generic[T]):
    """A queue of items to process together, once there are `most` or one follows `seconds` after the first."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._waiting: list[T] = []
        self._since = 0.0

    def add(self, thing: T) -> bool:
        """Add an item, and return whether it is time to take all of them."""
        now = time.monotonic()
        if not self._waiting:
            self._since = now
        self._waiting.append(thing)
        return len(self._waiting) >= self._most or now - self._since >= self._seconds

    def take(self) -> list[T]:
        """Return the waiting items in order, and empty the queue."""
        waiting, self._waiting = self._waiting, []
        return waiting


def record_of(event: Event, state: State, left_out: set[str]) -> dict[str, Any] | None:
    """Return the record of a BATCH_END or EVAL_END, with tensors for numbers; `None` at other events.

    Metrics that are not single numbers are warned of, and added to `left_out`.
    """
    if event is Event.BATCH_END:
        values = state.metrics if state.loss is None else {"loss": state.loss, **state.metrics}
    elif event is Event.EVAL_END:
        values = state.metrics
    else:
        return None
    num_dims = state.key.ndim - 1  # the members of a population
    for name, value in values.items():
        if value.ndim != num_dims and name not in left_out:
            left_out.add(name)
            warn(
                f"metric {name!r} is left out of the records: expected a single number, got a tensor of shape "
                f"{tuple(value.shape[num_dims:])}; report a mean"
            )
    # Copies, because a step that donates its state overwrites the loss.
    single = {name: value.detach().clone() for name, value in values.items() if value.ndim == num_dims}
    counters = {"batch": state.timestamp.batch, "epoch": state.timestamp.epoch}
    return {**counters, **single, **counters}  # again, so that no metric replaces one


def read(records: Iterable[dict[str, Any]]) -> None:
    """Replace tensors in records by numbers or lists, with one transfer for each dtype, device and shape."""
    groups: dict[Any, list[tuple[dict[str, Any], str, Tensor]]] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, Tensor):
                groups.setdefault((value.dtype, value.device, value.shape), []).append((record, name, value))
    for entries in groups.values():
        numbers = torch.stack([value for _, _, value in entries]).tolist()
        for (record, name, _), number in zip(entries, numbers, strict=True):
            record[name] = number
