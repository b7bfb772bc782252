"""Factorize: which layers are replaced, and how well."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn.utils import parametrize

import purecompose as pc
from purecompose import State, compose, loop_events
from purecompose.algorithms import factorize
from purecompose.nn.layers.replacing import FactorizedConv2d, FactorizedLinear, max_latent, split_weight
from tests.algorithms.surgery_checks import applied, check_keeps_all, trained


SMALL: dict[str, Any] = {"min_channels": 4, "latent_channels": 0.25, "min_features": 4, "latent_features": 0.25}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16), nn.Linear(16, 3),
    )  # fmt: skip


def make_state(net: nn.Module | None = None, **options: Any) -> State:
    options = {"optimizer": pc.optim.sgd(0.1, momentum=0.9), "duration": "8ba", **options}
    return State.create(net or make_net(), loss=pc.losses.cross_entropy, **options)


def make_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(3, (4,), generator=generator)


def data(n: int, width: int, out: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(n, width, generator=generator), torch.randn(width, out, generator=generator)
    return x, x @ weight, weight


def test_the_greatest_ranks_that_save_something():
    linears = {width: max_latent(nn.Linear(width, width)) for width in (8, 16, 512)}
    assert linears == {8: 3, 16: 7, 512: 255} and max_latent(nn.Conv2d(8, 8, 3)) == 7


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(1, 40))
def test_a_layer_is_factorized_exactly_if_that_saves_multiplications(fan, out, kernel, latent):
    conv = nn.Conv2d(fan, out, kernel, device="meta")
    fewer = latent * (fan * kernel**2 + out) < fan * kernel**2 * out
    assert (latent <= max_latent(conv)) is fewer


def test_which_layers_are_replaced():
    state = compose(loop_events, [factorize(**SMALL)]).init(make_state())
    kinds = {name: type(module).__name__ for name, module in state.model.module.named_children()}
    assert {name: kind for name, kind in kinds.items() if "Factorized" in kind} == {
        "2": "FactorizedConv2d", "7": "FactorizedLinear"
    }  # fmt: skip
    assert state.params["2.first.weight"].shape == (2, 8, 3, 3) and state.params["7.second.weight"].shape == (16, 2)
    assert "2.second.bias" not in state.params and "7.second.bias" in state.params
    whole = sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in state.model.module.modules())
    assert whole == 5 + 2  # two for each of the two


def test_subclasses_ties_and_layers_inside_attention_stay():
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    tied[1].weight = tied[0].weight
    with pytest.warns(UserWarning, match="looked for Conv2d or Linear"):
        state, report = applied(make_state(tied), factorize(**SMALL))
    assert not report.replaced and state.params.keys() == make_state(tied).params.keys()


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_a_linear_layer_of_full_rank_is_the_layer(width, out, bias, seed):
    torch.manual_seed(seed)
    linear = nn.Linear(width, out, bias=bias)
    x = torch.randn(2, 5, width)
    layer = FactorizedLinear(linear, min(width, out))
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight, linear.weight, rtol=1e-5, atol=1e-5)
    assert layer.bias is linear.bias


KERNELS = [(1, 1), (2, 2), (3, 3), (1, 3), (3, 1), (5, 5)]


@settings(max_examples=30)
@given(
    st.sampled_from(KERNELS), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2),
    st.sampled_from(["zeros", "reflect", "circular", "replicate"]), st.booleans(),
)  # fmt: skip
def test_a_convolution_of_full_rank_is_the_convolution(kernel, stride, padding, dilation, mode, bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, kernel, stride, padding, dilation, bias=bias, padding_mode=mode)
    x = torch.randn(2, 3, 12, 11)
    layer = FactorizedConv2d(conv, min(4, 3 * kernel[0] * kernel[1]))
    torch.testing.assert_close(layer(x), conv(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight, conv.weight, rtol=1e-5, atol=1e-5)
    assert FactorizedConv2d(conv, 1)(x).shape == conv(x).shape


@given(st.integers(2, 8), st.integers(2, 8), st.integers(1, 7), st.integers(0, 99))
def test_the_error_of_factors_is_given_by_the_dropped_singular_values(out, width, rank, seed):
    """Eckart and Young: the squared error of the best rank-k matrix is the sum of the other squared singular values."""
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rank = min(rank, out, width)
    first, second = split_weight(weight, rank)
    left = torch.linalg.svdvals(weight)[rank:].square().sum()
    torch.testing.assert_close((weight - second @ first).square().sum(), left, rtol=1e-6, atol=1e-12)


def test_the_old_state_and_momentum_are_kept_and_a_second_surgery_does_nothing():
    before = trained(make_state(), channels=3, size=8)
    after, report = check_keeps_all(before, factorize(**SMALL), dropped=("2.weight", "7.weight"))
    assert report.kept["7.second.bias"] == "7.bias"
    assert compose(loop_events)(after, make_batch(2)).timestamp.batch == 3


def test_frozen_weights_have_frozen_factors_of_their_dtype():
    net = make_net().double()
    net[7].weight.requires_grad_(False)
    state = compose(loop_events, [factorize(**SMALL)]).init(make_state(net))
    assert state.context.frozen == {"7.first.weight", "7.second.weight"}
    assert {param.dtype for param in state.params.values()} == {torch.float64}


OTHERS = [
    pc.algorithms.squeeze_excite(0.5, 4, name="mine"),
    pc.algorithms.weight_standardization(name="mine"),
    pc.algorithms.blurpool(name="mine"),
    pc.algorithms.gated_linear_units(name="mine"),
]


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_it_comes_after_methods_that_look_for_whole_layers(other: pc.Algorithm):
    for methods in ([factorize(**SMALL), other], [other, factorize(**SMALL)]):
        ordered = compose(loop_events, methods).order(methods, pc.Event.INIT)
        assert [a.name for a in ordered] == ["mine", "factorize"]


@pytest.mark.parametrize("how", ["hook", "pre-hook", "own forward", "parametrized"])
@pytest.mark.parametrize("index", [2, 7])
def test_layers_that_are_passed_as_arguments_are_kept(how: str, index: int):
    net = make_net()
    layer: Any = net[index]
    if how == "hook":
        layer.register_forward_hook(lambda module, args, output: output + 5)
    elif how == "pre-hook":
        layer.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    elif how == "own forward":
        layer.forward = lambda input: 2 * input
    else:
        parametrize.register_parametrization(layer, "weight", nn.Softplus())
    before = make_state(net)
    after, report = applied(before, factorize(**SMALL))
    assert [name for name in ("2", "7") if name != str(index)] == list(report.replaced)
    found: Any = after.model.module
    assert not isinstance(found[index], (FactorizedConv2d, FactorizedLinear))


@pytest.mark.parametrize("rank", [0, 1])
def test_layers_of_zeros_and_of_a_low_rank_train(rank: int):
    """Two zero factors would always have zero gradients."""
    torch.manual_seed(0)
    linear, conv = nn.Linear(16, 12, bias=False), nn.Conv2d(4, 12, 3, bias=False)
    for layer in (linear, conv):
        with torch.no_grad():
            product = torch.randn(12, rank) @ torch.randn(rank, layer.weight[0].numel())
            layer.weight.copy_(product.view_as(layer.weight))
    pairs: list[Any] = [(linear, FactorizedLinear(linear, 4), torch.randn(9, 16))]
    pairs += [(conv, FactorizedConv2d(conv, 4), torch.randn(3, 4, 8, 8))]
    for whole, thin, x in pairs:
        torch.testing.assert_close(thin.weight, whole.weight)
        lengths = thin.first.weight.flatten(1).norm(dim=1)
        assert lengths.min() > 0.1 * lengths.max() and thin.first.weight.is_contiguous()
        thin(x).square().add(thin(x)).sum().backward()
        assert (thin.second.weight.grad.flatten(1).norm(dim=0) > 1e-2).all()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_factors_are_contiguous(width, out, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator)
    assert all(factor.is_contiguous() for factor in split_weight(weight, min(2, width, out)))


def test_evaluation_of_torchs_encoder_reads_the_product():
    """Its fast path reads `linear1.weight`, which must be the product of the factors."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    thin = copy.deepcopy(encoder)
    thin.linear1 = FactorizedLinear(thin.linear1, 3)  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        fast = thin(x)
    torch.testing.assert_close(fast, thin.train()(x), rtol=1e-4, atol=1e-5)
