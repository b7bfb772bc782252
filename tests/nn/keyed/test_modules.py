"""Random functions in modules' forwards draw from keys: their results, side effects and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from purecompose.errors import UnkeyedRandomError
from purecompose.nn.keyed.modules import detect, keyed
from purecompose.random.keys import Rng, fold_in, key, split
from tests.nn.keyed.module_helpers import (
    DECODER,
    ENCODER,
    GRU,
    LSTM,
    LSTM_SEQUENCE_FIRST,
    MHA,
    RELU_RNN,
    RNN,
    Fn,
    images,
    run,
    seeded,
    sequences,
)


MHA_SEQUENCE_FIRST = seeded(lambda: nn.MultiheadAttention(8, 2, dropout=0.4))


def attend(x: Tensor, need_weights: bool) -> Tensor:
    s = sequences(x)
    return MHA(s, s, s, need_weights=need_weights)[0]


def attend_sequence_first(x: Tensor) -> Tensor:
    s = sequences(x).transpose(0, 1)
    return MHA_SEQUENCE_FIRST(s, s, s)[0].transpose(0, 1)


def sdpa(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)


# Functions of the input through which gradients flow; the leading dimension is the batch's.
DIFFERENTIABLE: dict[str, Fn] = {
    "F.dropout": lambda x: F.dropout(x, 0.4),
    "F.dropout inplace": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "nn.Dropout": nn.Dropout(0.4),
    "F.dropout1d": lambda x: F.dropout1d(x.flatten(2), 0.4),
    "F.dropout2d": lambda x: F.dropout2d(x, 0.4),
    "F.dropout2d inplace": lambda x: F.dropout2d(x * 1, 0.4, inplace=True),
    "F.dropout3d": lambda x: F.dropout3d(x.unsqueeze(-1), 0.4),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "torch.dropout named": lambda x: torch.dropout(x, p=0.4, train=True),
    "torch.dropout_": lambda x: torch.dropout_(x * 1, 0.4, True),
    "torch.feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "torch.feature_dropout_": lambda x: torch.feature_dropout_(x * 1, 0.4, True),
    "fractional_max_pool2d with samples": lambda x: F.fractional_max_pool2d(
        x, 2, 4, _random_samples=torch.rand(len(x), 4, 2, dtype=x.dtype)
    ),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, 0.7),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, hard=True),
    "sdpa": sdpa,
    "MultiheadAttention": lambda x: attend(x, True),
    "MultiheadAttention fused": lambda x: attend(x, False),
    "MultiheadAttention sequence-first": attend_sequence_first,
    "TransformerEncoderLayer": lambda x: ENCODER(sequences(x)),
    "TransformerDecoderLayer": lambda x: DECODER(sequences(x), sequences(x)),
    "LSTM": lambda x: LSTM(sequences(x))[0],
    "LSTM sequence-first": lambda x: LSTM_SEQUENCE_FIRST(sequences(x).transpose(0, 1))[0].transpose(0, 1),
    "GRU": lambda x: GRU(sequences(x))[0],
    "RNN": lambda x: RNN(sequences(x))[0],
    "RNN relu": lambda x: RELU_RNN(sequences(x))[0],
}

# Draws that only take a shape or probabilities from the input.
DRAWS: dict[str, Fn] = {
    "rand": lambda x: torch.rand(len(x), 3),
    "rand tuple": lambda x: torch.rand((len(x), 3), dtype=torch.float16),
    "rand size": lambda x: torch.rand(size=(len(x) * 2, 3)),
    "rand complex": lambda x: torch.rand(len(x), 3, dtype=torch.complex64),
    "randn": lambda x: torch.randn(len(x), 3),
    "randn complex": lambda x: torch.randn(len(x), 3, dtype=torch.complex128),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint": lambda x: torch.randint(1000, (len(x), 3)),
    "randint low": lambda x: torch.randint(-500, 500, (len(x), 3)),
    "randint named": lambda x: torch.randint(low=-500, high=500, size=(len(x), 3)),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "randint_like low": lambda x: torch.randint_like(x, -500, 500),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal std": lambda x: torch.normal(0.0, x.abs()),
    "normal both": lambda x: torch.normal(x, x.abs()),
    "normal size": lambda x: torch.normal(1.0, 2.0, (len(x), 3)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.5),
    "Tensor.bernoulli": lambda x: x.bernoulli(0.5),
    "multinomial": lambda x: torch.multinomial(x.flatten(1).exp(), 5),
    "multinomial replacement": lambda x: x.flatten(1).exp().multinomial(5, True),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "bernoulli_ tensor": lambda x: torch.empty_like(x).repeat(2, 1, 1, 1).bernoulli_(torch.tensor(0.5)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "normal_": lambda x: torch.empty_like(x).normal_(1, std=2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "distributions.Normal": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "distributions.Categorical": lambda x: torch.distributions.Categorical(logits=x).sample(),
}
CASES = DIFFERENTIABLE | DRAWS
every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_one_key_gives_one_result_and_another_key_batch_or_call_another(name: str) -> None:
    fn, x = CASES[name], images()
    before = torch.get_rng_state()
    first = run(fn, x)
    assert torch.equal(run(fn, x), first)
    assert not torch.equal(run(fn, x, Rng(key(1))), first)
    assert not torch.equal(run(fn, x, Rng(fold_in(key(0), 1))), first)
    with keyed(Rng(key(0)), num_examples=len(x)) as record:
        again, other = fn(x), fn(x)
    assert torch.equal(again, first) and not torch.equal(other, first)
    assert record.count >= 2
    assert torch.equal(torch.get_rng_state(), before)


@every_case
@pytest.mark.parametrize("first_example", [2, torch.tensor(2)], ids=["int", "tensor"])
def test_a_microbatch_draws_the_rows_of_the_whole_batch(name: str, first_example: int | Tensor) -> None:
    fn, x = CASES[name], images()
    whole = run(fn, x)
    part = run(fn, x[2:4], num_examples=2, first_example=first_example)
    rows = whole.unflatten(0, (6, -1))[2:4].flatten(0, 1)
    # Matrix products of another size may round differently; only these need a tolerance.
    has_products = name.startswith(("sdpa", "Multi", "Transformer", "LSTM", "GRU", "RNN"))
    tolerance = 1e-12 if has_products else 0.0
    torch.testing.assert_close(part, rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_flow(name: str) -> None:
    x = images().requires_grad_()
    out = run(DIFFERENTIABLE[name], x)
    (gradient,) = torch.autograd.grad((out * out.detach().cos()).sum(), x)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0


@pytest.mark.parametrize("fn", [lambda x: torch.rand(5), lambda x: torch.randperm(9)])
def test_a_draw_of_another_leading_size_is_one_for_all_examples_of_the_pass(fn: Fn) -> None:
    whole, x = run(fn, torch.empty(6)), torch.empty(2)
    assert torch.equal(run(fn, torch.empty(6), num_examples=None), whole)
    slices = [run(fn, x, first_example=first) for first in (0, 2, 4)]
    assert torch.equal(slices[0], whole)
    assert len({tuple(one.flatten().tolist()) for one in slices}) == 3
    assert torch.equal(run(fn, x, first_example=torch.tensor(4)), slices[2])


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.data())
def test_rows_of_any_part_are_the_rows_of_the_whole(n: int, rows: int, rest: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, n - 1))
    size = data.draw(st.integers(1, n - first))
    whole = run(lambda x: torch.randn(n * rows, *([2] * rest)), torch.empty(n))
    part = run(lambda x: torch.randn(size * rows, *([2] * rest)), torch.empty(size), first_example=first)
    assert torch.equal(part, whole[first * rows : (first + size) * rows])


KEYS_FIRST: dict[str, Fn] = {
    name: CASES[name]
    for name in ("F.dropout", "F.dropout inplace", "F.dropout2d", "sdpa")
    + ("rand_like", "bernoulli", "randint", "MultiheadAttention fused", "TransformerEncoderLayer")
} | {
    "empty filled": lambda x: torch.empty(len(x), 3).normal_(),
    "new filled": lambda x: x.new(x.shape).exponential_(),
    "new of values": lambda x: torch.rand(len(x)) + x.new([2.0]),
}


@pytest.mark.parametrize("name", KEYS_FIRST)
def test_vmap_over_keys_equals_the_loop(name: str) -> None:
    x, keys = images(2), split(key(0), 3)
    stacked = vmap(lambda k: run(KEYS_FIRST[name], x, Rng(k)))(keys)
    looped = torch.stack([run(KEYS_FIRST[name], x, Rng(k)) for k in keys])
    torch.testing.assert_close(stacked, looped, rtol=1e-12, atol=1e-14)


def test_vmap_names_a_fill_that_members_would_share() -> None:
    def fill(k: Tensor) -> Tensor:
        with keyed(Rng(k)):
            return torch.zeros(3).normal_()

    with pytest.raises(UnkeyedRandomError, match=r"torch.Tensor.normal_.*members of a vmap.*randn_like"):
        vmap(fill)(split(key(0), 2))


@pytest.mark.parametrize("name", ["F.dropout", "sdpa", "MultiheadAttention", "RNN", "multinomial"])
def test_a_trace_equals_eager(name: str) -> None:
    x = images(2)

    def fn(x: Tensor, k: Tensor, first: Tensor) -> Tensor:
        return run(CASES[name], x, Rng(k), first_example=first)

    traced = make_fx(fn)(x, key(5), torch.tensor(0))
    torch.testing.assert_close(traced(x, key(6), torch.tensor(4)), fn(x, key(6), torch.tensor(4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_traced_gradient_of_attention_equals_eager(dtype: torch.dtype) -> None:
    def slope(x: Tensor) -> Tensor:
        with keyed(Rng(key(3)), num_examples=2):
            return grad(lambda x: sdpa(x).float().square().sum())(x)

    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(make_fx(slope)(x)(x), slope(x)) and slope(x).dtype is dtype


def test_func_grad_equals_autograd() -> None:
    x, net = (images(2), seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Dropout(), nn.Linear(5, 1))))
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        with keyed(Rng(key(0)), num_examples=2):
            return functional_call(net, params, (x,)).square().sum()

    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    expected = torch.autograd.grad(loss(leaves), list(leaves.values()))
    torch.testing.assert_close(list(grad(loss)(params).values()), list(expected))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "poisson": (lambda: torch.poisson(torch.ones(3)), "torch.poisson"),
    "binomial": (lambda: torch.binomial(torch.ones(3), torch.ones(3)), "torch.binomial"),
    "gamma": (
        lambda: torch.distributions.Gamma(torch.ones(3), 1.0).sample(),
        r"torch.distributions.gamma.Gamma.sample`, by `torch._standard_gamma`.*state.example_rng\(name",
    ),
    "dirichlet": (lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(), "torch._sample_dirichlet"),
    "cauchy": (lambda: torch.empty(3).cauchy_(), "Tensor.cauchy_.*torch.rand"),
    "geometric": (lambda: torch.empty(3).geometric_(0.1), "Tensor.geometric_"),
    "alpha dropout": (lambda: F.alpha_dropout(torch.ones(3), training=True), "functional.alpha_dropout"),
    "rrelu": (lambda: F.rrelu(torch.ones(3), training=True), "functional.rrelu"),
    "fractional": (lambda: F.fractional_max_pool2d(torch.ones(1, 1, 4, 4), 2, 2), "fractional_max_pool2d"),
    "linear": (lambda: nn.Linear(3, 2), r"Linear.__init__.*uniform_"),
    "generator": (lambda: torch.rand(3, generator=torch.Generator()), r"torch.rand.*given a generator"),
    "generator in place": (lambda: torch.empty(3).normal_(generator=torch.Generator()), "given a generator"),
    "sparse": (lambda: torch.rand(3, layout=torch.sparse_coo), "layout="),
    "out": (lambda: torch.rand(3, out=torch.empty(3)), "out="),
    "out of bernoulli": (lambda: torch.bernoulli(torch.ones(3), out=torch.empty(3)), "torch.bernoulli.*out="),
    "out of multinomial": (
        lambda: torch.multinomial(torch.ones(3), 2, out=torch.empty(2, dtype=torch.int64)),
        "torch.multinomial.*out=",
    ),
    "out of normal": (lambda: torch.normal(torch.ones(3), 1.0, out=torch.empty(3)), "torch.normal.*out="),
    "integers": (lambda: torch.empty(3).random_(), "Tensor.random_"),
    "init": (lambda: nn.init.normal_(torch.empty(3, 2)), "normal_"),
    "packed": (
        lambda: LSTM(nn.utils.rnn.pack_padded_sequence(sequences(images()), torch.full((6,), 9), batch_first=True)),
        "packed sequences",
    ),
    "detected": (lambda: torch.ops.aten.native_dropout(torch.ones(3), 0.5, True), "aten.native_dropout.default"),
    "detected fill": (lambda: torch.ops.aten.normal_(torch.ones(3)), "aten.normal_.default"),
}


class Wrapped(nn.Module):
    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self) -> Any:
        return self.fn()


@pytest.mark.parametrize("name", REFUSED)
def test_a_random_function_without_a_keyed_form_is_named_with_its_module(name: str) -> None:
    fn, named = REFUSED[name]
    before = torch.get_rng_state()
    with keyed(Rng(key(0))), detect(), pytest.raises(UnkeyedRandomError, match=rf"(?s){named}") as caught:
        Wrapped(fn)()
    assert "Wrapped.forward" in str(caught.value) or name == "packed" and "LSTM.forward" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_argument_of_none_is_accepted() -> None:
    with keyed(Rng(key(0))) as record:
        torch.rand(3, generator=None)
    assert record.count == 1


def test_an_empty_tensor_is_the_given_one() -> None:
    given = torch.ones(3)
    with keyed(Rng(key(0))):
        assert torch.empty(3, out=given) is given


def test_detect_ignores_operations_that_draw_nothing_and_names_the_first_draw() -> None:
    x = images()
    with detect() as detector:
        F.dropout(x, 0.5, training=False)
        F.rrelu(x)
        F.scaled_dot_product_attention(x.float(), x.float(), x.float())
        with pytest.raises(UnkeyedRandomError, match="aten.bernoulli_.float"):
            F.dropout(x)
    assert detector.found == ["aten.bernoulli_.float"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["F.dropout", "F.dropout2d", "gumbel_softmax"])
def test_dtype_and_memory_format_are_kept(name: str, dtype: torch.dtype) -> None:
    x = images().to(dtype).to(memory_format=torch.channels_last)
    out = run(DIFFERENTIABLE[name], x)
    assert out.dtype == dtype and out.isfinite().all()
    assert name == "gumbel_softmax" or out.is_contiguous(memory_format=torch.channels_last)
    like = run(torch.rand_like, x)
    assert like.dtype == dtype and like.stride() == x.stride()
