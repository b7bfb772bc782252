"""The time of a step of each cell of an ablation, measured apart from the runs.

Runs in different modes, in several processes or on a busy machine have times that cannot be compared. Here a single
process takes a step of each cell at the same points of the run, in turn, so that a slowdown of the machine affects all
alike, and ratios are taken within a round.
"""

import time
from collections.abc import Mapping
from typing import Any

from purecompose.analysis.cells import Trainer, first_batch, spread_moments
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.time import Timestamp


_NUM_POINTS = 10
"""Number of points of a run at which steps are timed."""


def step_times(
    trainer: Trainer, cells: Mapping[str, frozenset[str]], seed: int, num_rounds: int
) -> dict[str, list[float]]:
    """Return the mean time of a step over the run, in seconds, for each cell and round.

    Only the steps are timed: no data are read, and what acts outside a step, such as averages that are formed at the
    end of an epoch, is left out.

    Args:
        trainer: What the cells have in common.
        cells: The subset of each cell, by name.
        seed: The seed whose initial state is used at all points.
        num_rounds: The number of rounds.
    """
    timed = {name: _Timed(trainer, subset, seed) for name, subset in cells.items()}
    for one in timed.values():
        one.round()  # the first one checks contracts and compiles
    found: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(num_rounds):
        for name in timed if number % 2 else reversed(timed):
            found[name].append(timed[name].round())
    return found


class _Timed:
    """A cell's step at the points of a run."""

    def __init__(self, trainer: Trainer, subset: frozenset[str], seed: int) -> None:
        self.step: Step = trainer.step(subset)
        self.start: State = trainer.initial(self.step, seed)
        self.batch: Any = first_batch(trainer.data, self.start)
        self.moments: list[Timestamp] = spread_moments(self.step, self.start, self.batch, _NUM_POINTS)

    def round(self) -> float:
        """Return the mean time of a step at all points."""
        seconds = 0.0
        for moment in self.moments:
            # A compiled step overwrites the state that it is given.
            state = self.start.copy().replace(timestamp=moment)
            state.key.sum().item()  # waits for the device
            began = time.perf_counter()
            self.step(state, self.batch).key.sum().item()
            seconds += time.perf_counter() - began
        return seconds / len(self.moments)
