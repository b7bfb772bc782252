"""Monitors of layers: manually computed numbers, states untouched."""

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import State, compose, fit, loop_events, losses, optim
from purecompose.observers import Recorder, activations, updates
from tests.observers.observer_helpers import make_batches, make_population, make_state


class Kept:
    """A sink that keeps its records."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def write(self, records: list[dict[str, float]]) -> None:
        self.records += records


def test_updates_are_those_of_the_batch() -> None:
    start, kept, states = make_state("3ba"), Kept(), []
    observers = [Recorder(kept, monitors=updates()), lambda event, state: states.append(dict(state.params))]
    fit(compose(loop_events), start, make_batches(), observers=observers)
    batches = [record for record in kept.records if "loss" in record]
    assert not any(name.startswith("update") for name in batches[0])
    by_batch = {}
    for params in states:
        by_batch.setdefault(tuple(float(p.sum()) for p in params.values()), params)
    before, after = list(by_batch.values())[1:3]
    for name, param in after.items():
        moved = (param - before[name]).norm().item()
        assert batches[1][f"update/{name}"] == pytest.approx(moved, rel=1e-5)
        assert batches[1][f"update_ratio/{name}"] == pytest.approx(moved / before[name].norm().item(), rel=1e-5)


def test_updates_of_a_population_are_apart() -> None:
    states, monitor = make_population(2), updates()
    assert monitor(states) == {}
    moved = states.replace(params={name: param + 1 for name, param in states.params.items()})
    assert all(value.shape == (2,) for value in monitor(moved).values())


def test_activations_are_those_of_the_network_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
    state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.1))
    inputs, generator = torch.randn(5, 4), torch.get_rng_state()
    found = activations(inputs)(state)
    assert torch.equal(torch.get_rng_state(), generator)
    hidden = net.eval()[:3](inputs).detach()
    assert found["activation_mean/3"].item() == pytest.approx(hidden.mean().item(), rel=1e-5)
    assert found["activation_std/2"].item() == pytest.approx(hidden.std(correction=0).item(), rel=1e-5)
    assert found["activation_max/2"].item() == pytest.approx(hidden.abs().max().item(), rel=1e-5)
    assert found["activation_zeros/2"].item() == pytest.approx((hidden == 0).float().mean().item())
    assert {name.rpartition("/")[2] for name in found} == {"0", "1", "2", "3"}


def test_activations_of_networks_with_several_inputs_and_of_no_layer() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layer(x + y)

    state = State.create(Both(), loss=losses.mse, optimizer=optim.sgd(0.1), input_field=[0, 1], target_field=2)
    x, y = torch.ones(2), torch.zeros(2)
    as_list, as_mapping = activations([x, y])(state), activations({"x": x, "y": y})(state)
    pc.tree.equal(as_list, as_mapping)
    assert as_list["activation_mean/layer"] == state.forward([x, y]).mean()
    with pytest.raises(ValueError, match="no layer has a name like 'head"):
        activations([x, y], "head*")(state)


def test_a_parameter_of_zeros_has_a_ratio_of_zero() -> None:
    state = make_state("1ba")
    blank = state.replace(params={name: torch.zeros_like(param) for name, param in state.params.items()})
    monitor = updates()
    monitor(blank)
    assert all(value == 0 for value in monitor(blank).values())
    assert all(value == 0 for name, value in monitor(state).items() if "ratio" in name)
