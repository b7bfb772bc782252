"""Errors that name the processes that do not answer, or that run another step than this one."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from purecompose.core.ranks import Ranks
from purecompose.errors import RankTimeoutError
from purecompose.transforms.rank_comparison import SAME_BATCH


_GIVEN_UP = re.compile(r"[Tt]imed? ?out|[Cc]onnection (was )?(closed|reset)|[Bb]roken pipe")
_ROLL_CALL = 5.0
"""Seconds in which processes must report that they are running, once one has given up."""


@contextmanager
def naming_late_ranks(ranks: Ranks, batch: int, words: str = "", *, is_new: bool = False) -> Iterator[None]:
    """Return a context manager in which unanswered messages raise an error with the ranks that are missing.

    `words`, if any, describe the step, and must be the same on all; if `is_new`, this is checked before any message.
    """
    start = time.monotonic()
    try:
        _announce(ranks, batch, words, is_new=is_new)
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
    """Return the ranks that do not answer a roll call in the group's store; raise if they run another step."""
    found: list[Any] = []

    def call() -> None:
        # The store belongs to the group's transport, not to the connections that have been given up.
        store: Any = dist.distributed_c10d._get_default_store()
        place = f"purecompose/{ranks.group}/{batch}"
        try:
            _is_common(ranks)
        except ValueError as error:
            return found.append(error)
        store.set(f"{place}/{ranks.rank}", "here")
        end = time.monotonic() + _ROLL_CALL
        others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        while time.monotonic() < end and (others := [r for r in others if not store.check([f"{place}/{r}"])]):
            time.sleep(0.1)
        found.extend(others)

    # In a thread, since the process that hosts the store may be the one that does not answer.
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(2 * _ROLL_CALL)
    if found and isinstance(found[0], ValueError):
        raise found[0]
    return found


def _announce(ranks: Ranks, batch: int, words: str, *, is_new: bool) -> None:
    """Write what this process runs into the group's store, where others read it while this one waits for messages.

    A process whose batch has a new form would send other messages than the others expect, or compute a part of another
    batch. It waits until all have announced the step, whether it is new to them or not.
    """
    number, *last = _ANNOUNCED.get(ranks, (0,))
    if not words or last == [batch, words] and not is_new:
        return  # a compiled step may enter the scope twice
    _ANNOUNCED[ranks] = number + 1, batch, words
    dist.distributed_c10d._get_default_store().set(_keys(ranks)[ranks.rank], f"{number + 1} {words}")
    pause, end = 1e-4, time.monotonic() + _ROLL_CALL
    while is_new and not _is_common(ranks) and time.monotonic() < end:  # those that come later compare as well
        time.sleep(pause := min(2 * pause, 0.1))


def _is_common(ranks: Ranks) -> bool:
    """Return whether all have announced this step; raise a `ValueError` if any has in other words."""
    store, keys, found = dist.distributed_c10d._get_default_store(), _keys(ranks), dict[str, list[str]]()
    if ranks not in _ANNOUNCED or not store.check(keys):
        return False
    own, announced = _ANNOUNCED[ranks][0], [value.decode().partition(" ") for value in store.multi_get(keys)]
    for rank, (number, _, words) in enumerate(announced):
        if int(number) == own:
            found.setdefault(words, []).append(str(rank))
    if len(found) > 1:
        each = "; ".join(f"rank {', '.join(ranks)} has {words}" for words, ranks in found.items())
        raise ValueError(f"data_parallel: the processes differ in their batch ({each}): {SAME_BATCH}")
    return all(int(number) >= own for number, _, _ in announced)


def _keys(ranks: Ranks) -> list[str]:
    return [f"purecompose/step/{ranks.group}/{rank}" for rank in range(ranks.size)]


_ANNOUNCED: dict[Ranks, Any] = {}
"""The last announced step of each group: its number, from 1, its batch and its words."""
