"""Suggestions for keyword arguments that a function does not have."""

import pickle
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose._support.checks import check_keywords, suggests_keywords
from purecompose.algorithms import functional


def loss(outputs: Any, targets: Any = None) -> None: ...


def count(given: Any) -> int:
    return len(given)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("target", "did you mean 'targets'\\?"), ("y", "write targets=y"), ("mask", "it takes outputs, targets")],
)
def test_an_unknown_keyword_is_answered_by_the_right_one_or_by_all(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^loss\(\) got an unexpected keyword argument '{name}'; {hint}$"):
        check_keywords(["outputs", name], loss, {"y": "targets=y"})


def test_functions_that_take_any_keyword_are_not_checked() -> None:
    check_keywords(["anything"], lambda **options: options, {})


def test_factories_and_states_name_their_arguments() -> None:
    with pytest.raises(TypeError, match=r"ema\(\) got .*'decay'; it takes half_life, smoothing, .*name"):
        pc.algorithms.ema(decay=0.99)  # pyright: ignore[reportCallIssue]
    options: dict[str, Any] = {"loss": pc.losses.mse, "optimizer": pc.optim.sgd(0.1)}
    with pytest.raises(TypeError, match=r"State.create\(\) got .*'seed'; write key=3$"):
        pc.State.create(torch.nn.Linear(2, 2), **options, seed=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"State.create\(\) got .*'batches_in_epoch'; did you mean 'batches_per_epoch'"):
        pc.State.create(torch.nn.Linear(2, 2), **options, batches_in_epoch=3)  # pyright: ignore[reportCallIssue]


def test_a_missing_argument_shows_the_signature_and_errors_within_the_call_are_unchanged() -> None:
    checked: Any = suggests_keywords()(loss)
    with pytest.raises(TypeError, match=r"missing 1 required .*'outputs'; it is loss\(outputs, targets=None\)$"):
        checked()
    with pytest.raises(TypeError, match="^object of type 'int' has no len") as caught:
        suggests_keywords()(count)(3)
    assert caught.traceback[-1].name == "count"


X = torch.ones(2, 3)
STATE = pc.State.create(torch.nn.Linear(3, 3), loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1), duration="1ba", key=0)
STEP: Any = pc.compose(pc.loop_events)
MISTAKES: dict[str, tuple[Any, str]] = {
    "string for an optimizer": (
        lambda: pc.State.create(torch.nn.Linear(3, 3), loss=pc.losses.mse, optimizer="Adam", key=0),  # pyright: ignore
        r"got 'Adam' .*; write optim\.adam\(\.\.\.\)",
    ),
    "no key": (lambda: functional.mixup_batch(X, X), r"'targets'; it is mixup_batch\(key, inputs, targets, "),  # pyright: ignore
    "a factory without its argument": (
        lambda: pc.algorithms.layer_freezing(1, 2, 3, 4, 5, 6),  # pyright: ignore[reportCallIssue]
        r"; it is layer_freezing\(",
    ),
    "values of hparams": (lambda: STATE.with_hparams({"lr": 0.1}), r"got 'lr' .*state\.replace\(hparams="),  # pyright: ignore
    "no step": (lambda: pc.fit(STATE, [(X, X)]), r"fit\(step, state, data\): .*got State, list"),  # pyright: ignore
    "no data": (lambda: pc.fit(STEP, STATE), "fit: data: expected batches.*got None"),  # pyright: ignore
    "a module for a state": (lambda: pc.evaluate(torch.nn.Linear(3, 3), []), r"evaluate\(state, data\): .*got Linear"),  # pyright: ignore
    "a path for a state": (lambda: pc.save("x", STATE), r"save\(state, path\): expected a State first, got 'x'"),  # pyright: ignore
    "monitor": (
        lambda: pc.EarlyStopping(monitor="eval/loss"),  # pyright: ignore[reportCallIssue]
        r"EarlyStopping\(\) got .*'monitor'; write EarlyStopping\(\"eval/loss\"\)",
    ),
    "no metric": (lambda: pc.ReduceOnPlateau(), r"'metric'; it is ReduceOnPlateau\(metric, hparam='lr'"),  # pyright: ignore
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_common_mistakes_are_answered_in_one_line(mistake: str) -> None:
    call, said = MISTAKES[mistake]
    with pytest.raises(TypeError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_functions_of_methods_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(functional.mixup_batch)) is functional.mixup_batch
