"""Parts of a step: what the forward passes in them are called, so that each draws other numbers.

A part is a stage, or an algorithm at an event. Its forward passes are numbered by their order, from the start again
each time the part runs: in every slice, in `state.gradient`, and when it is traced.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

from purecompose.nn.keyed.scope import is_under_foreign_checkpoint, top_hooks, unkeyed


__all__ = ["Part"]


class Part:
    """A context manager that numbers the forward passes within it.

    Attributes:
        name: Name of the draws of its first pass.
        num_passes: Number of passes so far.
    """

    __slots__ = ("_hooks", "_token", "name", "num_passes")

    def __init__(self, name: str, num_passes: int = 0) -> None:
        self.name, self.num_passes = name, num_passes

    def __enter__(self) -> Part:
        self._hooks = top_hooks()
        self._token: Token[Part | None] = _CURRENT.set(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _CURRENT.reset(self._token)

    @staticmethod
    def current() -> Part | None:
        """Return the innermost part that is running."""
        return _CURRENT.get()

    def next_pass(self) -> str:
        """Return the name of the next pass's draws."""
        number = self.num_passes
        self.num_passes += 1
        return self.name if number == 0 else f"{self.name}, pass {number}"

    def check_replayable(self) -> None:
        """Raise inside of torch's own checkpoint, whose recomputation would give the pass another number."""
        if is_under_foreign_checkpoint([self._hooks]):
            why = "was called under `torch.utils.checkpoint`, whose recomputation would draw other numbers"
            advice = "Use `purecompose.layers.checkpoint(fn, *args)` in its place, or name the pass: name='teacher'."
            raise unkeyed("state.forward", why, advice)


_CURRENT: ContextVar[Part | None] = ContextVar("part", default=None)
