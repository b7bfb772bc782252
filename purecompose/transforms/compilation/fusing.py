"""Limits on what Inductor fuses for a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def fusing_within_lists(scheduler: Any) -> Iterator[None]:
    """Return a scope in which Inductor fuses into an operation on a list only what one tensor of it depends on.

    It fuses what several tensors of a list depend on into the part of the kernel for the first one (torch 2.14), and
    the blocks of another part may read it before it is written.

    Args:
        scheduler: The module `torch._inductor.scheduler`.
    """
    owner = scheduler.ForeachKernelSchedulerNode
    plain = owner.__dict__["can_fuse"]

    def can_fuse(cls: Any, producer: Any, consumer: Any) -> bool:
        pairs = [(producer, None)]
        if producer.is_foreach():
            pairs = list(zip(producer.snodes, consumer.snodes, strict=False)) if consumer.is_foreach() else []
        for first, own in pairs:
            names = {buffer.get_name() for buffer in first.get_outputs()}
            readers = [one for one in consumer.snodes if any(dep.name in names for dep in one.read_writes.reads)]
            if len(readers) > 1 or (own is not None and any(reader is not own for reader in readers)):
                return False
        return plain.__get__(None, cls)(producer, consumer)

    owner.can_fuse = classmethod(can_fuse)
    try:
        yield
    finally:
        owner.can_fuse = plain
