"""Points of a run: times that cover it, and the first of each kind of step."""

from collections.abc import Iterator
from typing import Any

from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.time import Timestamp, TimeUnit


_NUM_TRIED = 100
"""Number of points at which schedules are looked up; this runs no step."""


def spread_moments(step: Step, state: State, batch: Any, num: int) -> list[Timestamp]:
    """Return points in the middle of `num` equal parts of a run; only its start if its length is in seconds.

    Args:
        step: The step.
        state: The state at the start, whose time has the run's length.
        batch: A batch; all are taken to have as many examples and tokens.
        num: Number of points.
    """
    now, layout, example = state.timestamp, state.context.layout, step.members.example(batch)
    samples, tokens = layout.num_examples(example), layout.num_tokens(example)
    total, duration = now.run.total_batches, now.run.duration
    sizes = {TimeUnit.SAMPLE: samples, TimeUnit.TOKEN: tokens}
    if total is None and duration is not None and sizes.get(duration.unit):
        total = duration.value / sizes[duration.unit]
    if total is None:
        return [now]
    chosen = dict.fromkeys(int(total * (i + 0.5) / num) for i in range(num))
    return [now.advance_by(number, samples, tokens) for number in chosen]


def moments_of(step: Step, state: State, batch: Any) -> Iterator[Timestamp]:
    """Yield a point of the run for each schedule: each combination of algorithms that act in a step."""
    seen: set[int] = set()
    for moment in (state.timestamp, *spread_moments(step, state, batch, _NUM_TRIED)):
        bits = step.prepare(state.replace(timestamp=moment), batch).bits
        if bits not in seen:
            seen.add(bits)
            yield moment
