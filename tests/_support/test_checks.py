"""Argument checks use uniform error messages."""

import math
import pickle
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import functional
from purecompose._support.specs import (
    check_flag,
    check_keywords,
    check_number,
    check_whole,
    is_number,
    shown,
    suggests_keywords,
)


class Index:
    def __index__(self):
        return 3


def test_valid_arguments_are_returned():
    assert check_flag(True, "f: x") is True
    assert check_whole(3, "f: x", 0, 3) == check_whole(Index(), "f: x") == 3
    assert check_number(2, "f: x", 2, 3) == 2.0 and type(check_number(2, "f: x")) is float


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check_flag(1, "f: x"), TypeError, "f: x: expected True or False, got 1 (int)"),
        (lambda: check_whole(True, "f: x"), TypeError, "f: x: expected an int, got True (bool)"),
        (lambda: check_whole(2.0, "f: x", 1), TypeError, "f: x: expected an int >= 1, got 2.0 (float)"),
        (lambda: check_whole(0, "f: x", 1, 4), ValueError, "f: x: expected an int in [1, 4], got 0 (int)"),
        (lambda: check_whole(5, "f: x", high=4), ValueError, "f: x: expected an int <= 4, got 5 (int)"),
        (
            lambda: check_whole(torch.tensor(1), "f: x"),
            TypeError,
            "f: x: expected an int, got a torch.int64 tensor of shape ()",
        ),
        (lambda: check_number("1", "f: x"), TypeError, "f: x: expected a finite number, got '1' (str)"),
        (lambda: check_number(math.nan, "f: x"), ValueError, "f: x: expected a finite number, got nan (float)"),
        (
            lambda: check_number(0, "f: x", 0, 1, above=True, hint="1 is all"),
            ValueError,
            "f: x: expected a finite number in (0, 1], got 0 (int); 1 is all",
        ),
        (
            lambda: check_number(1.0, "f: x", 0, 1, below=True),
            ValueError,
            "f: x: expected a finite number in [0, 1), got 1.0 (float)",
        ),
        (lambda: check_number(0, "f: x", 0, above=True), ValueError, "f: x: expected a finite number > 0, got 0 (int)"),
    ],
)
def test_invalid_arguments_are_refused(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_a_bool_is_not_a_number_and_functions_and_long_values_are_short():
    assert is_number(1.5) and not is_number(True)
    assert shown(is_number) == "is_number (function)"
    assert shown("a" * 200) == f"'{'a' * 76}... (str)"


def loss(outputs: Any, targets: Any = None) -> None: ...


def count(given: Any) -> int:
    return len(given)


@pytest.mark.parametrize(
    ("name", "hint"), [("target", "did you mean 'targets'\\?"), ("mask", "it takes outputs, targets")]
)
def test_an_unknown_keyword_is_answered_by_the_right_one_or_by_all(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^loss\(\) got an unexpected keyword argument '{name}'; {hint}$"):
        check_keywords(["outputs", name], loss)


def test_functions_that_take_any_keyword_are_not_checked() -> None:
    check_keywords(["anything"], lambda **options: options)


def test_factories_and_states_name_their_arguments() -> None:
    with pytest.raises(TypeError, match=r"ema\(\) got .*'rate'; it takes half_life, smoothing, .*name"):
        pc.algorithms.ema(rate=0.99)  # pyright: ignore[reportCallIssue]
    options: dict[str, Any] = {"loss": pc.losses.mse, "optimizer": pc.optim.sgd(0.1)}
    with pytest.raises(TypeError, match=r"State.create\(\) got .*'seed'; write key=3$"):
        pc.State.create(torch.nn.Linear(2, 2), **options, seed=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"State.create\(\) got .*'batches_in_epoch'; did you mean 'batches_per_epoch'"):
        pc.State.create(torch.nn.Linear(2, 2), **options, batches_in_epoch=3)  # pyright: ignore[reportCallIssue]


def test_a_missing_argument_shows_the_signature_and_errors_within_the_call_are_unchanged() -> None:
    checked: Any = suggests_keywords(loss)
    with pytest.raises(TypeError, match=r"missing 1 required .*'outputs'; it is loss\(outputs, targets=None\)$"):
        checked()
    with pytest.raises(TypeError, match="^object of type 'int' has no len") as caught:
        suggests_keywords(count)(3)
    assert caught.traceback[-1].name == "count"


X = torch.ones(2, 3)
STATE = pc.State.create(torch.nn.Linear(3, 3), loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1), duration="1ba", key=0)
STEP: Any = pc.compose(pc.loop_events)
MISTAKES: dict[str, tuple[Any, str]] = {
    "string for an optimizer": (
        lambda: pc.State.create(torch.nn.Linear(3, 3), loss=pc.losses.mse, optimizer="Adam", key=0),  # pyright: ignore
        r"such as optim\.sgd\(0\.1\) .*got 'Adam' ",
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
        r"EarlyStopping\(\) got .*'monitor'; write metric=\"eval/loss\"$",
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
