"""The best state as the result of a run: eager and compiled, in memory and with checkpoints, resumed at any batch."""

import math
import pathlib
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Checkpoints, EarlyStopping, Evaluator, Event, State, compose, fit, loop_events, training
from tests.helpers import assert_same, changing, counter, make_batches, make_mlp, make_state, noise
from tests.transforms.compilation.compile_helpers import compiled


BATCHES = make_batches(4)
STEP = compose(loop_events, [noise(), counter()])


def start(**options: Any) -> State:
    return make_state(make_mlp(dropout=0.3), key=3, **{"duration": "3ep", **options})


def wobble(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a metric of the state that goes up and down."""
    return torch.sin(1000 * outputs.sum())


def scores(values: list[float]) -> Evaluator:
    """Return an evaluator with these results, one after the other."""
    left = list(values)
    return Evaluator(BATCHES[:1], {"accuracy": lambda outputs, targets: torch.tensor(left.pop(0))})


def evaluator() -> Evaluator:
    return Evaluator(BATCHES, {"wobble": pc.metrics.from_function(wobble, higher_is_better=True)}, every="2ba")


def best_of(step: Any = STEP) -> State:
    """Return the best state of an uninterrupted run, found by evaluating each one."""
    rated = [
        (pc.evaluate(state, BATCHES, {"wobble": wobble}, step=step)["wobble"], state.copy())
        for state in training(step, start(), BATCHES)
        if state.timestamp.batch % 2 == 0
    ]
    rating, best = max(rated, key=lambda pair: pair[0])
    assert rating > rated[-1][0] and best.timestamp.batch not in (2, 12), "the metric should be best midway"
    return best


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_whole_state_of_the_best_evaluation_is_returned(is_compiled: bool) -> None:
    """A compiled step, which writes over its states, returns the same: parameters, memory, slots, key, and time."""
    step = compiled(STEP) if is_compiled else STEP
    best, last = best_of(), fit(STEP, start(), BATCHES)
    found = fit(step, start(), BATCHES, evaluate=evaluator(), result="best")
    assert_same(found, best)
    assert found.timestamp == best.timestamp and found.slots["counter"] == best.timestamp.batch
    assert_same(fit(step, start(), BATCHES, evaluate=evaluator(), result="last"), last)
    states = list(training(step, start(), BATCHES, evaluate=evaluator(), result="best"))
    assert [state.timestamp.batch for state in states] == [*range(1, 13), best.timestamp.batch]
    assert_same(states[-1], best)


@pytest.mark.parametrize("settings", [{}, {"best": "eval/wobble"}, {"best": "eval/wobble", "keep_best": 2}])
@pytest.mark.parametrize("last", [1, 3, 6, 9, 11, 12])
def test_a_resumed_run_returns_the_same(settings: Any, last: int, tmp_path: pathlib.Path) -> None:
    """Also if the best evaluation was before the interruption, or if the run had already ended."""
    options: dict[str, Any] = {
        "evaluate": evaluator(),
        "stop": EarlyStopping("eval/wobble", "9ep"),
        "checkpoints": Checkpoints(tmp_path, "5ba", keep=1, **settings),
        "resume": "auto",
        "result": "best",
    }
    for state in training(STEP, start(), BATCHES, **options):
        if state.timestamp.batch == last:
            break
    found, best = fit(STEP, start(), BATCHES, **options), best_of()
    assert found.timestamp == best.timestamp
    assert_same(found.replace(slots={name: found.slots[name] for name in best.slots}), best)
    path = pc.saving.best(tmp_path)
    assert path is not None
    assert_same(pc.load(path, like=found, step=STEP), found)


def test_a_longer_run_compares_with_what_came_before(tmp_path: pathlib.Path) -> None:
    """The best state of all parts, with the length of the whole run."""
    options: dict[str, Any] = {"checkpoints": Checkpoints(tmp_path, best="eval/accuracy"), "resume": "auto"}
    first = fit(STEP, start(), BATCHES, evaluate=scores([0.1, 0.8, 0.2]), result="best", **options)
    later = fit(STEP, start(), BATCHES, duration="5ep", evaluate=scores([0.3, 0.4]), result="best", **options)
    assert first.timestamp.epoch == later.timestamp.epoch == 2
    assert str(later.timestamp.run.duration) == "5ep" and pc.tree.equal(first.params, later.params)
    assert fit(STEP, later, BATCHES).timestamp.epoch == 5


@pytest.mark.parametrize(
    ("values", "mode", "epoch"),
    [
        ([0.5, 0.9, 0.1], "max", 2),
        ([0.5, 0.9, 0.1], "min", 3),
        ([0.5, 0.9, 0.9], "max", 2),
        ([math.nan, 0.2, 0.1], "max", 2),
    ],
)
def test_early_stopping_says_which_state_is_the_best(values: list[float], mode: str, epoch: int) -> None:
    stop = EarlyStopping("eval/accuracy", "9ep", mode=mode)
    assert fit(STEP, start(), BATCHES, evaluate=scores(values), stop=stop, result="best").timestamp.epoch == epoch


def test_the_best_state_comes_before_the_patience() -> None:
    stop, values = EarlyStopping("eval/accuracy", "2ep"), [0.1, 0.6, 0.5, 0.4]
    epochs: list[int] = []

    def watch(event: Event, state: State) -> None:
        epochs.extend([state.timestamp.epoch] if event is Event.FIT_END else [])

    found = fit(
        STEP, start(duration="9ep"), BATCHES, evaluate=scores(values), stop=stop, result="best", observers=watch
    )
    assert found.timestamp.epoch == 2 and epochs == [4]


def test_metrics_of_training_decide_too() -> None:
    step = compose(loop_events, [pc.algorithms.training_metrics(reset="2ba")])
    values = {state.timestamp.batch: state.metrics["train/accuracy"] for state in training(step, start(), BATCHES)}
    stop = EarlyStopping("train/accuracy", "9ep")
    found = fit(step, start(), BATCHES, stop=stop, result="best").timestamp.batch
    periods = {batch: value for batch, value in values.items() if batch % 2 == 0}
    assert found == max(periods, key=lambda batch: periods[batch])


@pytest.mark.parametrize(("last", "is_end"), [(0.9, True), (0.1, False)])
def test_what_acts_at_the_end_changes_only_the_state_there(last: float, is_end: bool) -> None:
    """The evaluation at the end is of the changed state, which is returned if it is the best."""

    def zeros(state: State) -> State:
        return state.replace(params={name: torch.zeros_like(value) for name, value in state.params.items()})

    step = compose(loop_events, [changing("zeros", Event.FIT_END, zeros)])
    once = scores([0.5, last])
    found = fit(step, start(), BATCHES, evaluate=Evaluator(once.data, once.metrics, every="2ep"), result="best")
    assert all(not value.any() for value in found.params.values()) == is_end
    assert found.timestamp.epoch == (3 if is_end else 2)


def test_without_a_number_the_last_state_is_returned() -> None:
    with pytest.warns(UserWarning, match="no value of 'eval/accuracy' is a number, so the last state is returned"):
        found = fit(STEP, start(), BATCHES, evaluate=scores([math.nan] * 3), result="best")
    assert_same(found, fit(STEP, start(), BATCHES))


BOTH = {"accuracy": pc.metrics.accuracy, "loss": pc.losses.cross_entropy}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"result": "first"}, "result='first': expected 'last' or 'best'"),
        ({}, "result='best': by which metric\\? There are none; name one by checkpoints=Checkpoints"),
        ({"evaluate": Evaluator(BATCHES, BOTH)}, "There are eval/accuracy, eval/loss; name one"),
        (
            {
                "evaluate": Evaluator(BATCHES, BOTH),
                "stop": [EarlyStopping("eval/loss"), EarlyStopping("eval/accuracy")],
            },
            "There are eval/loss, eval/accuracy; name one",
        ),
        ({"evaluate": Evaluator(BATCHES, {"gap": wobble})}, "'eval/gap': are lower or higher values better"),
    ],
)
def test_what_does_not_say_which_state_is_the_best_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(STEP, start(), BATCHES, **{"result": "best", **settings})


def test_a_population_has_no_best_state() -> None:
    states = pc.stack_states([start(), start()])
    with pytest.raises(pc.errors.UnsupportedError, match="result='best': a population with states chosen by a metric"):
        fit(pc.population(STEP, 2), states, BATCHES, evaluate=Evaluator(BATCHES), result="best")
