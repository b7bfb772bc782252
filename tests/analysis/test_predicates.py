"""Predicates on states."""

import math

import pytest
import torch

import purecompose as pc
from purecompose import compose, loop_events
from purecompose.analysis.predicates import loss_above, not_finite, weight_norm_above
from tests.helpers import make_batch, make_state


def after(loss: float) -> pc.State:
    state = make_state()
    return state.replace(loss=torch.tensor(loss), timestamp=state.timestamp.advance())


def test_loss_above() -> None:
    assert [loss_above(2.0)(after(loss)) for loss in (1.0, 2.0, 2.5, math.nan)] == [False, False, True, True]
    assert not loss_above(2.0)(make_state())  # before the first batch
    assert loss_above(2.0).__name__ == "loss_above(2.0)"


@pytest.mark.parametrize("field", ["params", "opt_state"])
def test_not_finite(field: str) -> None:
    state = compose(loop_events)(make_state(), make_batch())
    assert not not_finite()(state)
    broken = pc.tree.map(lambda leaf: leaf.masked_fill(leaf == leaf.max(), math.inf), getattr(state, field))
    assert not_finite()(state.replace(**{field: broken}))


def test_weight_norm_above() -> None:
    state = make_state()
    weight = state.params["0.weight"]
    state = state.replace(params={name: torch.zeros_like(param) for name, param in state.params.items()})
    state = state.replace(params={**state.params, "0.weight": torch.full_like(weight, 3 / math.sqrt(weight.numel()))})
    assert weight_norm_above(2.9)(state) and not weight_norm_above(3.1)(state)
    assert not weight_norm_above(2.9, "3.*")(state)
    many = pc.stack_states([state, state.replace(params={**state.params, "0.weight": 2 * state.params["0.weight"]})])
    assert weight_norm_above(5.9)(many) and not weight_norm_above(6.1)(many)
    with pytest.raises(ValueError, match="no parameter has a name like '9.*'"):
        weight_norm_above(1.0, "9.*")(state)
