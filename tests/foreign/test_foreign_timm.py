"""A model of timm, with weights drawn here, trains without changes."""

import importlib
import warnings
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import State, losses, optim, tree


def imported() -> Any:
    """Import timm or skip; with a torch that it was not built for, torchvision raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("timm")
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"timm does not import: {error}")


@pytest.mark.parametrize(
    ("name", "options"), [("resnet10t", {}), ("test_vit", {"img_size": 32}), ("test_efficientnet", {})]
)
def test_a_step_equals_a_manual_loop(name, options):
    timm = imported()
    torch.manual_seed(0)
    net = timm.create_model(name, pretrained=False, num_classes=3, **options).double()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = images, torch.tensor([0, 1, 2, 0])
    state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.01), key=0, duration="2ba")
    step = pc.compose(pc.loop_events, [])
    state = step.init(state)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(2):
        state = step(state, batch)
        optimizer.zero_grad()
        losses.cross_entropy(net(batch[0]), batch[1]).backward()
        optimizer.step()
    expected = {name: param.detach() for name, param in net.named_parameters()}
    near = tree.differences(state.params, expected, tolerance=lambda _: tree.Tolerance(1e-8, 1e-10))
    assert list(map(str, near)) == []
