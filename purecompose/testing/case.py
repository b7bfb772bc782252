"""A case: one small, fully described situation in which a law is tried.

A case has plain values, so that its text creates it again, it shrinks to the simplest one that still breaks the law,
and it is the same in another process.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from purecompose import batch as batches
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step, compose
from purecompose.core.loop import loop_events
from purecompose.core.operation import Node
from purecompose.core.passes import DEFAULT_PASSES, Pass
from purecompose.core.program import StateFn
from purecompose.core.state import State
from purecompose.testing.companions import COMPANIONS
from purecompose.testing.tasks import TASKS, Task


COMPANY = "companion."
"""Prefix of the companions' names in a step, so that no algorithm has the same name."""

_USUAL_LR = 0.1


@dataclass(frozen=True, repr=False)
class Case:
    """A task at a point of a run, and the companions of an algorithm in its step.

    Args:
        task: The network and its batches.
        seed: Seed of weights, data and the run's key.
        batch_size: Number of examples in a batch.
        num_batches: Number of steps.
        start: Number of batches before the first step.
        batches_per_epoch: Length of the epoch.
        epochs: Length of the run in epochs.
        microbatches: Number of slices of a batch.
        lr: The hparam "lr", if the task's optimizer has one.
        others: Names of the `COMPANIONS` in the step.
        place: Number of companions that are listed before the algorithm.
    """

    task: Task = TASKS["vectors"]
    seed: int = 0
    batch_size: int = 4
    num_batches: int = 1
    start: int = 0
    batches_per_epoch: int = 2
    epochs: int = 4
    microbatches: int = 1
    lr: float = _USUAL_LR
    others: tuple[str, ...] = ()
    place: int = 0

    def state(self, *, dtype: torch.dtype | None = None, key: int | None = None) -> State:
        """Return a new state at the case's time, before `step.init`.

        Args:
            dtype: Dtype of the weights; by default the task's.
            key: Seed of the run's key; by default the case's seed.
        """
        run = {"duration": f"{self.epochs}ep", "batches_per_epoch": self.batches_per_epoch}
        state = self.task.make_state(self.seed, dtype=dtype, **run, **({} if key is None else {"key": key}))
        if self.lr != _USUAL_LR and "lr" in state.hparams:
            state = state.replace(hparams={**state.hparams, "lr": self.lr})
        tokens = batches.num_tokens(self.batch(0))
        return state.replace(timestamp=state.timestamp.advance_by(self.start, self.batch_size, tokens))

    def batch(self, index: int, dtype: torch.dtype | None = None) -> Any:
        """Return a new copy of the batch of a step; batches of different steps differ."""
        return self.task.make_batch(1000 * self.seed + self.start + index, self.batch_size, dtype)

    def batches(self, dtype: torch.dtype | None = None) -> list[Any]:
        """Return the batches of all steps."""
        return [self.batch(index, dtype) for index in range(self.num_batches)]

    def listed(self, *algorithms: Algorithm) -> list[Algorithm]:
        """Return the algorithms in their place among the companions."""
        others = [COMPANIONS[name](f"{COMPANY}{name}") for name in self.others]
        return [*others[: self.place], *algorithms, *others[self.place :]]

    def step(
        self,
        *algorithms: Algorithm,
        microbatches: int | None = None,
        passes: Iterable[Pass] = DEFAULT_PASSES,
        program: Iterable[Node | StateFn | str] = loop_events,
    ) -> Step:
        """Return the training step with these algorithms and the companions."""
        slices = self.microbatches if microbatches is None else microbatches
        return compose(program, self.listed(*algorithms), passes=passes, microbatches=slices)

    def __repr__(self) -> str:
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(given)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle
        printer.text(repr(self))  # Hypothesis would print every field of a dataclass
