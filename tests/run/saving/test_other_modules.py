"""Weights are only loaded into modules of the types they were trained in; others would compute another function."""

import pathlib

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import State, Step, Trait, algorithms, compose, loop_events
from purecompose.testing.shipped import SHIPPED
from purecompose.testing.tasks import TASKS
from tests.helpers import make_state


def operated(name: str) -> tuple[Step, State, State]:
    """Return a step with a method that operates on the network, and a state before and after its INIT."""
    row = SHIPPED[name]
    step = compose(loop_events, [eval(row.examples[0], dict(vars(algorithms)))])
    for task in row.accepted:
        plain = TASKS[task].make_state(0, duration="4ep", batches_per_epoch=2)
        changed = step.init(plain)
        if changed.model != plain.model:
            return step, plain, changed
    raise AssertionError(f"{name} changes no task's network")


SURGERY = [
    name
    for name, row in SHIPPED.items()
    if any(Trait.REQUIRED_ON_LOAD in eval(example, dict(vars(algorithms))).traits for example in row.examples)
]


@pytest.mark.parametrize("name", SURGERY)
def test_the_weights_of_operated_networks_are_refused_by_plain_ones_and_the_reverse(
    name: str, tmp_path: pathlib.Path
) -> None:
    step, plain, changed = operated(name)
    for saved, like in ((changed, plain), (plain, changed)):
        path = pc.saving.save_weights(saved, tmp_path / "net.safetensors")
        with pytest.raises(pc.errors.MismatchError, match=r"model: \S+: .* in the file, .* here"):
            pc.saving.load_weights(path, like)
        pc.save(saved, tmp_path / "one")
        for loading in (None, step):
            with pytest.raises(pc.errors.MismatchError, match=r"model: \S+: .* in the checkpoint, .* here"):
                pc.load(tmp_path / "one", like, step=loading)
    pc.save(changed, tmp_path / "one")
    with pytest.raises(pc.errors.MismatchError, match=f"{name}: changed the model of the checkpoint"):
        pc.load(tmp_path / "one", plain, strict=False)
    assert pc.tree.equal(pc.load(tmp_path / "one", changed), changed)
    assert pc.tree.equal(
        pc.saving.load_weights(pc.saving.save_weights(changed, tmp_path / "net"), changed).params, changed.params
    )


@pytest.mark.parametrize("name", SURGERY)
def test_a_state_knows_how_many_modules_a_method_has_replaced(name: str) -> None:
    step, plain, changed = operated(name)
    there, here = (dict(state.model.module.named_modules()) for state in (plain, changed))
    found = changed.context.replaced[name]
    assert found and all(repr(there[one]) != repr(here[one]) for one in found)
    assert step.init(changed).context.replaced == changed.context.replaced


def test_standardized_filters_can_be_loaded_into_a_plain_network_on_request(
    tmp_path: pathlib.Path,
) -> None:
    _, plain, changed = operated("weight_standardization")
    path = pc.saving.save_weights(changed, tmp_path / "net.safetensors")
    with pytest.warns(pc.errors.CheckpointWarning, match=r"0: StandardizedConv2d\(.*\) in the file, Conv2d\(.*\) here"):
        found = pc.saving.load_weights(path, plain, strict=False)
    inputs = torch.ones(2, 2, 6, 6)
    assert not torch.allclose(found.forward(inputs), changed.forward(inputs))


def test_other_settings_of_modules_are_a_warning(tmp_path: pathlib.Path) -> None:
    one, other = (make_state(nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(slope))) for slope in (0.1, 0.2))
    path = pc.saving.save_weights(one, tmp_path / "net.safetensors")
    pc.save(one, tmp_path / "one")
    expected = r"model: 1: LeakyReLU\(negative_slope=0.1\) in the {}, LeakyReLU\(negative_slope=0.2\) here"
    with pytest.warns(pc.errors.CheckpointWarning, match=expected.format("file")):
        pc.saving.load_weights(path, other)
    with pytest.warns(pc.errors.CheckpointWarning, match=expected.format("checkpoint")):
        pc.load(tmp_path / "one", other)


def test_a_replaced_module_is_one_difference_whatever_it_contains(tmp_path: pathlib.Path) -> None:
    pc.save(make_state(nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))), tmp_path / "one")
    with pytest.raises(pc.errors.MismatchError) as caught:
        pc.load(tmp_path / "one", make_state(nn.Sequential(nn.Linear(4, 3))))
    assert caught.value.differences[0].startswith("model: 0: Sequential() in the checkpoint, Linear(")
    assert sum(line.startswith("model: ") for line in caught.value.differences) == 1
