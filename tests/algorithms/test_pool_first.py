"""Poolings first: the order of layers, the same function before activations, names, nested and shared modules."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from purecompose.algorithms import pool_first
from purecompose.functional import apply_surgery
from tests.algorithms.surgery_checks import applied, make_images, make_state


def block(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *layers, nn.Flatten(), nn.LazyLinear(3))


def kinds(net: nn.Module) -> list[str]:
    return [type(child).__name__ for child in net.children()]


@pytest.mark.parametrize("act", [nn.ReLU(), nn.LeakyReLU(0.1), nn.ReLU6(), nn.Sigmoid(), nn.Tanh(), nn.Hardtanh()])
def test_before_activations_the_function_is_the_same(act: nn.Module) -> None:
    net = block(nn.BatchNorm2d(4), act, nn.MaxPool2d(3, stride=2, padding=1))
    images = make_images()
    expected = net(images)
    changed = apply_surgery(net, pool_first(norms=False))
    assert kinds(changed)[1:4] == ["BatchNorm2d", "MaxPool2d", type(act).__name__]
    tolerance = 1e-6 if isinstance(act, nn.Sigmoid | nn.Tanh) else 0.0  # whose roundings depend on the place in memory
    torch.testing.assert_close(changed(images), expected, rtol=tolerance, atol=tolerance)


def test_before_norms_the_norm_has_the_statistics_of_pooled_values() -> None:
    net = block(nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    images = make_images()
    net(images)  # gives the last layer its shape
    changed = apply_surgery(net, pool_first())
    pooled = F.max_pool2d(net[0](images), 2)
    centred = (pooled - pooled.mean((0, 2, 3), keepdim=True)) / pooled.var((0, 2, 3), correction=0, keepdim=True).sqrt()
    torch.testing.assert_close(changed(images), net[5](centred.relu().flatten(1)), rtol=1e-4, atol=1e-4)


def test_names_parameters_and_momentum_are_kept() -> None:
    net = nn.Sequential(block(nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), nn.ReLU(), nn.MaxPool1d(1))
    net(make_images())
    state = make_state(net)
    end, _ = applied(state, pool_first())
    assert set(end.params) == set(state.params)
    assert all(torch.equal(end.params[name], value) for name, value in state.params.items())
    assert kinds(end.model.module) == ["PooledFirstSequential", "MaxPool1d", "ReLU"]
    assert kinds(end.model.module.get_submodule("0"))[:4] == ["Conv2d", "MaxPool2d", "BatchNorm2d", "ReLU"]


def test_a_layer_in_two_places_stays_in_both() -> None:
    act = nn.ReLU()
    net = nn.Sequential(nn.Conv2d(2, 4, 3), act, nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), act, nn.MaxPool2d(2))
    changed: Any = apply_surgery(net, pool_first())
    assert [type(module).__name__ for module in changed] == ["Conv2d", "MaxPool2d", "ReLU"] * 2
    images = make_images(size=9)
    assert torch.equal(changed(images), net(images))


@pytest.mark.parametrize(
    "layer", [nn.GELU(), nn.LeakyReLU(-0.1), nn.Dropout(0.1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)]
)
def test_poolings_stay_behind_other_layers(layer: nn.Module) -> None:
    with pytest.warns(UserWarning, match="pool_first changed nothing"):
        assert kinds(apply_surgery(block(layer, nn.MaxPool2d(2))[:3], pool_first()))[1:] == [
            type(layer).__name__,
            "MaxPool2d",
        ]


def test_layers_with_hooks_and_indices_are_not_moved() -> None:
    watched = nn.ReLU()
    watched.register_forward_hook(lambda *_: None)
    for layers in ((watched, nn.MaxPool2d(2)), (nn.ReLU(), nn.MaxPool2d(2, return_indices=True))):
        with pytest.warns(UserWarning, match="pool_first changed nothing"):
            apply_surgery(nn.Sequential(nn.Conv2d(2, 4, 3), *layers), pool_first())


def test_a_second_step_with_the_method_changes_what_the_first_has_left() -> None:
    def part() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(1))

    state = make_state(nn.Sequential(part(), part(), nn.Flatten(), nn.Linear(72, 3)))
    for number in ("0", "1"):
        state, _ = applied(state, pool_first(where=number))
    assert state.context.replaced["pool_first"] == ("0", "1")
    assert all(kinds(state.model.module.get_submodule(n))[1:] == ["MaxPool2d", "ReLU"] for n in ("0", "1"))


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)


class Stage(nn.Sequential):
    scale = 2.0

    def scaled(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self(inputs)


class Scaled(nn.Module):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.stage.scaled(inputs)


def test_sequences_at_any_depth_are_reordered_but_for_frozen_ones() -> None:
    def part() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(1))

    frozen = part().requires_grad_(False)
    net: Any = apply_surgery(nn.Sequential(*part(), Residual(part()), frozen), pool_first())
    assert kinds(net)[:3] == kinds(net[3].body) == ["Conv2d", "MaxPool2d", "ReLU"]
    assert kinds(net[4]) == ["Conv2d", "ReLU", "MaxPool2d"]
    state = make_state(nn.Sequential(*part(), Residual(part()), frozen, nn.Flatten(), nn.Linear(72, 3)))
    assert applied(state, pool_first())[0].context.frozen == {"4.0.weight", "4.0.bias"}


def test_a_subclass_keeps_its_attributes_and_methods() -> None:
    stage = Stage(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    stage.scale = 3.0
    net: Any = apply_surgery(Scaled(stage), pool_first())
    assert kinds(net.stage) == ["Conv2d", "MaxPool2d", "ReLU"]
    images = make_images()
    assert torch.equal(net(images), Scaled(stage)(images))


class WithoutMax(nn.MaxPool2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(input, self.kernel_size)


class SameMax(nn.MaxPool2d):
    pass


def test_a_pooling_with_its_own_forward_stays_where_it_is() -> None:
    for pool, moved in ((WithoutMax(2), False), (SameMax(2), True)):
        net: Any = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), pool))
        with contextlib.nullcontext() if moved else pytest.warns(UserWarning, match="pool_first changed nothing"):
            end: Any = apply_surgery(net, pool_first())
        assert kinds(end[2]).index(type(pool).__name__) == (1 if moved else 2)
        assert torch.equal(end(make_images()), net(make_images()))


def test_what_one_method_has_changed_another_leaves_alone() -> None:
    net: Any = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)), nn.ReLU()
    )
    net.append(nn.MaxPool2d(1))
    for where, norms in (("0", False), (None, True)):
        net = apply_surgery(net, pool_first(norms, where=where))
    assert kinds(net) == ["PooledFirstSequential", "MaxPool2d", "ReLU"]
    assert kinds(net[0]) == ["Conv2d", "BatchNorm2d", "MaxPool2d", "ReLU"]
