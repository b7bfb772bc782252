"""Parts of a step: what the forward passes in them are called, so that each draws other numbers.

A part is a stage, or an algorithm at an event. Its forward passes are numbered by their order, from the start again
each time the part runs: in every slice, in `state.gradient`, and when it is traced.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from purecompose._support.scopes import during
from purecompose.nn.keyed.scope import is_under_foreign_checkpoint, top_hooks, unkeyed


class Part:
    """A part that begins to run; the forward passes in it are counted while `CURRENT` holds it.

    Attributes:
        name: Name of the draws of its first pass.
        num_passes: Number of passes so far.
        turn: Number of earlier stages of the same name in the program.
        passes: Recorder that runs the passes in a check of gradients, or `None`.
        is_compared: True if slices of a batch are compared, so that draws must not depend on their sizes.
    """

    __slots__ = ("_hooks", "is_compared", "name", "num_passes", "passes", "turn")

    def __init__(self, name: str, num_passes: int = 0, turn: int = 0, passes: Any = None) -> None:
        self.name: str = name
        self.num_passes: int = num_passes
        self.turn: int = turn
        self.passes: Any = passes
        self.is_compared: bool = passes is not None
        self._hooks = top_hooks()

    def region(self, num_passes: int) -> Part:
        """Return a part of this one whose passes are counted separately, beginning with a number."""
        part = Part(self.name, num_passes, self.turn)
        part.is_compared = self.is_compared
        return part

    def next_pass(self) -> str:
        """Return the name of the next pass's draws."""
        number = self.num_passes
        self.num_passes += 1
        return self.name if number == 0 else f"{self.name}, pass {number}"

    def check_replayable(self) -> None:
        """Raise inside of torch's own checkpoint, whose recomputation would give the pass another number."""
        if is_under_foreign_checkpoint([self._hooks]):
            why = "was called under `torch.utils.checkpoint`, whose recomputation would draw other numbers"
            advice = "Use `purecompose.nn.layers.checkpoint(fn, *args)` in its place, or name the pass: name='teacher'."
            raise unkeyed("state.forward", why, advice)


CURRENT: ContextVar[Part | None] = ContextVar("part", default=None)
"""The innermost part that is running."""


def running(part: Part | None) -> AbstractContextManager[Any]:
    """Return a scope in which this is the current part."""
    return during(CURRENT, part)


def is_compared() -> bool:
    """Return whether the current part is one in which slices of a batch are compared."""
    part = CURRENT.get()
    return part is not None and part.is_compared
