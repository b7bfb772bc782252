"""Squeeze-and-excitation: the layers against the formula in numpy, the surgery, the factory in a run."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from purecompose import compose, loop_events
from purecompose.algorithms import squeeze_excite
from purecompose.nn.layers import SqueezeExcite2d, SqueezeExciteConv2d
from tests.algorithms.surgery_checks import (
    applied,
    check_keeps_all,
    check_shows,
    hooked,
    make_batch,
    make_state,
    operated,
    trained,
)


SEEDS = st.integers(0, 99)
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
LATENTS = st.integers(1, 5) | st.floats(0.01, 0.99)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(seed: int, channels: int, latent: float = 3) -> SqueezeExcite2d:
    torch.manual_seed(seed)
    return SqueezeExcite2d(channels, latent).double()


def by_hand(images: Tensor, layer: SqueezeExcite2d) -> Any:
    """Return the output, computed in numpy, one example after the other."""
    first, second = (linear.weight.detach().double().numpy() for linear in (layer.squeeze, layer.excite))
    results = []
    for image in images.double().numpy():
        means = image.reshape(len(image), -1).sum(1) / image[0].size
        attention = 1 / (1 + np.exp(-(second @ np.maximum(first @ means, 0))))
        results.append(image * attention.reshape(-1, 1, 1))
    return torch.tensor(np.stack(results))


# The layers


@given(SEEDS, SHAPES, LATENTS)
def test_the_layer_is_the_formula(seed, shape, latent):
    images, layer = drawn(seed, *shape), layer_of(seed, shape[1], latent)
    expected = by_hand(images, layer)
    torch.testing.assert_close(layer(images), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer(images[0]), expected[0], rtol=1e-10, atol=1e-12)
    single = layer.float()(images.float())
    assert (single.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("latent", "channels", "width"),
    [(64, 8, 64), (1, 8, 1), (1.0, 8, 1), (0.5, 8, 4), (0.99, 8, 7), (0.01, 16, 1), (0.29, 100, 29), (0.125, 128, 16)],
)
def test_the_width_of_the_hidden_layer(latent, channels, width):
    layer = SqueezeExcite2d(channels, latent)
    assert layer.squeeze.weight.shape == (width, channels) and layer.excite.weight.shape == (channels, width)


# The surgery


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, 2, 1, bias=False),
        nn.ReLU(),
        nn.Conv2d(6, 2, 1),
        nn.Flatten(),
        nn.Linear(18, 3),
    )


@pytest.mark.parametrize(("least", "names"), [(1, "0246"), (2, "0246"), (3, "24"), (4, "24")])
@pytest.mark.parametrize("latent", [3, 0.5])
def test_convolutions_wide_on_both_sides_get_one(least, names, latent):
    state = trained(make_state(make_net()))
    after, report = check_keeps_all(state, squeeze_excite(latent, least))
    assert report.replaced == tuple(names)
    added = 0
    for name in names:
        channels = getattr(state.model.module, name).out_channels
        width = 3 if latent == 3 else channels // 2
        added += 2 * width * channels
        assert isinstance(getattr(after.model.module, name), SqueezeExciteConv2d)
        for layer in ("squeeze", "excite"):
            made = f"{name}.se.{layer}.weight"
            assert made in report.made and not after.opt_state["momentum"][made].any()
    assert len(report.made) == 2 * len(names)
    assert sum(t.numel() for t in after.params.values()) == sum(t.numel() for t in state.params.values()) + added
    assert compose(loop_events)(after, make_batch(5)).timestamp.batch == 3


def test_the_network_computes_the_formula_with_the_weights_it_had():
    state = make_state(make_net()[:1])
    after, _ = check_keeps_all(state, squeeze_excite(2, 1))
    layer = SqueezeExcite2d(4, 2)
    layer.load_state_dict({name[5:]: param for name, param in after.params.items() if ".se." in name})
    images = make_batch()[0]
    torch.testing.assert_close(after.forward(images).double(), by_hand(state.forward(images), layer))


@given(SEEDS)
def test_new_weights_come_from_the_key(seed):
    first, again, other = (
        applied(make_state(make_net(), key=key), squeeze_excite(2, 4))[0] for key in (seed, seed, seed + 1)
    )
    for name in (name for name in first.params if ".se." in name):
        assert torch.equal(first.params[name], again.params[name])
        assert not torch.equal(first.params[name], other.params[name])


def test_new_weights_have_the_convolutions_dtype_and_bound():
    state = make_state(nn.Sequential(nn.Conv2d(2, 50, 1, dtype=torch.float64)))
    after, _ = applied(state, squeeze_excite(20, 1))
    weight = after.params["0.se.squeeze.weight"]
    assert weight.dtype == torch.float64
    assert 0.9 * 50**-0.5 < weight.abs().max() <= 50**-0.5  # as nn.Linear: uniform up to 1 / sqrt(C)


def test_layers_that_are_not_replaced():
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ConvTranspose2d(4, 4, 1), nn.Conv1d(4, 4, 1))
    with pytest.warns(UserWarning, match="looked for Conv2d to replace, and kept all 1: none"):
        assert not operated(net, squeeze_excite(2, 4))[1].replaced
    module, report = operated(nn.Conv2d(2, 2, 1), squeeze_excite(2, 2))
    assert isinstance(module, SqueezeExciteConv2d) and report.replaced == ("",)


def test_convolutions_of_any_kind_are_wrapped_whole_and_can_be_read_where_they_were():
    net, images = nn.Sequential(hooked(nn.Conv2d(2, 2, 1))), make_batch()[0]
    after, _ = applied(make_state(net), squeeze_excite(2, 2))
    attention = SqueezeExcite2d(2, 2)
    attention.load_state_dict({name[5:]: param for name, param in after.params.items() if ".se." in name})
    torch.testing.assert_close(after.forward(images), attention(net(images)))
    conv = nn.Conv2d(2, 3, 3)
    check_shows(SqueezeExciteConv2d(conv), conv, "kernel_size")
