"""Weight standardization: the layers against the formula, the last convolutions, undoing it, the factory in a run."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from purecompose import State, compile, compose, loop_events, to_module
from purecompose.algorithms import blurpool, squeeze_excite, weight_standardization
from purecompose.functional import standardized
from purecompose.nn.layers import StandardizedConv1d, StandardizedConv2d, StandardizedConv3d, standardized_conv
from tests.algorithms.surgery_checks import (
    applied,
    check_keeps_all,
    check_leaves,
    hooked,
    make_batch,
    make_state,
    operated,
    patched,
    trained,
)


KINDS = {
    nn.Conv1d: (StandardizedConv1d, F.conv1d),
    nn.Conv2d: (StandardizedConv2d, F.conv2d),
    nn.Conv3d: (StandardizedConv3d, F.conv3d),
}
SEEDS = st.integers(0, 99)
SHAPES = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple)
WIDE = st.lists(st.integers(2, 4), min_size=2, max_size=5).map(tuple)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Return weights whose filters all have a variance so large that the 1e-10 below the root is negligible."""
    weight = drawn(seed, *shape)
    assume(weight.flatten(1).var(1, correction=0).min() > 0.01)
    return weight


def by_hand(weight: Tensor) -> Tensor:
    """Return standardized filters, computed in numpy, one after the other."""
    rows = weight.detach().double().numpy().reshape(len(weight), -1)
    rows = [(row - row.sum() / len(row)) / np.sqrt(np.var(row) + 1e-10) for row in rows]
    return torch.tensor(np.stack(rows)).view(weight.shape)


# The layers


@given(SEEDS, SHAPES)
def test_filters_equal_the_formula(seed, shape):
    weight = drawn(seed, *shape)
    torch.testing.assert_close(standardized(weight), by_hand(weight), rtol=1e-10, atol=1e-10)


@given(SEEDS, WIDE)
def test_single_precision_is_as_good_as_it_can_be(seed, shape):
    weight = spread(seed, shape).float()
    filters, expected = standardized(weight), by_hand(weight)
    assert filters.dtype == torch.float32
    assert (filters.double() - expected).norm() <= 1e-6 * expected.norm()


def test_a_filter_of_one_number_is_0_and_half_precision_is_computed_in_float32():
    assert torch.equal(standardized(torch.tensor([[3.0], [-2.0]])), torch.zeros(2, 1))
    weight = 1e-3 * drawn(0, 4, 3, 3, 3)
    for dtype in (torch.float16, torch.bfloat16):
        low = weight.to(dtype)
        torch.testing.assert_close(standardized(low), by_hand(low).to(dtype))
    last = weight.to(memory_format=torch.channels_last)
    assert standardized(last).stride() == last.stride()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_mode": "circular", "padding": 1},
        {"groups": 2, "bias": False},
        {"padding": "same", "dilation": 2},
        {"stride": 2, "dtype": torch.float64},
    ],
    ids=str,
)
def test_convolutions_keep_their_settings(kind, options):
    torch.manual_seed(0)
    conv = kind(4, 6, 3, **options)
    new: Any = standardized_conv(conv)
    assert type(new) is KINDS[kind][0] and new.weight is conv.weight and new.bias is conv.bias
    inputs = drawn(1, 2, 4, *[6] * (conv.weight.ndim - 2)).to(conv.weight.dtype)
    twin = kind(4, 6, 3, **options)
    with torch.no_grad():
        twin.weight.copy_(by_hand(conv.weight))
    if conv.bias is not None:
        twin.bias = conv.bias
    torch.testing.assert_close(new(inputs), twin(inputs), rtol=1e-4, atol=1e-5)
    assert new(inputs).shape == conv(inputs).shape
    assert str(new) == "Standardized" + str(conv)
    loaded = pickle.loads(pickle.dumps(new))
    assert torch.equal(loaded(inputs), new(inputs))


# The surgery


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1, bias=False), nn.ReLU()),
        nn.Conv2d(4, 3, 3),
        nn.Flatten(2),
        nn.Conv1d(3, 3, 1),
        nn.Flatten(),
    )


NAMES = ("0", "2.0", "3", "5")


@pytest.mark.parametrize("last", [0, 1, 3])
def test_all_but_the_last_are_standardized_and_names_and_values_are_kept(last):
    state = trained(make_state(make_net()))
    after, report = check_keeps_all(state, weight_standardization(last))
    assert report.replaced == NAMES[: len(NAMES) - last]
    assert list(after.params) == list(state.params) and report.made == ()
    assert all(after.params[name] is state.params[name] for name in state.params)
    images = make_batch()[0]
    assert after.forward(images).shape == state.forward(images).shape
    assert compose(loop_events)(after, make_batch(5)).timestamp.batch == 3


def test_the_last_is_counted_among_the_chosen_modules() -> None:
    net = nn.Sequential(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)), nn.Conv2d(2, 2, 1))
    assert operated(net, weight_standardization(1, where="0"))[1].replaced == ("0.0",)


@given(SEEDS)
@settings(max_examples=10)
def test_the_network_computes_with_filters_by_hand(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 2)).double()
    state = make_state(net)
    after, _ = check_keeps_all(state, weight_standardization(1))
    params, images = state.params, drawn(seed, 2, 2, 6, 6)
    hidden = F.conv2d(images, by_hand(params["0.weight"]), params["0.bias"]).tanh()
    expected = F.conv2d(hidden, params["2.weight"], params["2.bias"])
    torch.testing.assert_close(after.forward(images), expected, rtol=1e-8, atol=1e-9)


def test_a_step_moves_the_raw_weights_by_the_chain_rule():
    state = make_state(make_net())
    after, _ = applied(state, weight_standardization(4 - 1))
    images, targets = make_batch()
    raw = state.params["0.weight"].clone().requires_grad_()
    hidden = F.conv2d(images, standardized(raw), state.params["0.bias"], padding=1)
    net: Any = to_module(state)
    (gradient,) = torch.autograd.grad(F.cross_entropy(net[1:](hidden).view(6, -1), targets), raw)
    step = compose(loop_events)
    end = step(after, (images, targets))
    torch.testing.assert_close(end.params["0.weight"], raw - 0.1 * gradient, rtol=1e-5, atol=1e-7)


class Renamed(nn.Conv2d):
    """A subclass that computes the same as its base class."""


class Cautious(nn.Conv2d):
    """A subclass with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight * 0.5, self.bias)


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_layers_that_are_not_replaced():
    scaled = parametrize.register_parametrization(nn.Conv2d(2, 2, 1), "weight", Double())
    net = nn.Sequential(Cautious(2, 2, 1), scaled, nn.ConvTranspose2d(2, 2, 1), nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="looked for Conv1d or Conv2d or Conv3d to replace, and kept all 2"):
        _, report = operated(net, weight_standardization())
    assert not report.replaced
    assert standardized_conv(nn.Linear(2, 2)) is None
    with pytest.warns(UserWarning, match="changed nothing"):
        operated(make_net(), weight_standardization(4))
    shared = nn.Conv2d(2, 2, 1)
    module, report = operated(nn.Sequential(shared, shared, nn.Conv2d(2, 2, 1)), weight_standardization(1))
    assert report.replaced == ("0",) and module[0] is module[1] and type(module[2]) is nn.Conv2d


def test_layers_with_own_forwards_hooks_or_parametrizations_are_kept():
    scaled = parametrize.register_parametrization(nn.Conv2d(2, 2, 1), "bias", Double())
    net = nn.Sequential(hooked(nn.Conv2d(2, 2, 1)), patched(nn.Conv2d(2, 2, 1)), scaled, Cautious(2, 2, 1))
    check_leaves(net, weight_standardization(), 4)


def test_subclasses_keep_their_attributes():
    renamed: Any = Renamed(2, 3, 3)
    renamed.note = "mine"
    state = make_state(nn.Sequential(renamed, Renamed(3, 3, 1), nn.Flatten()))
    after, _ = check_keeps_all(state, weight_standardization())
    images = make_batch()[0]
    module: Any = to_module(after)
    first: Any = module[0]
    assert type(first) is type(module[1]) is StandardizedConv2d and first.note == "mine"
    hidden = F.conv2d(images, standardized(state.params["0.weight"]), state.params["0.bias"])
    torch.testing.assert_close(first(images), hidden)
    for copied in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert type(copied) is type(first) and torch.equal(copied(images), first(images))
    step, batch = compose(loop_events), make_batch()
    compiled = compile(step, backend="aot_eager", donate=False)(after, batch)
    torch.testing.assert_close(compiled.params["0.weight"], step(after, batch).params["0.weight"], rtol=1e-5, atol=1e-6)


def test_it_works_with_blurpool_and_squeeze_excite_in_any_order():
    methods = {
        "ws": weight_standardization(),
        "blur": blurpool(min_channels=1, blur_first=False),
        "se": squeeze_excite(2, 4),
    }
    start, images, outputs = make_state(make_net()), make_batch()[0], []
    for order in (("ws", "blur"), ("blur", "ws"), ("ws", "se", "blur"), ("se", "blur", "ws"), ("blur", "ws", "se")):
        state: State = start
        for name in order:
            state, _ = check_keeps_all(state, methods[name])
        kinds = [type(module).__name__ for module in state.model.module.modules()]
        assert kinds.count("StandardizedConv2d") == 3 and kinds.count("BlurConv2d") == 1
        assert kinds.count("SqueezeExciteConv2d") == ("se" in order)
        outputs.append(state.forward(images))
    torch.testing.assert_close(outputs[0], outputs[1])
