"""Microbatches found automatically: after an out-of-memory error, a batch is cut into twice as many slices."""

from typing import Any

import torch

from purecompose._support.messages import warn
from purecompose.core.compose import Step
from purecompose.core.state import State


class Adaptive:
    """A step that is repeated with more microbatches when it runs out of memory.

    A step is a pure function, so the repetition computes what the first attempt would have computed. The number is
    kept for all later batches.

    Attributes:
        step: The step with the current number of microbatches.
        found: That number, if it differs from the number of the original step; otherwise `None`.
    """

    def __init__(self, step: Step, found: int | None = None) -> None:
        self.step = step if found is None else step.replace(microbatches=found)
        self.found = found
        self._proven = 0

    def __call__(self, state: State, batch: Any) -> State:
        """Return the state after one batch."""
        num_examples = self.step.num_examples(state, batch)
        while True:
            try:
                new = self.step(self._safe(state, num_examples), batch)
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                k = self.step.cut.num_slices(num_examples)
                if k >= num_examples:
                    error.add_note("microbatches='auto': the memory does not suffice for a single example either")
                    raise
                self.found = min(2 * k, num_examples)
                self.step: Step = self.step.replace(microbatches=self.found)
                self._proven = 0
                warn(
                    f"out of memory: from batch {state.timestamp.batch} on, batches are cut into "
                    f"{self.step.microbatches} microbatches"
                )
            else:
                self._proven = max(self._proven, num_examples)
                return new
            if state.device.type == "cuda":
                torch.cuda.empty_cache()

    def _safe(self, state: State, num_examples: int) -> State:
        """Return a state that survives a failure: a donating step may have begun to overwrite its memory."""
        is_at_risk = num_examples > self._proven and state.lease is not None
        return state.copy() if is_at_risk else state


def _is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text
