"""Readers: load samples in this process or in workers that live across epochs.

A *source* wraps a data set and gives a finished batch for a request, `source[request]`. Its requests are small and say
all that the batch depends on, so it does not matter which process reads it, or what that process has read before.
"""

import os
import signal
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info


__all__ = ["Reader", "naming"]


class Reader:
    """A source with the `DataLoader` that reads it.

    Args:
        source: Has `__getitem__(request) -> batch`, and the data set as `dataset`.
        num_workers: Processes that read; 0 for none.
        persistent_workers: Whether workers stay for the next epoch.
        worker_init_fn: Called in each new worker with its number.
        options: More of a `DataLoader`'s.
    """

    def __init__(
        self,
        source: Any,
        *,
        num_workers: int,
        persistent_workers: bool,
        worker_init_fn: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        init_fn = _WorkerInit(worker_init_fn) if num_workers else None
        self._source = source
        self._options = options | {"num_workers": num_workers, "worker_init_fn": init_fn}
        self._persistent = persistent_workers
        self._idle = [self._new()]  # or none
        # The workers end with the reader, and before anything of theirs is let go of: see `_shut_down`.
        weakref.finalize(self, _close, self._idle, os.getpid())

    def read(self, requests: Iterable[Any], seed: int = 0) -> Generator[Any, None, None]:
        """Return the batches of some requests, in their order.

        Two of these may run at a time; the second then starts workers of its own. What is left of a reading that
        was given up, the workers finish before they begin with the next.

        Args:
            requests: Read a few ahead of the batches where there are workers.
            seed: Of the generators in new workers, where nothing else seeds them.
        """
        # In use it is not idle: a second reading would reset the first one's workers.
        loader = self._idle.pop() if self._idle else self._new()
        loader.generator = torch.Generator().manual_seed(seed)  # without one it would draw from the global generator
        assert isinstance(loader.sampler, _Requests)
        loader.sampler.current = requests = iter(requests)
        batches, is_sound = None, False
        try:
            batches = iter(loader)
            yield from _answered(batches, loader.timeout)
            is_sound = True
        except GeneratorExit:
            is_sound = True
            raise
        finally:
            _close_generator(requests)  # the idle loader would keep what it holds
            # After an error workers may be gone, and the next reading gets new ones.
            if self._persistent and is_sound and not self._idle:
                self._idle.append(loader)
            else:
                _shut_down(batches)

    def close(self) -> None:
        """End idle workers; a later reading starts new ones."""
        _close(self._idle, os.getpid())

    def _new(self) -> DataLoader[Any]:
        return DataLoader(
            self._source,
            batch_size=None,
            sampler=_Requests(),
            collate_fn=_as_it_is,
            persistent_workers=self._persistent,
            **self._options,
        )


def _close(idle: "list[DataLoader[Any]]", process: int) -> None:
    # A forked worker has the reader too, and must not wait for its siblings.
    while idle and process == os.getpid():
        _shut_down(idle.pop()._iterator)


def _close_generator(requests: Iterator[Any]) -> None:
    if isinstance(requests, Generator):
        requests.close()


def _answered(batches: Iterator[Any], timeout: float) -> Generator[Any, None, None]:
    """Yield what a `DataLoader` reads; where its timeout is over, the error names the worker that did not answer.

    Raises:
        TimeoutError: No batch has come for `timeout` seconds.
    """
    started = time.monotonic()
    while True:
        try:
            batch = next(batches, _END)
        except RuntimeError as error:
            if not timeout or time.monotonic() - started < timeout or not hasattr(batches, "_workers"):
                raise
            raise TimeoutError(
                f"{_late_worker(batches)} has not answered for {timeout:g} s (timeout={timeout:g}); it may hang in "
                "reading a file or in a transform, or a batch takes longer: raise timeout then"
            ) from error
        if batch is _END:
            return
        yield batch
        started = time.monotonic()


def _late_worker(batches: Any) -> str:
    """Name the worker whose batch is the next one, as far as torch's iterator tells."""
    info = getattr(batches, "_task_info", {}).get(getattr(batches, "_rcvd_idx", None))
    if not info:
        return "a worker of the loader"
    return f"worker {info[0]} of the loader (process {batches._workers[info[0]].pid})"


_END = object()


def _shut_down(batches: Any) -> None:
    """End the workers of a `DataLoader`'s iterator now.

    Left to the garbage collector, an iterator in a reference cycle (an error's traceback makes such) loses its queues
    first, and each worker is waited for in vain for five seconds.
    """
    shut_down = getattr(batches, "_shutdown_workers", None)  # one in this process has no workers
    if shut_down is not None:
        shut_down()


class _Requests:
    """A sampler whose content is exchanged from epoch to epoch: a `DataLoader` never lets go of its sampler."""

    def __init__(self) -> None:
        self.current: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.current)


class _WorkerInit:
    """Begins a worker.

    It gets the data set itself: `get_worker_info` would otherwise lead to the source around it. And it does not
    hear Ctrl-C, which a terminal sends to all processes: the run's own decides when its readers end.
    """

    def __init__(self, init_fn: Callable[[int], None] | None) -> None:
        self.init_fn = init_fn

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # which forbids it by the plain way
        if self.init_fn is not None:
            self.init_fn(worker)


class naming:
    """Adds a note to an error that says what was being read; the error's type and text stay.

    A class, because what `contextlib.contextmanager` makes lets a `StopIteration` pass.
    """

    def __init__(self, note: str) -> None:
        self.note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, StopIteration):
            # On its way out of the loader it would pass for the end of the epoch.
            raise RuntimeError(f"the data set raised StopIteration; {self.note}") from error
        if isinstance(error, Exception):
            error.add_note(self.note)


def _as_it_is(batch: Any) -> Any:
    return batch
