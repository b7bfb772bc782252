"""Reading: batches are loaded in this process, in workers that live across epochs, or in several processes, and sent to
a GPU while it works on earlier ones.

A *source* wraps a data set and returns a finished batch for a request, `source[request]`. Requests contain all that the
batch depends on, so it does not matter which process reads it.

`prefetch` copies batches to the GPU on a separate stream, a few ahead. It reads in the calling thread, so that the
loader's code does not run concurrently with the step's.
"""

import os
import signal
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import tee
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from purecompose import batch as batches, tree
from purecompose._support.specs import check_whole, shown


class Reader:
    """A source, which has the data set as `dataset`, with the `DataLoader` that reads it and takes the options."""

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
        # Without workers a `DataLoader` only adds 6 microseconds to each batch.
        self._reads_here = num_workers == 0 and not options.get("pin_memory")
        self._idle = [self._new()]  # at most one
        # The workers end with the reader, and before anything that they use is released: see `_shut_down`.
        weakref.finalize(self, _close, self._idle, os.getpid())

    def read(self, requests: Iterable[Any], seed: int = 0) -> Generator[Any, None, None]:
        """Yield the batches of some requests, in their order; with workers, they are read a few ahead.

        A second reading at the same time starts its own workers. Those of an abandoned reading finish its outstanding
        requests before they begin with the next one. Generators in new workers have the seed.
        """
        if self._reads_here:
            for request in requests:
                yield self._source[request]
            return
        # A loader in use is removed from the idle ones, because a second reading would reset the first one's workers.
        loader = self._idle.pop() if self._idle else self._new()
        loader.generator = torch.Generator().manual_seed(seed)  # otherwise it would draw from the global generator
        assert isinstance(loader.sampler, _Requests)
        loader.sampler.current = requests = iter(requests)
        batches, is_sound = None, False
        try:
            batches = iter(loader)
            yield from batches
            is_sound = True
        except GeneratorExit:
            is_sound = True
            raise
        finally:
            if isinstance(requests, Generator):
                requests.close()  # otherwise the idle loader would keep its objects alive
            # After an error workers may have died, so the next reading gets new ones.
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
    # A forked worker has a copy of the reader, and must not wait for its siblings.
    while idle and process == os.getpid():
        _shut_down(idle.pop()._iterator)


def _shut_down(batches: Any) -> None:
    """End the workers of a `DataLoader`'s iterator immediately.

    The garbage collector could release its queues first, and then wait five seconds for each worker.
    """
    shut_down = getattr(batches, "_shutdown_workers", None)  # an iterator in this process has no workers
    if shut_down is not None:
        shut_down()


class _Requests:
    """A sampler whose content is replaced in each epoch, because the sampler of a `DataLoader` cannot be replaced."""

    def __init__(self) -> None:
        self.current: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.current)


class _WorkerInit:
    """Initialization of a worker, in which `get_worker_info` gets the data set itself, not the source around it.

    It ignores Ctrl-C, which a terminal sends to all processes: the main process decides when its readers end.
    """

    def __init__(self, init_fn: Callable[[int], None] | None) -> None:
        self.init_fn = init_fn

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # plain assignment raises
        if self.init_fn is not None:
            self.init_fn(worker)


class naming:
    """Context that adds a note to an error about what was being read; the error's type and text do not change.

    A class, because a context from `contextlib.contextmanager` lets a `StopIteration` pass.
    """

    def __init__(self, note: Callable[[], str]) -> None:
        self.note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, StopIteration):
            # Raised by the loader, it would be taken as the end of the epoch.
            raise RuntimeError(f"the data set raised StopIteration; {self.note()}") from error
        if isinstance(error, Exception):
            error.add_note(self.note())


def _as_it_is(batch: Any) -> Any:
    return batch


class SharedReader:
    """Reader of rows that puts them together with those of other processes; the interface is that of `Reader`."""

    def __init__(self, reader: Any, group: Any) -> None:
        self._reader, self._group, self._rank, self._size = reader, group, group.rank(), group.size()

    def read(self, requests: Iterable[Any], seed: int = 0) -> Generator[Any, None, None]:
        wanted, whole = tee(requests)
        with closing(self._reader.read(map(self._own, wanted), seed)) as rows:
            for request in whole:
                yield self._together(rows, len(request.indices))

    def close(self) -> None:
        self._reader.close()

    def _own(self, request: Any) -> Any:
        """Return the request of this process's rows; without any, it reads the first one, for its form."""
        start, stop = _bounds(len(request.indices), self._size)[self._rank]
        return request._replace(indices=request.indices[start:stop] or request.indices[:1])

    def _together(self, rows: Iterator[Any], num_examples: int) -> Any:
        """Return a batch, of which each process reads its rows; if one cannot, all raise."""
        failure, part, form = None, None, None
        try:
            part = next(rows)
            form = _form(part)
        except Exception as error:
            failure = error
        forms: list[Any] = [None] * self._size
        dist.all_gather_object(forms, form, self._group)
        if failure is not None:
            raise failure
        if None in forms:
            raise RuntimeError(f"data.shared: process {forms.index(None)} could not read its rows: see its error")
        if len({*forms}) > 1:
            raise ValueError(
                f"data.shared: the processes have read rows of different forms; process {self._rank} has {form}: pad "
                "samples to one length by transform"
            )
        counts = [stop - start for start, stop in _bounds(num_examples, self._size)]
        return tree.map(lambda leaf: self._all_rows(leaf, counts), part)

    def _all_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the rows of all processes, given the number of each."""
        own = counts[self._rank]
        padded = rows.new_zeros(counts[0], *rows.shape[1:], device="cpu")  # the first process has the most
        padded[:own] = rows[:own]
        sent = padded.view(-1).view(torch.uint8)  # gloo does not know all dtypes
        found = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(found, sent, self._group)
        return torch.cat([one.view(rows.dtype).view_as(padded)[:num] for one, num in zip(found, counts, strict=True)])


def _bounds(num_examples: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return the first row of each process, and the row after its last; the first process has the most."""
    num_parts = min(num_examples, num_ranks)
    bounds = batches.bounds(num_examples, num_parts) + [num_examples] * (num_ranks - num_parts)
    return list(zip(bounds, bounds[1:], strict=False))


def _form(rows: Any) -> str:
    leaves, spec = tree.flatten(rows)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ValueError(f"data.shared: expected samples of numbers and tensors, got {shown(leaf)} in a batch")
    return f"{spec} {[(str(leaf.dtype), tuple(leaf.shape[1:])) for leaf in leaves]}"


def prefetch(data: Iterable[Any], device: torch.device | str, size: int = 2) -> Iterator[Any]:
    """Return the batches on a device, in their order; for CUDA copied ahead.

    An exception while reading ahead is raised in its turn, after the earlier batches. Closing the iterator discards the
    batches that were read ahead: a source that cannot be iterated again loses up to `size` of them.

    Args:
        data: Batches of any form, see `purecompose.batch`; iterated once.
        device: Device for the batches. Those that are already on it are passed on, and not read ahead.
        size: Largest number of batches being copied or waiting, including the requested one; at least 1.

    Raises:
        TypeError, ValueError: `size` is not an integer of at least 1.

    Example:
        >>> [batch.tolist() for batch in prefetch([torch.tensor([1]), torch.tensor([2])], "cpu")]
        [[1], [2]]
    """
    check_whole(size, "prefetch: size", 1)
    device = torch.device(device)
    if device.type != "cuda":
        return (_moved(batch, device) for batch in data)
    return _ahead(data, _Sender(device).send, size)


class _Sent(NamedTuple):
    """A batch that may still be being copied."""

    arrived: Callable[[], Any]
    """Function that makes the current stream wait for the copy, and returns the batch."""
    is_under_way: bool
    """True if there was anything to copy."""


def _ahead(data: Iterable[Any], send: Callable[[Any], _Sent], size: int) -> Iterator[Any]:
    """Send batches up to `size` ahead; one at a time if nothing has to be copied."""
    source, waiting = iter(data), deque[_Sent]()
    failure: Exception | None = None
    depth, is_over = 1, False
    while True:
        while not is_over and len(waiting) < depth:
            try:
                sent = send(next(source))
            except StopIteration:
                is_over = True
            except Exception as error:  # raised in its turn, after the earlier batches
                failure, is_over = error, True
            else:
                waiting.append(sent)
                depth = size if sent.is_under_way else 1
        if not waiting:
            break
        yield waiting.popleft().arrived()
    if failure is not None:
        raise failure


class _Sender:
    """Object that copies batches to a GPU on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.stream = torch.cuda.Stream(self.device)

    def send(self, batch: Any) -> _Sent:
        if all(tensor.device == self.device for tensor in batches.tensors(batch)):
            return _Sent(lambda: batch, False)
        copies: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if tensor.device == self.device:
                return tensor
            copies.append(_pinned(tensor).to(self.device, non_blocking=True))
            return copies[-1]

        with torch.cuda.stream(self.stream):
            moved = batches.map_tensors(copy, batch)
            event = self.stream.record_event()

        def arrived() -> Any:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for tensor in copies:
                # The memory belongs to the copying stream; without this it could be reused while it is being read.
                if tensor.layout is torch.strided:
                    tensor.record_stream(current)
            return moved

        return _Sent(arrived, True)


def _pinned(tensor: Tensor) -> Tensor:
    """Return the tensor in pinned memory, which the GPU can read directly; one that is not strided is unchanged."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_pinned():
        return tensor
    if 0 in tensor.stride():  # expanded, with several elements in one place, which a copy cannot write to
        tensor = tensor.contiguous()
    return tensor.pin_memory()


def _moved(batch: Any, device: torch.device) -> Any:
    if all(tensor.device == device for tensor in batches.tensors(batch)):
        return batch
    return batches.map_tensors(lambda tensor: tensor.to(device), batch)
