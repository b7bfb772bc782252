"""A warning when the next batch takes long to load."""

import threading
import time
from collections.abc import Iterator
from typing import Any

from purecompose._support.messages import warn
from purecompose.data.arrays import Arrays


LONGEST = 60.0
"""Seconds that a batch may take before a warning reports that it has not arrived."""

_END = object()


def watched(batches: Iterator[Any], data: object) -> Iterator[Any]:
    """Return the batches, and warn while one has not arrived for too long, once for each such wait.

    A separate thread checks the clock, since the waiting one cannot. Data in memory are not watched.

    Args:
        batches: The batches.
        data: The data that they come from.
    """
    return batches if isinstance(data, list | tuple | Arrays) else _watched(batches, type(data).__name__)


def _watched(batches: Iterator[Any], name: str) -> Iterator[Any]:
    watch = _Watch(name, LONGEST)
    try:
        while True:
            watch.since = time.monotonic()
            batch = next(batches, _END)
            watch.since = None
            if batch is _END:
                return
            yield batch
            watch.number += 1
    finally:
        watch.is_over.set()


class _Watch:
    """State shared with the watching thread."""

    def __init__(self, name: str, longest: float) -> None:
        self.name, self.longest = name, longest
        self.since: float | None = None
        self.number = 0
        self.is_over = threading.Event()
        threading.Thread(target=self._look, name="purecompose data", daemon=True).start()

    def _look(self) -> None:
        warned_since = None
        while not self.is_over.wait(self.longest / 4):
            since = self.since
            if since is not None and since != warned_since and time.monotonic() - since >= self.longest:
                warned_since = since
                warn(
                    f"still waiting for batch {self.number} of this pass from {self.name} after {self.longest:g} s; "
                    "a worker may be stuck, or storage slow. data.loader(timeout=...) raises an error instead"
                )
