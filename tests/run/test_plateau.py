"""ReduceOnPlateau equals torch's ReduceLROnPlateau, resumes exactly, and treats members separately."""

import math
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Checkpoints, Evaluator, ReduceOnPlateau, compose, fit, loop_events, optim
from tests.helpers import assert_same, make_batches, make_state


BATCHES = make_batches(2)


def state_with(lr: float = 1.0, **options):
    return make_state(optimizer=optim.sgd(pc.hparam("lr", lr)), duration="100ep", **options)


def seen(reduce: ReduceOnPlateau, values) -> list[float]:
    """Return the hparam after each epoch of a run with these values."""
    state, found = reduce.init(state_with()), []
    for value in values:
        state = state.replace(timestamp=state.timestamp.advance_epoch())
        state = reduce.see(state, {"eval/loss": value})
        found.append(state.hparams["lr"].item())
    return found


@pytest.mark.parametrize("patience", [0, 1, 3])
@pytest.mark.parametrize("cooldown", [0, 2])
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("seed", range(3))
def test_it_equals_reduce_lr_on_plateau_of_torch(patience, cooldown, mode, seed):
    drawn = torch.randn(40, generator=torch.Generator().manual_seed(seed)).cumsum(0).div(4).tolist()
    drawn[7] = math.nan
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    settings: dict[str, Any] = {
        "factor": 0.5,
        "min_lr": 0.01,
        "threshold": 0.25,
        "threshold_mode": "abs",
        "mode": mode,
        "eps": 0.0,
    }
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience, cooldown=cooldown, **settings)
    expected = []
    for value in drawn:
        scheduler.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    reduce = ReduceOnPlateau(
        "eval/loss", "lr", 0.5, f"{patience + 1}ep", f"{cooldown}ep", min_delta=0.25, minimum=0.01, mode=mode
    )
    assert seen(reduce, drawn) == pytest.approx(expected)
    assert len(set(expected)) > 2


def test_fit_reduces_by_the_evaluations_and_resumes_exactly(tmp_path):
    def away(outputs, targets):
        return outputs.square().mean(1)

    arguments: dict[str, Any] = {
        "evaluate": Evaluator(BATCHES, {"away": away}, "1ep"),
        "adjust": ReduceOnPlateau("eval/away", factor=0.5, patience="1ep", mode="min"),
    }
    step = compose(loop_events)
    whole = fit(step, state_with(0.5), BATCHES, duration="6ep", **arguments)
    assert 0 < whole.hparams["lr"] < 0.5
    checkpoints = Checkpoints(tmp_path, "1ep")
    fit(step, state_with(0.5), BATCHES, duration="3ep", checkpoints=checkpoints, **arguments)
    resumed = fit(step, state_with(0.5), BATCHES, duration="6ep", checkpoints=checkpoints, resume="auto", **arguments)
    assert_same(resumed, whole)


def test_members_of_a_population_are_reduced_separately():
    reduce = ReduceOnPlateau("eval/loss", factor=0.5, patience="1ep")
    states = reduce.init(pc.stack_states([state_with(key=0), state_with(key=1)]))
    for values in ([1.0, 1.0], [0.5, 1.0], [0.7, 0.5]):
        states = states.replace(timestamp=states.timestamp.advance_epoch())
        states = reduce.see(states, {"eval/loss": values})
    assert states.hparams["lr"].tolist() == [0.5, 0.5]
    first = pc.unstack_states(states)[0]
    assert first.slots[reduce.name]["best"] == 0.5
