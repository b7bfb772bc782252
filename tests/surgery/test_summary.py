"""A network at a glance: shapes and counts are those of the network."""

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, losses, optim, tree
from tests.helpers import make_batch, make_cnn, make_state


def test_shapes_and_counts() -> None:
    state, batch = make_state(make_cnn()), make_batch(shape=(2, 6, 6))
    before = tree.map(torch.clone, state.params)
    found = pc.surgery.summary(state, batch)
    assert tree.equal(before, state.params)
    by_name = {layer.name: layer for layer in found.layers}
    net = pc.to_module(state)
    for name, module in net.named_modules():
        if not list(module.children()):
            assert by_name[name].kind == type(module).__name__
            assert by_name[name].num_params == sum(p.numel() for p in module.parameters())
    assert found.num_params == found.num_trainable == sum(p.numel() for p in net.parameters())
    held = [*net.parameters(), *net.buffers()]
    assert found.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in held)
    last = state.forward(batch[0])
    assert found.layers[-1].output == tree.describe(last)


class Odd(nn.Module):
    """Parameters beside modules, a tie, a layer that is not called, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.idle = nn.Parameter(torch.ones(3)), nn.Linear(2, 2)
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * self.first(x), self.second(x)


def test_odd_networks() -> None:
    state = State.create(Odd(), loss=losses.mse, optimizer=optim.sgd(0.1), input_field="x").replace(frozen=["idle.*"])
    found = pc.surgery.summary(state, {"x": torch.zeros(4, 3)})
    rows = {layer.name: layer[1:] for layer in found.layers}
    assert rows[""] == ("Odd", "float32[4, 3], float32[4, 3]", 3, 3)
    assert rows["idle"] == ("Linear", "", 6, 0)
    assert rows["first"][2] == 9 and rows["second"][2] == 0
    assert (found.num_params, found.num_trainable) == (18, 12)
    with pytest.raises(KeyError, match="no member 'x'"):
        pc.surgery.summary(state, {"y": torch.zeros(4, 3)})


def test_an_argument_that_is_not_a_state_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a State, got Linear"):
        pc.surgery.summary(nn.Linear(2, 2), None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"summary\(unstack_states\(state\)\[0\], batch\)"):
        pc.surgery.summary(pc.stack_states([make_state(), make_state()]), make_batch())
