"""Many states in one call equal those made one by one, and share one architecture where networks allow it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import State, optim


class Own(nn.Module):
    """A network with plain attributes, a buffer, and settings that may differ."""

    mask: torch.Tensor

    def __init__(self, scale: float = 2.0, act: Any = torch.relu, *, tied: bool = False) -> None:
        super().__init__()
        self.layers, self.scale, self.act = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), scale, act
        self.register_buffer("mask", torch.rand(3), persistent=False)
        if tied:
            self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x * self.scale * self.mask


def frozen() -> nn.Module:
    net = Own()
    net.layers[0].requires_grad_(False)
    return net


def tied_by_memory() -> nn.Module:
    net: Any = Own()
    net.layers[1].weight.data = net.layers[0].weight.data
    return net


def part_in_eval() -> nn.Module:
    net = Own()
    net.layers[0].eval()
    return net


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "scale": lambda: Own(3.0),
    "negative zero": lambda: Own(-0.0),
    "function": lambda: Own(act=torch.tanh),
    "tied": lambda: Own(tied=True),
    "tied by memory": tied_by_memory,
    "frozen": frozen,
    "mode": part_in_eval,
    "dtype": lambda: Own().double(),
    "class": lambda: nn.Sequential(nn.Linear(3, 3)),
}


def settings() -> dict[str, Any]:
    return {"loss": pc.losses.mse, "optimizer": optim.adam(pc.hparam("lr", 0.1)), "duration": "2ep"}


@pytest.mark.parametrize("make", [Own, lambda: nn.Sequential(nn.LSTM(3, 3), nn.Dropout(0.5)), lambda: Own(tied=True)])
def test_equal_those_made_one_by_one(make: Callable[[], nn.Module]) -> None:
    nets = [make() for _ in range(4)]
    many = State.create_many(nets, keys=[3, 1, 4, 1], **settings())
    for net, key, state in zip(nets, [3, 1, 4, 1], many, strict=True):
        alone = State.create(net, key=key, **settings())
        assert pc.tree.equal(state, alone)
        assert state.context == alone.context and state.context.settings == alone.context.settings
        assert all(map(torch.equal, pc.to_module(state).state_dict().values(), net.state_dict().values()))
    assert len({id(state.model) for state in many}) == 1


@pytest.mark.parametrize("name", DIFFERENT)
def test_networks_of_other_forms_keep_their_own(name: str) -> None:
    nets = [Own(), DIFFERENT[name](), Own(), DIFFERENT[name]()]
    many = State.create_many(nets, **settings())
    assert many[0].model is many[2].model and many[0].context.frozen == frozenset()
    for index, net in enumerate(nets):
        alone = State.create(net, key=index, **settings())
        assert pc.tree.equal(many[index], alone) and many[index].context == alone.context
    assert many[0].context != many[1].context


def test_objects_that_are_not_compared_are_split_in_full() -> None:
    nets = [Own(act=lambda x, shift=shift: x + shift) for shift in (0.0, 1.0)]
    first, second = State.create_many(nets, **settings())
    assert first.model is not second.model
    x = torch.zeros(1, 3)
    assert not torch.equal(first.forward(x), second.replace(params=first.params, buffers=first.buffers).forward(x))


def test_bad_keys_and_settings_are_named() -> None:
    with pytest.raises(ValueError, match="a key for each of 1 networks, got 2"):
        State.create_many([Own()], keys=[0, 1], **settings())
    with pytest.raises(TypeError, match="keys=range"):
        State.create_many([Own()], key=0, **settings())
    with pytest.raises(TypeError, match="nn.Module"):
        State.create_many([Own(), "net"], **settings())  # type: ignore[list-item]
    with pytest.raises(TypeError, match="epochs"):
        State.create_many([Own()], epochs=3, **settings())
