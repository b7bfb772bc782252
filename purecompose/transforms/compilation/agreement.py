"""Agreement of processes that share each batch: on what is known, and on what fails.

A process that takes another way than the others, for which it sends other messages, would wait for them forever.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from purecompose.core.ranks import Ranks
from purecompose.transforms.compilation.capture import FALLBACK_ADVICE, TraceError


def all_true(ranks: Ranks | None, own: bool, device: torch.device) -> bool:
    """Return whether this is true in all processes, which must all ask; without ranks, there is only this one."""
    return own if ranks is None else all(_gathered(ranks, int(own), device))


@contextmanager
def failing_together(ranks: Ranks | None, device: torch.device) -> Iterator[None]:
    """Return a scope, in which no messages are sent, that ends with an error in all processes or in none.

    Raises:
        TraceError: Another process has raised one.
        RuntimeError: Another process has raised another error.
    """
    if ranks is None:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    own = 0 if error is None else 1 if isinstance(error, TraceError) else 2
    kinds = _gathered(ranks, own, device)
    worst = max(kinds)
    if error is not None and own == worst:
        raise error
    if worst:
        failed = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind == worst)
        text = f"compile: rank {failed} failed to compile a part of the step, and its own error tells why"
        raise TraceError(f"{text}{FALLBACK_ADVICE}") if worst == 1 else RuntimeError(text)


def _gathered(ranks: Ranks, own: int, device: torch.device) -> list[int]:
    return ranks.gather(torch.tensor([own], device=device)).tolist()
