"""Every two shipped methods with a common task train together in one step, reproducibly, and resume exactly."""

import itertools
import warnings

import pytest
import torch

from purecompose import State, Step, compose, loop_events, tree
from purecompose.testing import TASKS, Subject
from tests.shipped import SHIPPED


NUM_STEPS = 20

# One pair in QUICK is among the quick tests.
QUICK = 40

# A pair is tried on the first task that both accept.
ORDER = ("images", "tokens", "vectors", "bf16_images", "bf16_tokens")

PAIRS = [
    (first, second, name)
    for first, second in itertools.combinations(SHIPPED, 2)
    for name in [name for name in ORDER if {name} <= {*SHIPPED[first].accepted} & {*SHIPPED[second].accepted}][:1]
    if not (SHIPPED[first].is_alone or SHIPPED[second].is_alone)
]


def start(first: str, second: str, task: str) -> tuple[Step, State]:
    # ALiBi's first example cuts sequences into several, which mixed targets do not support; its second does not.
    number = -1 if {first, second} == {"alibi", "mixup"} else 0
    algorithms = [Subject.of(SHIPPED[name].examples[number]).algorithm for name in (first, second)]
    step = compose(loop_events, algorithms, microbatches=2)
    return step, step.init(TASKS[task].make_state(0, duration=f"{NUM_STEPS}ba", batches_per_epoch=5))


def run(step: Step, state: State, task: str, numbers: range) -> State:
    for number in numbers:
        state = step(state, TASKS[task].make_batch(number, 6))
    return state


@pytest.mark.parametrize(
    ("first", "second", "task"),
    [pytest.param(*pair, marks=[] if number % QUICK == 0 else pytest.mark.slow) for number, pair in enumerate(PAIRS)],
)
def test_two_methods_train_together(first: str, second: str, task: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the other method's layers have separate tests
        step, state = start(first, second, task)
        before = state.copy()
        middle = run(step, state, task, range(NUM_STEPS // 2))
        end = run(step, middle, task, range(NUM_STEPS // 2, NUM_STEPS))
        assert not tree.diff(before, state)
        # Continue from a copy of the middle state: the rest must not need anything outside of the state.
        again = run(start(first, second, task)[0], middle.copy(), task, range(NUM_STEPS // 2, NUM_STEPS))
    assert not tree.diff(end, again)
    assert end.loss is not None and torch.isfinite(end.loss)
    assert all(torch.isfinite(param).all() for param in end.params.values())
