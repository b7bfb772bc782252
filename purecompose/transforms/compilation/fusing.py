"""Limits on what Inductor fuses for a GPU."""

import math
from contextlib import AbstractContextManager
from typing import Any

from purecompose.transforms.compilation.inductor import replaced


def fusing_near(scheduler: Any) -> AbstractContextManager[None]:
    """Return a scope in which Inductor does not fuse what is far apart if that keeps more memory than it saves.

    The loss of the first of two passes, for example, is needed only for a difference at the end of the step. In one
    kernel with the loss of the second pass it would keep the logits of the first one until then.

    Args:
        scheduler: The module `torch._inductor.scheduler`.
    """

    def can_fuse(plain: Any, self: Any, one: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
        return plain(self, one, other, *args, **kwargs) and not _keeps_more(self, one, other)

    return replaced(scheduler.Scheduler, "can_fuse", can_fuse)


_FAR = 64
"""The distance, in operations, from which Inductor, too, takes nodes that do not depend on each other for far apart."""


def _keeps_more(scheduler: Any, one: Any, other: Any) -> bool:
    """Return whether the earlier of two nodes far apart, done with the later one, keeps more bytes than are saved."""
    early, late = sorted((one, other), key=lambda node: node.min_order)
    place = max((scheduler.name_to_node[name].min_order for name in late.ancestors), default=0)
    """The place from which on the later one can be done."""
    if place - early.max_order < _FAR:
        return False
    read = (scheduler.name_to_buf.get(name) for name in {dep.name for dep in early.read_writes.reads})
    ended = [buffer for buffer in read if buffer is not None and _is_over(buffer, place)]
    try:
        kept = sum(map(_bytes, ended)) - sum(map(_bytes, early.get_outputs()))
    except TypeError:  # a size is left open
        return False
    return kept > scheduler.score_fusion_memory(one, other)


def _is_over(buffer: Any, place: int) -> bool:
    """Return whether all readers of a buffer come before a place."""
    return all(getattr(user.node, "min_order", place) < place for user in buffer.users)


def _bytes(buffer: Any) -> int:
    if not buffer.node.has_tensor_output():
        return 0
    return math.prod(map(int, buffer.node.get_size())) * buffer.node.get_dtype().itemsize


def fusing_within_lists(scheduler: Any) -> AbstractContextManager[None]:
    """Return a scope in which Inductor fuses into an operation on a list only what one tensor of it depends on.

    It fuses what several tensors of a list depend on into the part of the kernel for the first one (torch 2.14), and
    the blocks of another part may read it before it is written.

    Args:
        scheduler: The module `torch._inductor.scheduler`.
    """

    def can_fuse(plain: Any, cls: Any, producer: Any, consumer: Any) -> bool:
        pairs = [(producer, None)]
        if producer.is_foreach():
            pairs = list(zip(producer.snodes, consumer.snodes, strict=False)) if consumer.is_foreach() else []
        for first, own in pairs:
            names = {buffer.get_name() for buffer in first.get_outputs()}
            readers = [one for one in consumer.snodes if any(dep.name in names for dep in one.read_writes.reads)]
            if len(readers) > 1 or (own is not None and any(reader is not own for reader in readers)):
                return False
        return plain(cls, producer, consumer)

    return replaced(scheduler.ForeachKernelSchedulerNode, "can_fuse", can_fuse)
