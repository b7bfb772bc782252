"""Every two shipped methods train together in one step, reproducibly, and resume exactly."""

import itertools
import warnings

import pytest
import torch

from purecompose import State, Step, compose, loop_events, tree
from purecompose.testing import SHIPPED, TASKS, Subject, Task
from purecompose.testing.shipped import Row
from tests.testing.mixed_tasks import MIXED_TASKS


NUM_STEPS = 20

# One pair in QUICK is among the quick tests.
QUICK = 40

# A pair is tried on the first task that both accept, or else on one with layers for both.
ORDER = ("images", "tokens", "vectors", "bf16_images", "bf16_tokens")

SEQUENCES = ("alibi", "seq_length_warmup")
IMAGES = ("augmix", "colout", "cutmix", "cutout", "progressive_resizing", "randaugment")


def task_of(first: Row, second: Row) -> Task:
    for name in ORDER:
        if name in first.accepted and name in second.accepted:
            return TASKS[name]
    names = {first.name, second.name}
    if names & set(SEQUENCES):
        return MIXED_TASKS["sequences" if "mixup" in names else "tokens"]
    return MIXED_TASKS["images without batch statistics" if "per_example_clipping" in names else "images"]


ROWS = [row for row in SHIPPED.values() if not row.is_alone]
EVERY_PAIR = list(itertools.combinations(ROWS, 2))
# Pairs without a common task: images are not sequences, and batch statistics have no per-example gradients.
REFUSED = [*[{first, second} for first in SEQUENCES for second in IMAGES], {"ghost_batchnorm", "per_example_clipping"}]
PAIRS = [
    pytest.param(
        first, second, id=f"{first.name}, {second.name}", marks=[] if number % QUICK == 0 else pytest.mark.slow
    )
    for number, (first, second) in enumerate(EVERY_PAIR)
    if {first.name, second.name} not in REFUSED
]


def start(first: Row, second: Row, task: Task) -> tuple[Step, State]:
    # ALiBi's first example cuts sequences into several, which mixed targets do not support; its second does not.
    number = -1 if {first.name, second.name} == {"alibi", "mixup"} else 0
    algorithms = [Subject.of(row.examples[number]).algorithm for row in (first, second)]
    step = compose(loop_events, algorithms, microbatches=2)
    state = task.make_state(0, duration=f"{NUM_STEPS}ba", batches_per_epoch=5)
    return step, step.init(state)


def run(step: Step, state: State, task: Task, numbers: range) -> State:
    for number in numbers:
        state = step(state, task.make_batch(number, 6))
    return state


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_methods_train_together(first: Row, second: Row) -> None:
    task = task_of(first, second)
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


@pytest.mark.parametrize("names", REFUSED, ids=lambda names: ", ".join(sorted(names)))
def test_pairs_without_a_common_task_are_refused(names: set[str]) -> None:
    first, second = sorted(names)
    task = MIXED_TASKS["images"]
    with pytest.raises((TypeError, ValueError), match="expected sequences|treats each example separately"):
        step, state = start(SHIPPED[first], SHIPPED[second], task)
        run(step, state, task, range(NUM_STEPS))


def test_every_pair_is_tried_or_refused() -> None:
    assert len(PAIRS) + len(REFUSED) == len(EVERY_PAIR)
    assert [row.name for row in SHIPPED.values() if row.is_alone] == ["no_op_model"]
