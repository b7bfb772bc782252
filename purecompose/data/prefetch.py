"""Prefetching: batches are sent to a GPU while it works on earlier ones.

A copy from pageable memory makes the host wait for the GPU. Here each batch is copied into pinned memory and from there
to the GPU on a separate stream, a few batches ahead of the requested one.

Batches are read in the calling thread: a `DataLoader` already reads ahead in its workers, and a separate thread would
draw from torch's global generator and run the loader's code concurrently with the step's. On devices without streams
nothing is read ahead.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches
from purecompose._support.checks import check_whole


def prefetch(data: Iterable[Any], device: torch.device | str, size: int = 2) -> Iterator[Any]:
    """Return the batches on a device, in their order; for CUDA copied ahead.

    An exception while reading ahead is raised in its turn, after the earlier batches. Closing the iterator
    (or dropping it) discards the batches that were read ahead: a source that cannot be iterated again has then lost up
    to `size` batches.

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
