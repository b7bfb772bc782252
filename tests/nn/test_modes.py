"""Parts of a network that train in evaluation mode."""

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import compose, loop_events, optim
from tests.helpers import assert_close, make_batches, make_state, run_steps


class Tuned(nn.Module):
    """A wrapper in training mode around a backbone in evaluation mode, as those of PEFT around pretrained networks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(8)))
        self.backbone.double().eval().requires_grad_(False)
        self.head = nn.Linear(8, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))


def flags(net: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in net.named_modules()}


@pytest.mark.parametrize("mode", ["eval_mode", "train_mode"])
def test_a_backbone_trains_in_the_mode_that_is_chosen(mode: str) -> None:
    batches = make_batches(5, dtype=torch.float64)
    state = make_state(Tuned(), optimizer=optim.sgd(0.1), **{mode: ["backbone"]})
    end = run_steps(compose(loop_events), state, batches)

    net = Tuned()
    net.backbone.train(mode == "train_mode")
    optimizer = torch.optim.SGD(net.head.parameters(), 0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    assert_close({**end.params, **end.buffers}, dict([*net.named_parameters(), *net.named_buffers()]), atol=1e-12)
    assert flags(pc.to_module(end)) == flags(net)


def test_the_pattern_of_the_inner_module_decides() -> None:
    model = make_state(Tuned(), train_mode=["backbone"], eval_mode=["backbone.3", "head"]).model
    trained = {name for name, trains in flags(model.module).items() if trains}
    assert trained == {"", "backbone", "backbone.0", "backbone.1", "backbone.2"}
    assert not any(flags(model.skeleton(train=False).module).values())
    assert make_state(Tuned(), eval_mode=["*"]).model != make_state(Tuned(), train_mode=["*"]).model


def test_wrong_patterns_are_errors() -> None:
    with pytest.raises(TypeError, match=r"eval_mode: expected names of modules or patterns.*got 'backbone'"):
        make_state(Tuned(), eval_mode="backbone")
    with pytest.raises(ValueError, match="train_mode: 'back' matches no module; the names are backbone, backbone.0, "):
        make_state(Tuned(), train_mode=["back"])
    with pytest.raises(ValueError, match="'head' matches both"):
        make_state(Tuned(), train_mode=["head"], eval_mode=["*"])


def test_other_modes_are_reported_when_a_run_is_resumed(tmp_path: pathlib.Path) -> None:
    step = compose(loop_events)
    options: dict[str, Any] = {"loss": pc.losses.cross_entropy, "optimizer": optim.sgd(0.1)}
    settled = pc.State.create(Tuned(), eval_mode=["backbone"], **options)
    moving = pc.State.create(Tuned(), train_mode=["backbone"], **options)
    pc.save(settled, tmp_path / "run", step=step)
    with pytest.warns(pc.errors.CheckpointWarning, match=r"eval_mode: \['backbone'\] in the checkpoint, \[\] here"):
        pc.load(tmp_path / "run", moving, step=step)
