"""Stochastic depth and ghost batch norm on blocks of timm and Hugging Face: imitations, and the real ones."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import algorithms as alg, compose, functional, loop_events
from purecompose.nn.layers import DropPath, GhostBatchNorm, drop_paths


class TimmDropPath(nn.Identity):
    """The module that timm inserts for a rate above 0."""


class Transformer(nn.Module):
    """A block with the structure of timm's ViT block."""

    def __init__(self, path: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop_path1 = nn.LayerNorm(4), nn.Linear(4, 4), path()
        self.norm2, self.mlp, self.drop_path2 = nn.LayerNorm(4), nn.Linear(4, 4), path()

    def forward(self, input: Tensor) -> Tensor:
        input = input + self.drop_path1(self.attn(self.norm1(input)))
        return input + self.drop_path2(self.mlp(self.norm2(input)))


class Residual(nn.Module):
    """A block with the structure of timm's ResNet block, where `None` drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Linear(4, 4), nn.ReLU()
        self.drop_path: nn.Module | None = None

    def forward(self, input: Tensor) -> Tensor:
        branch = self.conv(input)
        if self.drop_path is not None:
            branch = self.drop_path(branch)
        return self.act(branch + input)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Transformer(), Residual(), Transformer(TimmDropPath), Residual())


INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def test_drop_paths_are_known_by_name_and_kind() -> None:
    blocks = [(drop_paths(block)) for block in network()]
    assert blocks == [("drop_path1", "drop_path2"), ("drop_path",), ("drop_path1", "drop_path2"), ("drop_path",)]
    other: Any = nn.Module()
    other.drop_path, other.drop_path_rate, other.drop_paths = nn.Dropout(), None, nn.Identity()
    other.drop_path1 = DropPath()
    assert drop_paths(other) == ()


@pytest.mark.parametrize("method", ["block", "sample"])
def test_rate_1_leaves_the_shortcuts_and_rate_0_the_network(method: Any) -> None:
    net = network()
    shortcuts = functional.apply_surgery(net, alg.stochastic_depth(method, 1.0, "uniform"))
    torch.testing.assert_close(shortcuts(INPUTS), INPUTS.relu())
    kept = functional.apply_surgery(net, alg.stochastic_depth(method, 1e-9))
    torch.testing.assert_close(kept(INPUTS), net(INPUTS))


def test_rates_count_blocks_and_parameters_keep_their_names() -> None:
    state = pc.State.create(network(), loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1), key=0, duration="4ba")
    step = compose(loop_events, [alg.stochastic_depth("sample", 0.4)])
    after = step.init(state)
    rates = {name: round(buffer.item(), 6) for name, buffer in after.buffers.items()}
    assert rates == {
        "0.drop_path1.drop_rate": 0.1,
        "0.drop_path2.drop_rate": 0.1,
        "1.drop_path.drop_rate": 0.2,
        "2.drop_path1.drop_rate": 0.3,
        "2.drop_path2.drop_rate": 0.3,
        "3.drop_path.drop_rate": 0.4,
    }
    assert after.params.keys() == state.params.keys()
    again = functional.apply_surgery(pc.to_module(after), alg.stochastic_depth("sample", 0.4))
    assert repr(again) == repr(pc.to_module(after))
    with pytest.raises(ValueError, match="expected blocks with method 'block', got 'sample' in '0.drop_path1'"):
        functional.apply_surgery(pc.to_module(after), alg.stochastic_depth("block"))


@pytest.mark.parametrize("method", ["block", "sample"])
def test_branches_are_dropped_with_the_frequency_of_the_rate(method: Any) -> None:
    layer, ones = DropPath(method, 0.25), torch.ones(8, 2, 3)
    torch.manual_seed(0)
    rows = torch.stack([layer(ones) for _ in range(500)])
    assert set(rows.unique().tolist()) == {0.0, 1.0}
    assert ((rows == rows[:, :, :1, :1]).all() and (rows == rows[:, :1]).all()) == (method == "block")
    assert abs(rows.mean() - 0.75) < 0.05
    torch.testing.assert_close(layer.eval()(ones), 0.75 * ones)


# The real ones


def imported(name: str):
    """Import the package or skip; with a torch that it was not built for, torchvision raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"{name} does not import: {error}")


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [("resnet10t", {}, 4), ("test_vit", {"img_size": 32}, 12), ("test_efficientnet", {"drop_path_rate": 0.1}, 5)],
)
def test_networks_of_timm(name, options, count):
    timm = imported("timm")
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=3, **options)
    new = functional.apply_surgery(net, alg.stochastic_depth("sample", 0.5))
    assert sum(isinstance(module, DropPath) for module in new.modules()) == count
    assert new.state_dict().keys() >= net.state_dict().keys()
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(
        functional.apply_surgery(net.eval(), alg.stochastic_depth("sample", 1e-9))(images), net(images)
    )
    state = pc.State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), duration="2ba")
    step = compose(loop_events, [alg.stochastic_depth("sample", 0.5, drop_warmup=0.5)])
    after = step(step.init(state), (images, torch.tensor([0, 1, 2, 0])))
    assert after.loss is not None and after.loss.isfinite()


def test_batch_norms_of_timm_with_an_activation():
    timm = imported("timm")
    net = timm.create_model("test_efficientnet", num_classes=3).train()
    new = functional.apply_surgery(net, alg.ghost_batchnorm(4))
    norms = [module for module in new.modules() if isinstance(module, GhostBatchNorm)]
    assert len(norms) == sum(isinstance(module, nn.BatchNorm2d) for module in net.modules()) > 0
    images = torch.randn(8, 3, 32, 32)
    first = next(module for module in net.modules() if isinstance(module, nn.BatchNorm2d))
    values = torch.randn(8, first.num_features, 4, 4)
    expected = torch.cat([first(part) for part in values.split(4)])
    torch.testing.assert_close(norms[0](values), expected)
    torch.testing.assert_close(new.eval()(images).shape, net.eval()(images).shape)


def test_a_network_of_hugging_face():
    transformers = imported("transformers")
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 2], num_stages=2, drop_path_rate=0.1)
    new = functional.apply_surgery(transformers.ConvNextModel(config), alg.stochastic_depth("sample", 0.2))
    assert [module.drop_rate.item() for module in new.modules() if isinstance(module, DropPath)] == pytest.approx(
        [0.2 / 3, 0.4 / 3, 0.2]
    )
