"""Timeouts of ranks: an error that names the processes that do not answer."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from purecompose.core.ranks import Ranks


_GIVEN_UP = re.compile(r"[Tt]imed? ?out|[Cc]onnection (was )?(closed|reset)|[Bb]roken pipe")
_ROLL_CALL = 5.0
"""Seconds in which processes must report that they are running, once one has given up."""


class RankTimeoutError(RuntimeError):
    """A process has not answered within the process group's timeout, or has ended."""


@contextmanager
def naming_late_ranks(ranks: Ranks, batch: int) -> Iterator[None]:
    """Return a context manager in which unanswered messages raise an error with the ranks that are missing."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankTimeoutError) or not _GIVEN_UP.search(str(error)):
            raise
        seconds = time.monotonic() - start
        late = _late(ranks, batch)
        names = f"rank {', '.join(map(str, late))}" if late else "another process (could not determine which)"
        raise RankTimeoutError(
            f"data_parallel: in batch {batch} rank {ranks.rank} of {ranks.size} waited {seconds:.0f} s for {names}, "
            "which is stopped, hangs or has ended. How long to wait is the timeout of init_process_group(timeout=...)"
        ) from error


def _late(ranks: Ranks, batch: int) -> list[int]:
    """Return the ranks that do not answer a roll call in the group's store."""
    missing: list[int] = []

    def call() -> None:
        # The store belongs to the group's transport, not to the connections that have been given up.
        store: Any = dist.distributed_c10d._get_default_store()
        place = f"purecompose/{ranks.group}/{batch}"
        store.set(f"{place}/{ranks.rank}", "here")
        end = time.monotonic() + _ROLL_CALL
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        while time.monotonic() < end and (others := [r for r in others if not store.check([f"{place}/{r}"])]):
            time.sleep(0.1)
        missing.extend(others)

    # In a thread, since the process that hosts the store may be the one that does not answer.
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(2 * _ROLL_CALL)
    return missing
