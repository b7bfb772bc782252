"""`train`: the three calls that it stands for, to the same bits, and what it refuses."""

import inspect
import pathlib
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Checkpoints, EarlyStopping, Evaluator, Event, State, compose, fit, loop_events, optim, train
from purecompose.observers import History
from tests.helpers import assert_same, counter, make_batches, make_mlp, noise


BATCHES, TEST = make_batches(4), make_batches(2)
METHODS = [noise(), counter()]


def call(**settings: Any) -> tuple[State, History]:
    given = {"loss": pc.losses.cross_entropy, "optimizer": optim.adam(0.01), "duration": "3ep", **settings}
    return train(make_mlp(dropout=0.3), given.pop("data", BATCHES), given.pop("test", TEST), **given)


def three_calls(
    composed: dict[str, Any], created: dict[str, Any], evaluator: Any = None, **fitted: Any
) -> tuple[State, History]:
    history = History()
    step = compose(loop_events, METHODS, **composed)
    created = {"loss": pc.losses.cross_entropy, "optimizer": optim.adam(0.01), "duration": "3ep", **created}
    state = State.create(make_mlp(dropout=0.3), **created)
    return fit(step, state, BATCHES, evaluate=evaluator or Evaluator(TEST), observers=[history], **fitted), history


def test_one_call_is_three(tmp_path: pathlib.Path) -> None:
    """With the arguments of all three: the same state, with time and memory, and the same records."""
    stop = EarlyStopping("eval/accuracy", "2ep")
    state, history = call(
        methods=METHODS,
        metrics=["accuracy"],
        microbatches=2,
        key=7,
        precision="bf16",
        stop=stop,
        result="best",
        checkpoints=Checkpoints(tmp_path / "one", keep=1),
    )
    expected, records = three_calls(
        {"microbatches": 2},
        {"key": 7, "precision": "bf16"},
        Evaluator(TEST, ["accuracy"]),
        stop=stop,
        result="best",
        checkpoints=Checkpoints(tmp_path / "three", keep=1),
    )
    assert_same(state, expected)
    assert state.timestamp == expected.timestamp and history.records == records.records
    assert pc.saving.best(tmp_path / "one") is not None


def test_the_defaults_are_those_of_the_three_calls() -> None:
    state, history = call(methods=METHODS)
    expected, records = three_calls({}, {})
    assert_same(state, expected)
    assert history.records == records.records and history.series("eval/loss")[0] == [4, 8, 12]
    plain, without = train(make_mlp(), BATCHES, loss=pc.losses.cross_entropy, optimizer=optim.sgd(0.1), duration="2ba")
    assert plain.timestamp.batch == 2 and not plain.slots
    assert all("eval/loss" not in record for record in without.records)


def test_other_evaluators_and_observers() -> None:
    events: list[Event] = []
    often = Evaluator(TEST, ["accuracy"], every="2ba", label="val")
    state, history = call(test=None, evaluate=often, observers=lambda event, state: events.append(event))
    assert history.series("val/accuracy")[0] == [2, 4, 6, 8, 10, 12]
    assert events.count(Event.BATCH_END) == 12 and state.timestamp.epoch == 3


def test_microbatches_auto_is_a_setting_of_the_run() -> None:
    assert_same(call(microbatches="auto")[0], call()[0])
    assert not pc.tree.equal(call(microbatches=4)[0].params, call()[0].params)  # the sums have another order


def test_the_signature_has_the_arguments_of_the_three() -> None:
    names = inspect.signature(train).parameters
    assert list(names)[:8] == ["net", "data", "test", "loss", "optimizer", "duration", "methods", "metrics"]
    for call_, own in ((compose, "passes"), (State.create, "device"), (fit, "result")):
        assert names[own].default == inspect.signature(call_).parameters[own].default
    assert not {"program", "algorithms", "step", "state"} & names.keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 3}, "unexpected keyword argument 'epochs'; write .*duration=\"3ep\""),
        ({"validation_freq": 3}, "'validation_freq'; write pc.Evaluator"),
        ({"evaluate": Evaluator(TEST)}, r"evaluate=Evaluator\(batches, metrics\) replaces both"),
        ({"algorithms": METHODS}, "'algorithms'; write .*methods= of pc.train"),
        ({"stopp": ()}, "'stopp'; did you mean 'stop'"),
        ({"test": None, "metrics": ["accuracy"]}, "metrics= are measured on the batches of test="),
        ({"test": Evaluator(TEST)}, "Evaluator"),
        ({"methods": noise()}, "put a single one into a list"),
        ({"observers": 3}, "observers: expected a function"),
    ],
)
def test_what_none_of_the_three_takes_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(**settings)


def test_a_run_without_a_length_is_refused() -> None:
    with pytest.raises(TypeError, match="duration"):
        train(make_mlp(), BATCHES, loss=pc.losses.mse, optimizer=optim.sgd(0.1))  # pyright: ignore[reportCallIssue]
    assert torch.is_tensor(call()[0].loss)
