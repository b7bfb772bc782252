"""Replaced modules in a skeleton: kept tensors, new names, and the unchanged original."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from purecompose.nn.model import from_module, to_module


class Tied(nn.Module):
    """A weight with two names, a module with two names, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.out.weight = self.embed.weight
        self.act: nn.Module = nn.ReLU()
        self.again: nn.Module = self.act
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.again(self.out(self.act(self.embed(x)))))


class Shift(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.register_buffer("shift", shift)

    def forward(self, x):
        return x + self.shift


def meta(*shape):
    return torch.zeros(shape, device="meta")


def test_a_module_is_replaced_at_all_its_places_and_the_rest_is_kept():
    parts = from_module(Tied())
    model = parts.model.with_modules({"act": nn.Tanh()})
    module = model.module
    assert isinstance(module, Tied) and module.again is module.act and isinstance(module.act, nn.Tanh)
    assert isinstance(parts.model.module.act, nn.ReLU)
    assert model != parts.model and model == parts.model.with_modules({"again": nn.Tanh()})
    assert (model.param_names, model.buffer_names) == (parts.model.param_names, parts.model.buffer_names)
    whole = to_module(model, parts.params, parts.buffers)
    assert isinstance(whole, Tied) and whole.out.weight is whole.embed.weight
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    reference = Tied()
    reference.load_state_dict({**parts.params, **parts.buffers, "out.weight": parts.params["embed.weight"]})
    reference.act = reference.again = nn.Tanh()
    assert torch.equal(whole(x), reference(x))


def test_new_tensors_get_names_and_their_ties_are_kept():
    parts = from_module(nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.ReLU()))
    shared = meta(2)
    model = parts.model.with_modules({"0": Shift(shared), "3": Shift(shared), "2": nn.Linear(2, 2, device="meta")})
    assert model.param_names == ("1.weight", "1.bias", "2.weight", "2.bias")
    assert model.buffer_names == ("0.shift",)
    for train in (True, False):
        skeleton = model.skeleton(train)
        with skeleton.bound(
            {**parts.params, "2.weight": torch.eye(2), "2.bias": torch.zeros(2)}, {"0.shift": torch.ones(2)}
        ) as module:
            found = module(torch.zeros(1, 2))
        expected = nn.functional.linear(torch.ones(1, 2), parts.params["1.weight"], parts.params["1.bias"]) + 1
        assert torch.equal(found, expected)


@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_new_modules_have_the_modes_of_replaced_ones(modes):
    # One more module is in training mode: a network entirely in evaluation mode would count as training.
    net = nn.Sequential(*[nn.Dropout().train(mode) for mode in modes], nn.Linear(1, 1))
    model = from_module(net).model.with_modules({str(i): nn.AlphaDropout() for i in range(len(modes))})
    assert [model.module.get_submodule(str(i)).training for i in range(len(modes))] == modes
    assert not any(child.training for child in model.skeleton(False).module.modules())


def test_the_root_can_be_replaced_and_nothing_is_a_copy():
    parts = from_module(nn.Linear(2, 2))
    assert isinstance(parts.model.with_modules({"": nn.Identity()}).module, nn.Identity)
    assert parts.model.with_modules({}) == parts.model


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match="nowhere"):
        from_module(nn.Sequential(nn.ReLU())).model.with_modules({"nowhere": nn.Tanh()})


def test_a_module_with_real_weights_is_refused():
    model = from_module(nn.Sequential(nn.ReLU())).model
    with pytest.raises(ValueError, match=r"expected 0\.weight on meta"):
        model.with_modules({"0": nn.Linear(2, 2)})
