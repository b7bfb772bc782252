"""Batches sent ahead: their order, their number, and errors of a source."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose.data import prefetch
from purecompose.data.reader import _ahead, _pinned, _Sent


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    name: str


class Source:
    """A source that counts its reads, and raises at a given batch, if any."""

    def __init__(self, num: int, fails_at: int | None = None) -> None:
        self.num, self.fails_at, self.read = num, fails_at, 0

    def __iter__(self) -> Iterator[int]:
        for i in range(self.num):
            if i == self.fails_at:
                raise OSError(f"batch {i} is broken")
            self.read += 1
            yield i


def sent_late(batch: Any) -> _Sent:
    """Simulate a copy that is still in progress."""
    return _Sent(lambda: batch, True)


def sent_at_once(batch: Any) -> _Sent:
    return _Sent(lambda: batch, False)


@given(num=st.integers(0, 9), size=st.integers(1, 4), is_late=st.lists(st.booleans(), min_size=9, max_size=9))
def test_every_batch_comes_once_in_order_and_at_most_size_are_ahead(num: int, size: int, is_late: list[bool]) -> None:
    source, taken = Source(num), []
    for batch in _ahead(source, lambda i: _Sent(lambda: i, is_late[i]), size):
        taken.append(batch)
        assert len(taken) <= source.read <= min(num, len(taken) - 1 + size)
    assert taken == list(range(num))


def test_copies_are_made_ahead_of_the_batch_that_is_asked_for() -> None:
    source = Source(9)
    stream = _ahead(source, sent_late, 3)
    assert source.read == 0
    assert [next(stream), next(stream)] == [0, 1]
    assert source.read == 4


@pytest.mark.parametrize("size", [1, 5])
def test_batches_that_need_no_copy_are_not_read_ahead(size: int) -> None:
    source = Source(9)
    stream = _ahead(source, sent_at_once, size)
    assert [next(stream), next(stream)] == [0, 1]
    assert source.read == 2


@pytest.mark.parametrize("fails_at", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_an_error_comes_after_the_batches_before_it(fails_at: int, size: int) -> None:
    taken = []
    with pytest.raises(OSError, match=f"batch {fails_at} is broken"):
        for batch in _ahead(Source(5, fails_at), sent_late, size):
            taken.append(batch)
    assert taken == list(range(fails_at))


def test_closing_early_closes_the_source() -> None:
    closed = []

    def source() -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            closed.append(True)

    stream = _ahead(source(), sent_late, 2)
    assert next(stream) == 0
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert closed == [True]
    assert list(stream) == []


def test_on_a_cpu_batches_of_every_structure_are_unchanged() -> None:
    batches = [(torch.ones(2), [torch.zeros(1)]), {"x": torch.ones(2), "n": 3}, Pair(torch.ones(2), "a")]
    assert all(a is b for a, b in zip(prefetch(batches, "cpu"), batches, strict=True))


def test_on_a_cpu_nothing_is_read_ahead() -> None:
    source = Source(4)
    stream = prefetch(source, "cpu", size=4)
    assert source.read == 0
    assert next(stream) == 0 and source.read == 1


def test_batches_move_to_another_device() -> None:
    (moved,) = prefetch([Pair(torch.ones(2), "a")], "meta")
    assert moved.x.device.type == "meta" and moved.name == "a"


@pytest.mark.parametrize("value", [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")])
def test_only_plain_memory_is_pinned(value: torch.Tensor) -> None:
    assert _pinned(value) is value


@needs_cuda
@pytest.mark.parametrize("size", [1, 3])
def test_on_a_gpu_the_values_are_those_of_the_host_while_it_works(size: int) -> None:
    class Named(NamedTuple):
        x: torch.Tensor
        label: int

    host = [Named(torch.full((512, 512), float(i)).contiguous(), i) for i in range(12)]
    busy = torch.randn(2048, 2048, device="cuda")
    sums = []
    for batch in prefetch(host, "cuda", size):
        assert isinstance(batch, Named) and batch.x.is_cuda
        busy = torch.tanh(busy @ busy)  # the host runs ahead of the device
        sums.append(batch.x.sum())
        del batch  # its memory may be used for the next copy now
    assert torch.stack(sums).tolist() == [512 * 512 * i for i in range(12)]


@needs_cuda
def test_on_a_gpu_layouts_are_kept_and_tensors_already_there_are_passed_on() -> None:
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    there = torch.ones(3, device="cuda")
    first, second = prefetch([(image, there), (torch.ones(1).expand(4), there)], "cuda")
    assert first[0].is_contiguous(memory_format=torch.channels_last) and first[1] is there
    assert second[0].tolist() == [1.0] * 4
    assert torch.equal(first[0].cpu(), image)
