"""Shared memory between tensors: tied tensors, which are one parameter or buffer, and partial overlaps."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from purecompose._support.messages import warn
from purecompose._support.shards import local
from purecompose._support.writes import memory_of, storage_of


class Member(NamedTuple):
    """A parameter or buffer under its first name."""

    name: str
    tensor: Tensor
    is_param: bool


class Sharing:
    """Registry that finds tied tensors of a network among different objects.

    Two parameters, or two buffers, with the same memory, shape, strides, dtype and `requires_grad` are tied:
    `a.weight.data = b.weight.data` ties them just as `a.weight = b.weight` does.
    """

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._by_memory: dict[tuple[object, ...], Member] = {}

    def add(self, member: Member) -> Member:
        """Register a tensor; return the member that it is tied to, or itself."""
        tensor = local(member.tensor)
        if tensor.layout is not torch.strided or not tensor.numel():
            return member
        tie = self._by_memory.setdefault((*memory_of(tensor), member.is_param, tensor.requires_grad), member)
        if tie is member:
            self._members.append(member._replace(tensor=tensor))
        return tie

    def check(self) -> None:
        """Look for tensors that share memory without being tied; a state holds each of them separately.

        Warns:
            UserWarning: They are buffers; if forward writes into one, the other does not change.
        """
        for first, second in self._overlaps():
            what = f"{first.name!r} and {second.name!r} share memory, but are separate tensors in a state"
            if first.is_param or second.is_param:
                raise ValueError(
                    f"{what}: training one would no longer change the other. Keep one parameter and compute the other "
                    "tensor from it in forward, or tie them (same shape, strides and requires_grad)"
                )
            warn(f"{what}: a write to one in forward will not change the other")

    def _overlaps(self) -> Iterator[tuple[Member, Member]]:
        by_storage: dict[int, list[Member]] = {}
        for member in self._members:
            by_storage.setdefault(storage_of(member.tensor), []).append(member)
        for members in by_storage.values():
            members.sort(key=lambda member: _span(member.tensor)[0])
            for index, first in enumerate(members):
                end = _span(first.tensor)[1]
                for second in members[index + 1 :]:
                    if _span(second.tensor)[0] >= end:
                        break
                    if _have_common_bytes(first.tensor, second.tensor):
                        yield first, second


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets of a tensor's first byte in its storage and of the byte after its last."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * tensor.element_size()


def _have_common_bytes(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors whose spans intersect overlap; columns of one matrix, for example, do not."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    spans = _span(first), _span(second)
    base, end = min(start for start, _ in spans), max(end for _, end in spans)
    is_used = torch.zeros(end - base, dtype=torch.bool)
    _bytes_of(first, is_used, base).fill_(True)
    return bool(_bytes_of(second, is_used, base).any())


def _bytes_of(tensor: Tensor, memory: Tensor, base: int) -> Tensor:
    """Return a tensor's part of `memory`, which has one entry for each byte from `base` on."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    shape = [1 if stride == 0 else length for length, stride in zip(tensor.shape, strides, strict=True)]
    return memory.as_strided([*shape, size], [*strides, 1], _span(tensor)[0] - base)
