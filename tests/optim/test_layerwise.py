"""Learning rates by layers: groups that torch's parameter groups confirm."""

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import compose, loop_events, optim, schedule
from purecompose.nn import models


BATCH = torch.randint(0, 7, (2, 8), generator=torch.Generator().manual_seed(0))


def test_every_parameter_trains_at_its_layers_rate():
    net = models.gpt(7, 8, width=8, depth=3)
    groups = optim.layerwise(net, 1.0, 0.5)
    state = pc.State.create(net, loss=lambda out, target, reduction="mean": out.sum(), optimizer=optim.sgd(1.0), key=0)
    slow = state.replace(optimizer=optim.sgd(1.0, groups=groups))
    plain, after = (compose(loop_events)(one, (BATCH, BATCH)) for one in (state, slow))
    for name, start in state.params.items():
        block = next((int(part) for part in name.split(".") if part.isdigit()), None)
        moved, full = after.params[name] - start, plain.params[name] - start
        is_first = name in groups
        factor = 0.5**4 if is_first else 1.0 if block is None else 0.5 ** (3 - block)
        torch.testing.assert_close(moved, factor * full, rtol=1e-4, atol=1e-5)
    assert {groups[name]["lr"] for name in groups} == {0.0625, 0.125, 0.25, 0.5}


def test_blocks_may_be_named_and_rates_scheduled():
    net = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    lr = 0.1 * schedule.cosine()
    groups = optim.layerwise(net, lr, 0.5, blocks="1")
    assert list(groups) == ["0.weight", "0.bias", "1.a.*", "1.b.*"]
    assert groups["1.b.*"]["lr"] == lr * 0.5
    with pytest.raises(ValueError, match="has no nn.ModuleList"):
        optim.layerwise(nn.Linear(2, 2), 0.1, 0.5)
    with pytest.raises(ValueError, match="got one without children"):
        optim.layerwise(net, 0.1, 0.5, blocks="0")
