"""Members of several forms train as populations of their own, with results in the order of the members."""

from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, optim


WIDTHS = [8, 3, 8, 5, 3]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.ReLU(), nn.Linear(width, 3))


@pytest.fixture
def members() -> list[State]:
    settings: dict[str, Any] = {"loss": pc.losses.cross_entropy, "optimizer": optim.sgd(0.1), "duration": "1ep"}
    torch.manual_seed(0)
    return State.create_many([mlp(width) for width in WIDTHS], keys=range(10, 15), **settings)


def data() -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=draw), torch.randint(3, (6,), generator=draw)) for _ in range(3)]


def test_members_train_as_in_their_own_runs_in_their_order(members: list[State]) -> None:
    step, sizes = compose(loop_events, [alg.mixup(0.2)]), []

    def fit(states: State, n: int) -> State:
        sizes.append(n)
        return pc.fit(pc.population(step, n), states, data())

    trained = pc.by_form(fit, members)
    assert sizes == [2, 2, 1]
    for before, after in zip(members, trained, strict=True):
        alone = pc.fit(step, before, data())
        torch.testing.assert_close(after.params, alone.params)
        assert torch.equal(after.key, before.key) and after.timestamp == alone.timestamp


def test_values_and_outputs_are_those_of_each_member(members: list[State]) -> None:
    step = compose(loop_events)
    scores = pc.by_form(lambda states, n: pc.evaluate(states, data(), step=pc.population(step, n)), members)
    outputs = pc.by_form(lambda states, n: pc.predict(states, data(), step=pc.population(step, n)), members)
    for member, score, output in zip(members, scores, outputs, strict=True):
        assert score == pytest.approx(pc.evaluate(member, data()), rel=1e-5)
        torch.testing.assert_close(output, pc.predict(member, data()))


def test_states_at_another_time_or_with_other_settings_are_groups_of_their_own(members: list[State]) -> None:
    one, *_ = members
    later = compose(loop_events)(one, data()[0])
    other = one.replace(optimizer=optim.sgd(0.2))
    assert pc.by_form(lambda states, n: [float(n)] * n, [one, later, other, one]) == [2.0, 1.0, 1.0, 2.0]


def test_bad_arguments_and_results_are_named(members: list[State]) -> None:
    assert pc.by_form(lambda states, n: states, []) == []
    with pytest.raises(TypeError, match="by_form: expected States, got str"):
        pc.by_form(lambda states, n: states, ["state"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"a row for each of 2 members, got float32\[3\]"):
        pc.by_form(lambda states, n: torch.ones(3), members)
