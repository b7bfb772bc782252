"""Strategies: their examples are valid, varied enough, and shrink to the simplest one."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings, strategies as st

import purecompose as pc
from purecompose import Event, after, algorithms as alg, between, compose, every, loop_events, on
from purecompose.testing import strategies as strategy
from purecompose.testing.case import Case, Subject
from purecompose.testing.record import run
from purecompose.testing.tasks import TASKS, make_task
from purecompose.time.predicates import epoch_ends
from tests import shipped


def smallest(drawn: st.SearchStrategy[Any], condition=lambda value: True) -> Any:
    quick = settings(max_examples=500, database=None, phases=[Phase.generate, Phase.shrink], derandomize=True)
    return find(drawn, condition, settings=quick)


def sample(drawn: st.SearchStrategy[Any], count: int = 100) -> list[Any]:
    """Return drawn examples, the same in every run."""
    found = []

    @settings(max_examples=count, database=None, derandomize=True, phases=[Phase.generate])
    @given(drawn)
    def collect(value):
        found.append(value)

    collect()
    return found


def idle(name, when) -> pc.Algorithm:
    return pc.Algorithm(name, when, lambda event, state: state)


@given(st.data(), strategy.tasks())
def test_states_take_a_step(data, task):
    state = data.draw(strategy.states(task))
    end = compose(loop_events)(state, task.make_batch(0, 3))
    assert end.loss is not None and torch.isfinite(end.loss)
    assert end.timestamp.batch == state.timestamp.batch + 1


@pytest.mark.filterwarnings(
    "ignore:.*(replaces|computes) the gradients", "ignore:gradient_accumulation. the run has ended within"
)
@given(shipped.algorithm_lists(), st.integers(1, 2))
def test_lists_of_algorithms_compose(algorithms, k):
    case = Case(num_batches=2, microbatches=k)
    end = run(case.step(*algorithms), case.state(), case.batches()).states[-1]
    assert end.loss is not None and torch.isfinite(end.loss)


def test_drawn_algorithms_are_accepted_by_the_task():
    drawn = {algorithm.name for algorithm in sample(shipped.algorithms(task=TASKS["tokens"]), 600)}
    assert (
        drawn == {name for name, row in shipped.SHIPPED.items() if row.accepts(TASKS["tokens"])} >= {"label_smoothing"}
    )


@pytest.mark.parametrize(
    ("drawn", "condition", "expected"),
    [
        (strategy.tasks(), None, TASKS["vectors"]),
        (strategy.tasks(), lambda t: t.kind == "images" and "dict" in t.name, make_task("images", form="dict")),
        (shipped.algorithm_lists(), None, []),
        (strategy.cases(), None, Case(batch_size=2, batches_per_epoch=1, epochs=3)),
        (
            strategy.cases(),
            lambda case: case.microbatches > 1 and case.others,
            Case(microbatches=2, others=("bystander",), batch_size=2, batches_per_epoch=1, epochs=3),
        ),
    ],
    ids=lambda value: "",
)
def test_examples_shrink_to_the_simplest(drawn, condition, expected):
    assert smallest(drawn, condition or (lambda value: True)) == expected


LOADED = on(Event.AFTER_DATALOADER)


@pytest.mark.parametrize(
    "algorithm",
    [
        alg.selective_backprop(start=0.5, end=0.9),
        "selective_backprop(0.9, 1.0, full_every=3)",
        idle("late", LOADED & after("400ba")),
        idle("window", LOADED & between("10ep", "12ep")),
        idle("rare", LOADED & every("3ep")),
        idle("rare_end", on(Event.BATCH_END) & every(10)),
        idle("ends", LOADED & epoch_ends()),
        idle("samples", LOADED & after("100sp")),
        idle("plain", lambda event, state: event is Event.BATCH_END),
        idle("start", on(Event.BATCH_START) | (LOADED & between("50ba", "52ba"))),
    ],
    ids=lambda given: given if isinstance(given, str) else repr(given.match),
)
def test_most_cases_let_the_algorithm_act(algorithm):
    cases = sample(strategy.cases([TASKS["vectors"]], algorithm=algorithm), 60)
    subject = Subject.of(algorithm).algorithm
    for case in cases:
        left = case.epochs * case.batches_per_epoch - case.start
        assert case.start >= 0 and (left > 2 * case.num_batches or (left >= 1 and case.num_batches == 1))
    assert sum(fires(subject, case) for case in cases) >= 0.5 * len(cases)
    shrunk = smallest(strategy.cases(algorithm=algorithm))
    assert fires(subject, shrunk)
    assert (shrunk.batch_size, shrunk.num_batches, shrunk.microbatches, shrunk.others) == (2, 1, 1, ())


def fires(algorithm: pc.Algorithm, case: Case) -> bool:
    """Return whether it acts at its rarest event in the case's steps, according to the matcher."""
    rarest = Event.BATCH_END if algorithm.name in ("rare_end", "plain") else Event.AFTER_DATALOADER
    step, now = case.step(algorithm), case.state().timestamp
    for _ in range(case.num_batches):
        bits = step.matcher.schedule(case.state(), case.batch(0), now, now.advance(case.batch_size))
        if algorithm.name in {a.name for a in step.matcher.matched(bits, rarest, step.algorithms)}:
            return True
        now = now.advance(case.batch_size)
    return False
