"""Factorize: which layers are replaced, how well, and ranks lowered by data."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn.utils import parametrize

import purecompose as pc
from purecompose import State, compose, loop_events, surgery
from purecompose.algorithms import factorize
from purecompose.algorithms.functional import (
    factorize_conv2d,
    factorize_matrix,
    factorize_rules,
    factorizing_could_speedup,
)
from purecompose.nn.layers.factorized import (
    FactorizedConv2d,
    FactorizedLinear,
    LowRankSolution,
    max_latent,
    split_weight,
)
from tests.algorithms.surgery_checks import check_keeps_all, trained
from tests.helpers import assert_same


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
    assert factorizing_could_speedup(conv, latent) is fewer


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
        state, report = surgery.operate(make_state(tied), factorize_rules(**SMALL), name="factorize")
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
    after, report = check_keeps_all(before, factorize_rules(**SMALL), dropped=("2.weight", "7.weight"))
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


def test_two_of_them_keep_their_order():
    methods = [factorize(**SMALL, name="second"), factorize(**SMALL, name="first")]
    ordered = compose(loop_events, methods).order(methods, pc.Event.INIT)
    assert [a.name for a in ordered] == ["second", "first"]


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
    after, report = surgery.operate(before, factorize_rules(**SMALL), name="factorize")
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
        lower = thin.with_rank(x, 2)
        torch.testing.assert_close(lower(x), thin(x), rtol=1e-4, atol=1e-4)
        assert (lower.first.weight.flatten(1).norm(dim=1) > 0.1).all()


def test_a_network_that_begins_with_zeros_trains():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
            nn.init.zeros_(self.inner.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x + self.inner(x))

    step = compose(loop_events, [factorize(min_features=8, latent_features=2)])
    state = step.init(make_state(Block()))
    batch = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    for _ in range(3):
        state = step(state, batch)
    product: Any = pc.to_module(state).inner
    assert product.weight.abs().max() > 1e-3


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


# By data


@given(st.integers(1, 6), st.integers(0, 99))
def test_a_product_of_the_rank_that_is_asked_for_is_found(rank, seed):
    x, _, _ = data(40, 8, 7, seed)
    weight = data(8, rank, 7, seed + 1)[1]
    solution = factorize_matrix(x, x @ weight, weight, rank=rank)
    assert solution.rank == rank and solution.nmse < 1e-9 and solution.bias is None


def test_errors_fall_with_the_rank_and_with_turns():
    x, _, weight = data(64, 40, 40)
    y = x @ weight + 0.5 * x.square() @ data(64, 40, 40, 1)[2]  # which no product fits exactly
    ranks = [factorize_matrix(x, y, weight, rank=rank).nmse for rank in (1, 4, 16, 32)]
    turns = [factorize_matrix(x, y, weight, rank=4, n_iters=n).nmse for n in (0, 1, 2, 4)]
    assert ranks == sorted(ranks, reverse=True) and ranks[0] < 1
    assert turns == sorted(turns, reverse=True) and turns[1] < turns[0]
    best = torch.linalg.lstsq(x.double(), y.double()).solution  # closed form: the fitted outputs, truncated to the rank
    fitted = x.double() @ best
    vectors = torch.linalg.svd(fitted, full_matrices=False).Vh[:4]
    left = (y - fitted @ vectors.T @ vectors).square().sum() / y.double().square().sum()
    many = factorize_matrix(x, y, weight, rank=4, n_iters=200)
    assert many.nmse == pytest.approx(left.item(), rel=1e-6)


def test_a_bias_is_fitted_where_there_is_one():
    x, y, weight = data(40, 6, 6)
    x = x + 3.0  # makes the bias matter
    shift = torch.arange(6.0)
    exact = factorize_matrix(x, x @ weight + shift, weight, bias=torch.zeros(6), rank=6)
    assert exact.second is None and exact.rank == -1 and exact.nmse < 1e-9 and exact.bias is not None
    torch.testing.assert_close(exact.bias, shift, rtol=1e-3, atol=1e-3)
    thin = factorize_matrix(x, x @ weight + shift, weight, bias=shift, rank=2)
    bias, second = thin.bias, thin.second
    assert bias is not None and second is not None
    residual = x @ weight + shift - (x @ thin.first @ second + bias)
    assert residual.mean(0).abs().max() < 1e-4
    deviation = (x @ weight + shift - (x @ weight + shift).mean(0)).square().sum()
    assert thin.nmse == pytest.approx((residual.square().sum() / deviation).item(), rel=1e-4)


def test_special_ranks():
    x, y, weight = data(30, 8, 6)
    first, second = weight[:, :4], data(1, 4, 6)[2]
    y = x @ first @ second
    assert factorize_matrix(x, y, first, second, rank=4).first is first
    assert factorize_matrix(x, y, first, second, rank=0.25).rank == 2
    assert factorize_matrix(x, y, first, second, rank=0.9).rank == -1  # 7 of 8 inputs, but only 4 are independent
    assert factorize_matrix(x, y, weight, rank=6).second is None
    with pytest.raises(RuntimeError, match="inputs: expected a matrix"):
        factorize_matrix(x[None], y, weight)
    with pytest.raises(RuntimeError, match="expected inputs"):
        factorize_matrix(x, y[:4], weight)
    with pytest.raises(ValueError, match="rank: expected a number > 0"):
        factorize_matrix(x, y, weight, rank=0)


@pytest.mark.parametrize(("width", "out"), [(4, 9), (9, 4), (5, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_rank_as_great_as_a_side_gives_one_matrix(width: int, out: int, has_bias: bool):
    x, y, weight = data(40, width, out)
    side, bias = min(width, out), torch.zeros(out) if has_bias else None
    for start in ((weight, None), (torch.eye(width), weight)):
        for rank in (side, side + 1):
            one = factorize_matrix(x, y, *start, bias, rank=rank)
            assert one.second is None and one.rank == -1 and one.nmse < 1e-9 and (one.bias is not None) is has_bias
            torch.testing.assert_close(one.first, weight, rtol=1e-4, atol=1e-5)
        two = factorize_matrix(x, y, *start, bias, rank=side - 1)
        assert two.second is not None and two.rank == side - 1
        assert (two.first.shape, two.second.shape) == ((width, side - 1), (side - 1, out))


@pytest.mark.parametrize(("channels", "out", "kernel", "side"), [(2, 8, 1, 2), (2, 4, 3, 4)])
def test_a_rank_as_great_as_a_side_gives_one_convolution(channels: int, out: int, kernel: int, side: int):
    torch.manual_seed(0)
    x, weight = torch.randn(3, channels, 7, 7), torch.randn(out, channels, kernel, kernel)
    one, two = factorize_conv2d(x, weight, rank=side), factorize_conv2d(x, weight, rank=side - 1)
    assert one.second is None and one.rank == -1 and two.second is not None and two.rank == side - 1
    torch.testing.assert_close(one.first, weight, rtol=1e-4, atol=1e-5)


def test_a_convolution_by_data_is_the_matrix_of_its_patches():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 2, 7, 7), torch.randn(8, 2, 3, 3), torch.randn(8)
    found = factorize_conv2d(x, weight, rank=3, first_bias=bias, stride=2, padding=1, dilation=1)
    assert found.second is not None
    ours = F.conv2d(F.conv2d(x, found.first, stride=2, padding=1), found.second, found.bias)
    exact = F.conv2d(x, weight, bias, stride=2, padding=1)
    by_channel = exact.transpose(0, 1).flatten(1)
    deviation = (by_channel - by_channel.mean(1, keepdim=True)).square().sum()
    assert found.nmse == pytest.approx(((ours - exact).square().sum() / deviation).item(), rel=1e-4)
    with pytest.raises(NotImplementedError, match="groups=1"):
        factorize_conv2d(x, weight, groups=2)
    with pytest.raises(RuntimeError, match="second_bias without second"):
        factorize_conv2d(x, weight, second_bias=bias)


@pytest.mark.parametrize("bias", [False, True])
def test_ranks_of_layers_go_down_step_by_step(bias: bool):
    torch.manual_seed(0)
    x, layer = torch.randn(5, 20, 36), FactorizedLinear(nn.Linear(36, 40, bias=bias), 16)
    for rank in (12, 8):
        lower: Any = layer.with_rank(x, rank)
        assert lower.first.weight.shape == (rank, 36) and lower.second.weight.shape == (40, rank)
        assert lower.with_rank(x, rank) is lower and (lower.bias is None) is not bias
        layer = lower
    for wrong in (9, 0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"at most the layer's 8, got {wrong}"):
            layer.with_rank(x, wrong)
    assert layer.with_rank(x[0, 0], 2)(x[0, 0]).shape == (40,)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_ranks_of_convolutions_go_down_too(mode: Any):
    torch.manual_seed(0)
    x, conv = torch.randn(4, 3, 9, 9), nn.Conv2d(3, 12, 3, stride=2, padding=1, padding_mode=mode)
    layer = FactorizedConv2d(conv, 12)
    lower: Any = layer.with_rank(x, 9)
    assert lower.first.weight.shape == (9, 3, 3, 3) and lower(x).shape == conv(x).shape
    single = layer.with_rank(x[0], 9)
    torch.testing.assert_close(single(x[0]), layer.with_rank(x[:1], 9)(x[0]))
    plain = FactorizedConv2d(conv, 9)  # without data
    assert (lower(x) - conv(x)).square().sum() <= (plain(x) - conv(x)).square().sum() * (1 + 1e-5)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_takes_the_factors_of_a_solution(kind: type[nn.Module], has_bias: bool):
    torch.manual_seed(0)
    bias = torch.randn(6) if has_bias else None
    if kind is nn.Conv2d:
        x, whole = torch.randn(3, 4, 7, 7), nn.Conv2d(4, 6, 3, stride=2, bias=False).requires_grad_(False)
        layer: Any = FactorizedConv2d(whole, 4).eval()
        first, second = factors = layer.first.weight[:2], layer.second.weight[:, :2]
        product, expected = layer.weight, F.conv2d(F.conv2d(x, first, stride=2), second, bias)
        single = F.conv2d(x, product, bias, stride=2)
    else:
        x, whole = torch.randn(3, 4), nn.Linear(4, 6, bias=False).requires_grad_(False)
        layer = FactorizedLinear(whole, 4).eval()
        first, second = factors = layer.first.weight[:2].T, layer.second.weight[:, :2].T
        product, expected = layer.weight.T, F.linear(x @ first, second.T, bias)
        single = F.linear(x, layer.weight, bias)
    before = copy.deepcopy(layer.state_dict())
    two: Any = layer.with_solution(LowRankSolution(*factors, bias, 2, 0.0))
    one: Any = layer.with_solution(LowRankSolution(product, None, bias, -1, 0.0))
    torch.testing.assert_close(two(x), expected)
    torch.testing.assert_close(one(x), single)
    assert type(two) is type(layer) and type(one) is kind
    assert_same(dict(layer.state_dict()), dict(before))
    for new in (two, one):
        # Frozen parameters stay frozen; a newly added bias trains.
        free = {name for name, param in new.named_parameters() if param.requires_grad}
        assert free == {name for name, _ in new.named_parameters() if name.endswith("bias")}
        assert len(free) == has_bias and not any(module.training for module in new.modules())
        assert all(param.is_contiguous() for param in new.parameters())


def test_removed_factors_are_not_copied():
    layer: Any = FactorizedLinear(nn.Linear(6, 4), 3)
    layer.tag, layer.first.open = "mine", (number for number in ())  # a generator, which cannot be copied
    before = dict(layer.named_parameters())
    solution = LowRankSolution(torch.ones(6, 2), torch.ones(2, 4), torch.ones(4), 2, 0.0)
    new: Any = layer.with_solution(solution)
    assert type(new) is FactorizedLinear and new.tag == "mine" and new.latent_features == 2
    assert all(param is before[name] for name, param in layer.named_parameters()) and layer.latent_features == 3
