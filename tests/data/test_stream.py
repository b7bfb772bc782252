"""Runs without a data set: batches made from the state, with an environment that checkpoints include."""

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import purecompose as pc
from purecompose import Checkpoints, State, compose, data, fit, loop_events
from purecompose.errors import CheckpointWarning
from tests.helpers import Batch, assert_same, make_batch, make_mlp, make_state


class Rollouts:
    """An environment with draws of its own; a rollout by the current policy serves three steps."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(0)
        self.position = torch.zeros(8, 4)
        self.left: list[Batch] = []

    def __call__(self, state: State) -> Batch:
        if not self.left:
            noise = torch.from_numpy(self.draws.normal(size=(8, 4)).astype(np.float32))
            self.position = 0.9 * self.position + noise + 0.1 * state.forward(self.position)[:, :1]
            actions = pc.random.randint(state.rng("explore"), (8,), 0, 3)
            self.left = [(self.position + i, (actions + i) % 3) for i in range(3)]
        return self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws.bit_generator.state, "position": self.position, "left": self.left}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.draws.bit_generator.state = saved["draws"]
        self.position, self.left = saved["position"], saved["left"]


def start(**options: Any) -> State:
    return make_state(make_mlp(dropout=0.3), key=3, **{"duration": "11ba", **options})


def steps() -> dict[str, Any]:
    step = compose(loop_events)
    return {"composed": step, "compiled": pc.compile(step, backend="eager", quiet=True)}


def test_a_stream_sees_the_state_before_each_step() -> None:
    step, state, rollouts = compose(loop_events), start(), Rollouts()
    end = fit(step, state, data.stream(Rollouts()))
    for _ in range(11):
        state = step(state, rollouts(state))
    assert_same(end.params, state.params)
    assert end.timestamp.batch == 11


@pytest.mark.parametrize("form", steps())
@pytest.mark.parametrize("num", [3, 7])
def test_a_resumed_run_continues_with_the_same_environment(tmp_path: pathlib.Path, form: str, num: int) -> None:
    step, whole = steps()[form], Rollouts()
    end = fit(step, start(), data.stream(whole))
    first = Rollouts()
    fit(step, start(), data.stream(first), duration=f"{num}ba", checkpoints=Checkpoints(tmp_path, extra=first))
    again = Rollouts()
    checkpoints = Checkpoints(tmp_path, every="4ba", extra={"rollouts": again})
    with pytest.raises(pc.errors.MismatchError, match=r"extra: .* in the checkpoint, .*'rollouts'"):
        fit(step, start(), data.stream(again), checkpoints=checkpoints, resume="auto")
    checkpoints = Checkpoints(tmp_path, every="4ba", extra=again)
    resumed = fit(step, start(), data.stream(again), checkpoints=checkpoints, resume="auto")
    assert_same(resumed.params, end.params)
    assert_same(again.state_dict(), whole.state_dict())


def test_what_is_missing_on_one_side_is_reported(tmp_path: pathlib.Path) -> None:
    step, rollouts = compose(loop_events), Rollouts()
    saved = Checkpoints(tmp_path / "with", extra=rollouts)
    state = fit(step, start(), data.stream(rollouts), duration="3ba", checkpoints=saved)
    with pytest.warns(CheckpointWarning, match="is in it, and not restored: give fit the same argument"):
        fit(step, start(), data.stream(rollouts), checkpoints=Checkpoints(tmp_path / "with"), resume="auto")
    path = pc.save(state, tmp_path / "without", step=step)
    with pytest.warns(CheckpointWarning, match=r"without: Checkpoints\(extra=...\) is not in it"):
        fit(step, start(), data.stream(rollouts), checkpoints=Checkpoints(tmp_path, extra=rollouts), resume=path)
    newest = pc.saving.newest(tmp_path / "with")
    assert newest is not None and pc.load(newest, start(), step=step).timestamp.batch == 11


def test_misuse_of_a_stream_is_named() -> None:
    step = compose(loop_events)
    with pytest.raises(TypeError, match="expected a function state -> batch, got .*3"):
        data.stream(3)  # pyright: ignore[reportArgumentType]

    def generator(state: State) -> Any:
        yield make_batch()

    with pytest.raises(TypeError, match="generator.* returned .*expected one batch for each call"):
        fit(step, start(), data.stream(generator))
    with pytest.raises(ValueError, match="counted in epochs .* and data.stream has none"):
        fit(step, start(duration="2ep"), data.stream(Rollouts()))
    end = fit(step, start(duration="2ep", batches_per_epoch=3), data.stream(Rollouts()))
    assert (end.timestamp.batch, end.timestamp.epoch) == (6, 2)


def test_members_of_a_population_share_the_stream() -> None:
    states = pc.stack_states([start(), start().replace(key=pc.random.key(5))])

    def batch(state: State) -> Batch:
        inputs: Tensor = state.params["0.weight"].mean(0)
        return inputs, torch.zeros(8, dtype=torch.int64)

    assert fit(pc.population(compose(loop_events), 2), states, data.stream(batch)).timestamp.batch == 11
