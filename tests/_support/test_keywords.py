"""Suggestions for keyword arguments that a function does not have."""

from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose._support.keywords import check_keywords


def loss(outputs: Any, targets: Any = None) -> None: ...


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
