"""Every two shipped methods in one step: they train together, twice to the same bits, and go on exactly."""

import itertools
import warnings

import pytest
import torch

from purecompose import State, Step, compose, loop_events, tree
from purecompose.testing import SHIPPED, TASKS, Subject
from purecompose.testing.shipped.row import Row


NUM_STEPS = 20

# One pair in so many is among the quick tests.
QUICK = 12

# On which task a pair is tried: the first that both accept.
ORDER = ("images", "tokens", "vectors", "bf16_images", "bf16_tokens")


def common_task(first: Row, second: Row) -> str | None:
    return next((name for name in ORDER if name in first.accepted and name in second.accepted), None)


ROWS = [row for row in SHIPPED.values() if not row.is_alone]
PAIRS = [
    pytest.param(
        first, second, task, id=f"{first.name}, {second.name}", marks=[] if number % QUICK == 0 else pytest.mark.slow
    )
    for number, (first, second) in enumerate(itertools.combinations(ROWS, 2))
    if (task := common_task(first, second)) is not None
]


def start(first: Row, second: Row, task: str) -> tuple[Step, State]:
    algorithms = [Subject.of(row.examples[0]).algorithm for row in (first, second)]
    step = compose(loop_events, algorithms, microbatches=2)
    state = TASKS[task].make_state(0, duration=f"{NUM_STEPS}ba", batches_per_epoch=5)
    return step, step.init(state)


def run(step: Step, state: State, task: str, numbers: range) -> State:
    for number in numbers:
        state = step(state, TASKS[task].make_batch(number, 6))
    return state


@pytest.mark.parametrize(("first", "second", "task"), PAIRS)
def test_two_methods_train_together(first: Row, second: Row, task: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a method says of the other's layers, it says in a test of its own
        step, state = start(first, second, task)
        before = state.copy()
        middle = run(step, state, task, range(NUM_STEPS // 2))
        end = run(step, middle, task, range(NUM_STEPS // 2, NUM_STEPS))
        assert not tree.diff(before, state)
        # From a copy of the middle: nothing that the rest needs lives outside of the state.
        again = run(start(first, second, task)[0], middle.copy(), task, range(NUM_STEPS // 2, NUM_STEPS))
    assert not tree.diff(end, again)
    assert end.loss is not None and torch.isfinite(end.loss)
    assert all(torch.isfinite(param).all() for param in end.params.values())
