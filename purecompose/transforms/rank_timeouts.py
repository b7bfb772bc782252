"""Errors that name the processes that do not answer, or that run another step than this one."""

import re
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from purecompose.core.ranks import Ranks
from purecompose.transforms.rank_comparison import SAME_BATCH


_GIVEN_UP = re.compile(r"[Tt]imed? ?out|[Cc]onnection (was )?(closed|reset)|[Bb]roken pipe")
_ROLL_CALL = 5.0
"""Seconds in which processes must report that they are running, once one has given up."""


class RankTimeoutError(RuntimeError):
    """A process has not answered within the process group's timeout, or has ended."""


@contextmanager
def naming_late_ranks(ranks: Ranks, batch: int, words: str = "", *, is_new: bool = False) -> Iterator[None]:
    """Return a context manager in which unanswered messages raise an error with the ranks that are missing.

    Args:
        ranks: The processes.
        batch: Number of the batch.
        words: What this process runs, in words that are the same for all; empty if nothing is compared.
        is_new: True if it may send other messages than in the last step, so that the words are compared before.

    Raises:
        ValueError: Processes have given different words.
        RankTimeoutError: Others do not answer.
    """
    start, step = time.monotonic(), _STEPS.setdefault(ranks, _AnnouncedStep(ranks))
    try:
        step.announce(batch, words, is_new=is_new)
        yield
    except RuntimeError as error:
        if isinstance(error, RankTimeoutError) or not _GIVEN_UP.search(str(error)):
            raise
        seconds = time.monotonic() - start
        late = _late(ranks, batch, step)
        names = f"rank {', '.join(map(str, late))}" if late else "another process (could not determine which)"
        raise RankTimeoutError(
            f"data_parallel: in batch {batch} rank {ranks.rank} of {ranks.size} waited {seconds:.0f} s for {names}, "
            "which is stopped, hangs or has ended. How long to wait is the timeout of init_process_group(timeout=...)"
        ) from error


def _late(ranks: Ranks, batch: int, step: "_AnnouncedStep") -> list[int]:
    """Return the ranks that do not answer a roll call in the group's store; raise if they run another step."""
    missing: list[int] = []
    errors: list[ValueError] = []

    def call() -> None:
        # The store belongs to the group's transport, not to the connections that have been given up.
        store: Any = dist.distributed_c10d._get_default_store()
        try:
            step.compare()
        except ValueError as error:
            return errors.append(error)
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
    for error in errors:
        raise error
    return missing


class _AnnouncedStep:
    """What this process runs, in the store of its group, where others can read it while it waits for their messages.

    A process whose batch has another form than the last would send other messages than the others expect, or compute a
    part of another batch. It waits until all have announced a new form, or one of them the step without one.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._place = ranks, f"purecompose/step/{ranks.group}"
        self._moment: Any = None
        self._number = self._num_new = 0

    def announce(self, batch: int, words: str, *, is_new: bool) -> None:
        """Store the words; raise a `ValueError` if they are new and those of others differ."""
        if not words or self._moment == (batch, words) and not is_new:
            return  # a compiled step may enter the scope twice
        store: Any = dist.distributed_c10d._get_default_store()
        self._number, self._moment = self._number + 1, (batch, words)
        store.set(f"{self._place}/{self._ranks.rank}", f"{self._number} {words}")
        if is_new:
            self._num_new += 1
            store.delete_key(f"{self._place}/sum/{self._num_new - 2}")  # which all have read
            sums, term = f"{self._place}/sum/{self._num_new}", 2**40 + zlib.crc32(words.encode()) // 2**8
            total, pause, end = store.add(sums, term), 1e-4, time.monotonic() + _ROLL_CALL
            while total < 2**40 * self._ranks.size and time.monotonic() < end:
                time.sleep(pause := min(2 * pause, 0.1))
                total = store.add(sums, 0)
                if pause == 0.1:
                    self.compare()
            if total != term * self._ranks.size:
                self.compare()

    def compare(self) -> None:
        """Raise a `ValueError` if a process has announced the same step in other words."""
        store, found = dist.distributed_c10d._get_default_store(), dict[str, list[str]]()
        keys = [f"{self._place}/{rank}" for rank in range(self._ranks.size)]
        for rank, key in enumerate(keys):
            number, _, words = store.get(key).decode().partition(" ") if store.check([key]) else ("", "", "")
            if number == str(self._number):
                found.setdefault(words, []).append(str(rank))
        if len(found) > 1:
            each = "; ".join(f"rank {', '.join(ranks)} has {words}" for words, ranks in found.items())
            raise ValueError(f"data_parallel: the processes differ in their batch ({each}): {SAME_BATCH}")


_STEPS: dict[Ranks, _AnnouncedStep] = {}
