"""Methods on the model as functions of plain networks: the network that the method makes, the given one untouched."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import functional, surgery
from purecompose.algorithms import FACTORIES
from purecompose.nn import models
from tests.helpers import assert_same, make_state


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.GroupNorm(2, 16),
    )


def language():
    torch.manual_seed(0)
    return models.gpt(32, 8, width=16, depth=1)


METHODS = {
    "alibi": (language, {}, {"train_sequence_length_scaling": 1}),
    "blurpool": (convolutional, {"min_channels": 8}, {}),
    "channels_last": (convolutional, {}, {}),
    "factorize": (language, {"min_features": 8, "latent_features": 2}, {}),
    "gated_linear_units": (language, {"act_fn": "silu"}, {}),
    "ghost_batchnorm": (convolutional, {"ghost_batch_size": 2}, {}),
    "low_precision_groupnorm": (convolutional, {}, {}),
    "low_precision_layernorm": (language, {}, {}),
    "squeeze_excite": (convolutional, {"latent_channels": 2, "min_channels": 8}, {}),
    "stochastic_depth": (lambda: models.resnet8(3, 10, width=4), {"drop_rate": 0.5}, {}),
    "weight_standardization": (convolutional, {"n_last_layers_ignore": 1}, {}),
}
DRAWING = ("gated_linear_units", "squeeze_excite")


def applied(name, net, **settings):
    key = [0] if name in DRAWING else []
    return getattr(functional, f"apply_{name}")(*key, net, **settings)


@pytest.mark.parametrize("name", METHODS)
def test_the_function_gives_the_network_that_the_method_makes(name):
    make, settings, more = METHODS[name]
    net = make()
    before = copy.deepcopy(net)
    new = applied(name, net, **settings)
    state = make_state(net, precision="bf16", key=0)
    state = pc.compose(pc.loop_events, [FACTORIES[name](**settings, **more)]).init(state)
    expected = pc.to_module(state)
    assert repr(new) == repr(expected)
    assert_same(new.state_dict(), expected.state_dict())
    assert [tensor.stride() for tensor in new.parameters()] == [tensor.stride() for tensor in expected.parameters()]
    assert repr(net) == repr(before)
    assert_same(net.state_dict(), before.state_dict())
    storages = {tensor.untyped_storage().data_ptr() for tensor in net.state_dict().values()}
    assert storages.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in new.state_dict().values())


def test_there_is_a_function_for_every_method_on_the_model():
    by_rules = {name.removesuffix("_rules") for name in vars(functional) if name.endswith("_rules")}
    without = {"no_op_model", "weight_standardization_undo"}
    assert by_rules - without | {"channels_last"} == set(METHODS)


def test_modes_frozen_parameters_and_ties_are_kept():
    net = convolutional()
    net[3].weight.requires_grad_(False)
    net[1].eval()
    new: Any = functional.apply_blurpool(net, min_channels=8)
    assert not new[3].conv.weight.requires_grad and new[0].weight.requires_grad
    assert [module.training for module in (new, new[1], new[3].conv)] == [True, False, True]
    assert not any(module.training for module in functional.apply_blurpool(net.eval(), min_channels=8).modules())
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    tied[1].weight = tied[0].weight
    new = functional.apply_ghost_batchnorm(tied)
    assert new[0].weight is new[1].weight is not tied[0].weight


def test_new_weights_only_depend_on_the_key():
    first, again, other = (functional.apply_squeeze_excite(key, convolutional(), 2, 8) for key in (1, 1, 2))
    assert_same(first.state_dict(), again.state_dict())
    assert not all(map(torch.equal, first.parameters(), other.parameters()))


def test_a_second_call_changes_nothing_and_the_network_trains():
    net: Any = functional.apply_blurpool(convolutional(), min_channels=8)
    again: Any = functional.apply_blurpool(net, min_channels=8)
    assert repr(again) == repr(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.ones(2, 3, 16, 16)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(net[0].weight, again[0].weight)
    pickle.loads(pickle.dumps(net))


def test_operate_takes_modules_and_reports():
    net: Any
    net, report = surgery.operate(nn.Sequential(nn.ReLU()), {nn.ReLU: lambda relu, site: nn.GELU()}, name="mine")
    assert repr(net[0]) == repr(nn.GELU()) and report.replaced == ("0",)
    with pytest.raises(TypeError, match="key is for a module"):
        surgery.operate(make_state(), {}, name="mine", key=1)  # pyright: ignore[reportArgumentType]


def test_a_network_with_nothing_to_replace_is_warned_about():
    with pytest.warns(UserWarning, match="blurpool changed nothing"):
        functional.apply_blurpool(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="apply_stochastic_depth has no effect"):
        functional.apply_stochastic_depth(nn.Linear(2, 2))
