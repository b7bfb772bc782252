"""Parts of a step: names of the forward passes in them, which key their draws, and the run that they belong to.

A part is a stage, or an algorithm at an event. Its forward passes are numbered by their order, from the start again
each time the part runs: in every slice, in `state.gradient`, and when it is traced.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

from purecompose._support.scopes import NOTHING, during
from purecompose.nn.keyed.scope import is_under_foreign_checkpoint, top_hooks, unkeyed


class Run(Protocol):
    """What forward passes need to know about the run of a step; see `purecompose.core.operation.Purpose`."""

    @property
    def is_first(self) -> bool:
        """True in the first run of a schedule, in which passes are watched."""
        ...

    @property
    def shared_batch(self) -> Any:
        """The `SharedBatch` whose statistics batch normalisation uses; `None` for those of what it is given."""
        ...

    @property
    def passes(self) -> Any:
        """Recorder that runs the passes in a check of gradients, or `None`."""
        ...


class Part:
    """A part that begins to run; the forward passes in it are counted while `CURRENT` holds it.

    Attributes:
        name: Name of the draws of its first pass.
        run: The run that it belongs to; `None` outside of steps.
        num_passes: Number of passes so far.
        turn: Number of earlier stages of the same name in the program.
        passes: Recorder that runs the passes in a check of gradients, or `None`.
        is_compared: True if slices of a batch are compared, so that draws must not depend on their sizes.
        is_apart: True if batch normalisation uses the statistics of what it is given, whatever the run shares.
    """

    __slots__ = ("_hooks", "is_apart", "is_compared", "name", "num_passes", "passes", "run", "turn")

    def __init__(self, name: str, run: Run | None = None, turn: int = 0, num_passes: int = 0) -> None:
        self.name, self.run, self.turn, self.num_passes = name, run, turn, num_passes
        self.passes: Any = None if run is None else run.passes
        self.is_compared: bool = self.passes is not None
        self.is_apart = False
        self._hooks = top_hooks()

    def region(self, num_passes: int, run: Run | None = None) -> Part:
        """Return a part of this one whose passes are counted separately, from a number on, and not recorded."""
        part = Part(self.name, run or self.run, self.turn, num_passes)
        part.passes, part.is_compared, part.is_apart = None, self.is_compared, self.is_apart
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


def current_run() -> Any:
    """Return the run that the caller belongs to, or `None`."""
    part = CURRENT.get()
    return None if part is None else part.run


def is_first_run() -> bool:
    """Return whether the caller is in the first run of a step, which is watched."""
    run = current_run()
    return run is not None and run.is_first


def shared_batch() -> Any:
    """Return the `SharedBatch` whose statistics batch normalisation uses, or `None`."""
    part = CURRENT.get()
    return None if part is None or part.run is None or part.is_apart else part.run.shared_batch


def apart() -> AbstractContextManager[Any]:
    """Return a scope in which batch normalisation uses the statistics of what it is given."""
    part = CURRENT.get()
    if part is None:
        return NOTHING
    region = part.region(part.num_passes)
    region.is_apart = True
    return during(CURRENT, region)


def is_compared() -> bool:
    """Return whether the current part is one in which slices of a batch are compared."""
    part = CURRENT.get()
    return part is not None and part.is_compared
