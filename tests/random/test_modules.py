"""Random functions in modules' forwards draw from keys: what they give, leave alone and refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from purecompose.random.keys import Rng, key, split
from purecompose.random.modules import UnkeyedRandomError, checkpoint, detect, keyed


Fn = Callable[[Tensor], Tensor]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A float64 module with the same weights in every run, made without moving the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def images(n: int = 6) -> Tensor:
    return torch.linspace(-2.0, 2.0, n * 4 * 36, dtype=torch.float64).sin().reshape(n, 4, 6, 6)


def sequences(x: Tensor) -> Tensor:
    """(n, 18, 8) from images."""
    return x.reshape(len(x), 18, 8)


MHA = seeded(lambda: nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True))
MHA_SEQUENCE_FIRST = seeded(lambda: nn.MultiheadAttention(8, 2, dropout=0.4))
ENCODER = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True))
DECODER = seeded(lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.4, batch_first=True))
LSTM = seeded(lambda: nn.LSTM(8, 5, 3, dropout=0.4, batch_first=True, bidirectional=True, proj_size=3))
LSTM_SEQUENCE_FIRST = seeded(lambda: nn.LSTM(8, 5, 2, dropout=0.4))
GRU = seeded(lambda: nn.GRU(8, 5, 2, dropout=0.4, batch_first=True))
RNN = seeded(lambda: nn.RNN(8, 5, 2, dropout=0.4, batch_first=True, bias=False))
RELU_RNN = seeded(lambda: nn.RNN(8, 5, 2, dropout=0.4, batch_first=True, nonlinearity="relu"))


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
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "F.alpha_dropout inplace": lambda x: F.alpha_dropout(x * 1, 0.4, training=True, inplace=True),
    "F.feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "torch.dropout named": lambda x: torch.dropout(x, p=0.4, train=True),
    "torch.dropout_": lambda x: torch.dropout_(x * 1, 0.4, True),
    "torch.feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "torch.feature_dropout_": lambda x: torch.feature_dropout_(x * 1, 0.4, True),
    "torch.alpha_dropout": lambda x: torch.alpha_dropout(x, 0.4, True),
    "torch.alpha_dropout_": lambda x: torch.alpha_dropout_(x * 1, 0.4, True),
    "torch.feature_alpha_dropout": lambda x: torch.feature_alpha_dropout(x, 0.4, True),
    "torch.feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(x * 1, 0.4, True),
    "torch.native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "F.rrelu": lambda x: F.rrelu(x, training=True),
    "F.rrelu inplace": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "torch.rrelu": lambda x: torch.rrelu(x, 0.1, 0.5, True),
    "torch.rrelu_": lambda x: torch.rrelu_(x * 1, 0.1, 0.5, True),
    "nn.RReLU": nn.RReLU(),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, output_size=4),
    "nn.FractionalMaxPool2d": nn.FractionalMaxPool2d(2, output_ratio=0.7),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(
        x.unsqueeze(1), (2, 2, 2), output_size=(2, 4, 4)
    ),
    "fractional_max_pool2d indices": lambda x: F.fractional_max_pool2d(x, 2, 4, return_indices=True)[0],
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

# Draws that take no more than a shape, or probabilities, from the input.
DRAWS: dict[str, Fn] = {
    "rand": lambda x: torch.rand(len(x), 3),
    "rand tuple": lambda x: torch.rand((len(x), 3), dtype=torch.float16),
    "rand size": lambda x: torch.rand(size=(len(x) * 2, 3)),
    "rand out": lambda x: torch.rand(len(x), 3, out=torch.empty(len(x), 3)),
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
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.1),
    "random_": lambda x: torch.empty_like(x).random_(),
    "random_ to": lambda x: torch.empty_like(x).random_(1000),
    "random_ from to": lambda x: torch.empty(len(x), 3, dtype=torch.int8).random_(-100, 100),
    "init.uniform_": lambda x: nn.init.uniform_(torch.empty(len(x), 3)),
    "init.normal_": lambda x: nn.init.normal_(torch.empty(len(x), 3)),
    "distributions.Normal": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "distributions.Categorical": lambda x: torch.distributions.Categorical(logits=x).sample(),
}
CASES = DIFFERENTIABLE | DRAWS
every_case = pytest.mark.parametrize("name", CASES)


def run(fn: Fn, x: Tensor, rng: Rng | None = None, **place: Any) -> Tensor:
    rng = Rng(key(0)) if rng is None else rng
    with keyed(rng, **{"num_examples": len(x)} | place), detect():
        return fn(x)


@every_case
def test_one_key_gives_one_result_and_another_key_batch_or_call_another(name: str) -> None:
    fn, x = CASES[name], images()
    before = torch.get_rng_state()
    first = run(fn, x)
    assert torch.equal(run(fn, x), first)
    assert not torch.equal(run(fn, x, Rng(key(1))), first)
    assert not torch.equal(run(fn, x, Rng(key(0), batch=1)), first)
    with keyed(Rng(key(0)), num_examples=len(x)) as record:
        again, other = fn(x), fn(x)
    assert torch.equal(again, first) and not torch.equal(other, first)
    assert record.draws >= 2
    assert torch.equal(torch.get_rng_state(), before)


@every_case
@pytest.mark.parametrize("first_example", [2, torch.tensor(2)], ids=["int", "tensor"])
def test_a_microbatch_draws_the_rows_of_the_whole_batch(name: str, first_example: int | Tensor) -> None:
    fn, x = CASES[name], images()
    whole = run(fn, x)
    part = run(fn, x[2:4], num_examples=2, first_example=first_example)
    rows = whole.unflatten(0, (6, -1))[2:4].flatten(0, 1)
    # Matrix products of another size may round otherwise: there, and only there, a tolerance.
    has_products = name.startswith(("sdpa", "Multi", "Transformer", "LSTM", "GRU", "RNN"))
    tolerance = 1e-12 if has_products else 0.0
    torch.testing.assert_close(part, rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_flow(name: str) -> None:
    x = images().requires_grad_()
    out = run(DIFFERENTIABLE[name], x)
    (gradient,) = torch.autograd.grad((out * out.detach().cos()).sum(), x)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0


IDLE: dict[str, Fn] = {
    "F.dropout eval": lambda x: F.dropout(x, 0.4, training=False),
    "F.dropout p=0": lambda x: F.dropout(x, 0.0),
    "nn.Dropout eval": nn.Dropout(0.4).eval(),
    "F.dropout2d eval": lambda x: F.dropout2d(x, 0.4, training=False),
    "F.dropout2d p=0": lambda x: F.dropout2d(x, 0.0),
    "F.alpha_dropout eval": lambda x: F.alpha_dropout(x, 0.4),
    "F.feature_alpha_dropout p=0": lambda x: F.feature_alpha_dropout(x, 0.0, training=True),
    "torch.dropout eval": lambda x: torch.dropout(x, 0.4, False),
    "torch.alpha_dropout_ p=0": lambda x: torch.alpha_dropout_(x * 1, 0.0, True),
    "torch.native_dropout eval": lambda x: torch.native_dropout(x, 0.4, False)[0],
}


@pytest.mark.parametrize("name", IDLE)
def test_without_training_or_with_p_0_nothing_is_drawn(name: str) -> None:
    x = images()
    with keyed(Rng(key(0)), num_examples=len(x)) as record, detect():
        assert torch.equal(IDLE[name](x), x)
    assert record.draws == 0


@pytest.mark.parametrize("module", [MHA, ENCODER, DECODER, LSTM, GRU], ids=lambda m: type(m).__name__)
def test_modules_in_eval_are_those_of_torch(module: nn.Module) -> None:
    s = sequences(images())
    inputs = {"MultiheadAttention": (s, s, s), "TransformerDecoderLayer": (s, s)}.get(
        type(module).__name__, (s,)
    )
    module.eval()
    try:
        expected = module(*inputs)
        with keyed(Rng(key(0)), num_examples=len(s)) as record, detect():
            result = module(*inputs)
    finally:
        module.train()
    assert record.draws == 0
    torch.testing.assert_close(result, expected)


P_ONE: dict[str, Fn] = {
    "F.dropout": lambda x: F.dropout(x, 1.0),
    "F.dropout inplace": lambda x: F.dropout(x * 1, 1.0, inplace=True),
    "F.dropout2d": lambda x: F.dropout2d(x, 1.0),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 1.0, training=True),
    "torch.native_dropout": lambda x: torch.native_dropout(x, 1.0, True)[0],
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=1.0),
}


@pytest.mark.parametrize("name", P_ONE)
def test_p_1_gives_zeros_and_zero_gradients(name: str) -> None:
    x = images().requires_grad_()
    out = run(P_ONE[name], x)
    assert out.eq(0).all()
    assert torch.autograd.grad(out.sum(), x)[0].eq(0).all()


@pytest.mark.parametrize("module", [LSTM, LSTM_SEQUENCE_FIRST, GRU, RNN, RELU_RNN], ids=lambda m: m.mode)
def test_recurrent_layers_with_p_1_are_those_of_torch(module: nn.RNNBase) -> None:
    """With p = 1 torch's own kernel is deterministic, as later layers see zeros."""
    s = sequences(images())
    p, module.dropout = module.dropout, 1.0
    try:
        with torch.random.fork_rng():
            output, state = module(s)
        new_output, new_state = run(module, s)
    finally:
        module.dropout = p
    torch.testing.assert_close(new_output, output)
    torch.testing.assert_close(new_state, state)


def test_an_lstm_is_its_layers_with_dropout_between() -> None:
    s = sequences(images())
    lstm = seeded(lambda: nn.LSTM(8, 5, 2, dropout=0.4, batch_first=True))
    layers = [
        seeded(lambda: nn.LSTM(8, 5, batch_first=True)),
        seeded(lambda: nn.LSTM(5, 5, batch_first=True)),
    ]
    for index, layer in enumerate(layers):
        weights = {name[:-1] + "0": w for name, w in lstm.named_parameters() if name.endswith(str(index))}
        layer.load_state_dict(weights)
    expected = run(lambda s: layers[1](F.dropout(layers[0](s)[0], 0.4))[0], s)
    torch.testing.assert_close(run(lambda s: lstm(s)[0], s), expected)
    hidden = torch.ones(2, 6, 5, dtype=torch.float64)
    with keyed(Rng(key(0)), num_examples=6):
        expected, (last, _) = lstm(s, (hidden, hidden))
    assert last.shape == hidden.shape and not torch.equal(expected, run(lambda s: lstm(s)[0], s))


def test_an_lstm_draws_the_same_in_both_layouts() -> None:
    s = sequences(images())
    other = nn.LSTM(8, 5, 2, dropout=0.4, batch_first=True).double()
    other.load_state_dict(LSTM_SEQUENCE_FIRST.state_dict())
    expected = run(lambda s: LSTM_SEQUENCE_FIRST(s.transpose(0, 1))[0].transpose(0, 1), s)
    torch.testing.assert_close(run(lambda s: other(s)[0], s), expected)


def test_dropout_keeps_with_probability_1_minus_p_and_scales() -> None:
    out = run(lambda x: F.dropout(x, 0.3), torch.ones(100, 200))
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 0.7))
    assert stats.binomtest(int(kept.sum()), kept.numel(), 0.7).pvalue > 1e-3


def test_feature_dropout_drops_whole_channels() -> None:
    x = torch.ones(50, 20, 3, 3)
    for fn in (
        F.dropout2d,
        lambda x: F.dropout3d(x.unsqueeze(2)).squeeze(2),
        lambda x: F.dropout1d(x.flatten(2)),
    ):
        out = run(fn, x).flatten(2)
        assert out.eq(out[..., :1]).all()
        assert stats.binomtest(int((out[..., 0] != 0).sum()), 1000, 0.5).pvalue > 1e-3


def test_feature_dropout_of_unbatched_input_drops_channels() -> None:
    out = run(lambda x: F.dropout1d(x), torch.ones(64, 5), num_examples=None)
    assert out.shape == (64, 5) and out.eq(out[:, :1]).all() and out[:, 0].unique().tolist() == [0.0, 2.0]
    x = torch.ones(64, 5)
    assert run(lambda x: F.dropout1d(x, inplace=True), x, num_examples=None) is x and torch.equal(x, out)


def test_alpha_dropout_keeps_mean_0_and_variance_1() -> None:
    x = run(torch.randn_like, torch.empty(200, 500))
    for fn in (F.alpha_dropout, F.feature_alpha_dropout):
        out = run(lambda x, fn=fn: fn(x, 0.3, training=True), x, Rng(key(1)))
        assert abs(out.mean()) < 0.02 and abs(out.var() - 1) < 0.02
        # Dropped elements all have one value: SELU's saturation, rescaled.
        values, counts = out.unique(return_counts=True)
        assert stats.binomtest(int(counts.max()), out.numel(), 0.3).pvalue > 1e-3
        scale, alpha = 1.0507009873554805, 1.6732632423543772  # SELU: Klambauer et al. 2017
        a = (0.7 + (scale * alpha) ** 2 * 0.7 * 0.3) ** -0.5
        torch.testing.assert_close(
            values[counts.argmax()].item(), -a * scale * alpha * 0.7, rtol=1e-5, atol=0.0
        )


def test_in_place_forms_write_into_their_input() -> None:
    for name, fn in {"dropout": F.dropout, "dropout2d": F.dropout2d}.items():
        x = images()
        expected = run(lambda x, fn=fn: fn(x, 0.4), x)
        assert run(lambda x, fn=fn: fn(x, 0.4, True, True), x) is x, name
        assert torch.equal(x, expected)


def test_in_place_dropout_of_a_leaf_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="leaf Variable"):
        run(lambda x: F.dropout(x, inplace=True), images().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["F.dropout", "F.dropout2d", "F.alpha_dropout", "F.rrelu", "gumbel_softmax"])
def test_dtype_and_memory_format_are_kept(name: str, dtype: torch.dtype) -> None:
    x = images().to(dtype).to(memory_format=torch.channels_last)
    out = run(DIFFERENTIABLE[name], x)
    assert out.dtype == dtype and out.isfinite().all()
    assert name == "gumbel_softmax" or out.is_contiguous(memory_format=torch.channels_last)
    like = run(torch.rand_like, x)
    assert like.dtype == dtype and like.stride() == x.stride()


def attention_inputs(heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Values are the identity, so that the output is the matrix of weights."""
    q, k = images(3).reshape(3, heads, -1, 9)[:, :, :4], images(3).cos().reshape(3, heads, -1, 9)[:, :, :4]
    return q, k, torch.eye(4, dtype=torch.float64).expand(3, heads, 4, 4)


BAND = torch.ones(4, 4).tril(1).triu(-1).bool()
BAND_WITH_AN_EMPTY_ROW = BAND & torch.tensor([[True], [True], [False], [True]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": BAND},
        {"attn_mask": BAND_WITH_AN_EMPTY_ROW},
        {"attn_mask": torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)},
    ],
    ids=["plain", "causal", "scale", "mask", "empty row", "bias"],
)
def test_attention_weights_are_those_of_torch_or_0(options: dict[str, Any]) -> None:
    q, k, v = attention_inputs()
    expected = F.scaled_dot_product_attention(q, k, v, **options) / 0.7
    q = q.clone().requires_grad_()
    out = run(lambda q: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **options), q)
    possible = expected > 0
    dropped = (out == 0) & possible
    torch.testing.assert_close(out.where(~dropped, expected), expected)
    assert stats.binomtest(int(dropped.sum()), int(possible.sum()), 0.3).pvalue > 1e-3
    assert torch.autograd.grad(out.square().sum(), q)[0].isfinite().all()


def test_attention_shares_keys_between_query_heads() -> None:
    q, k, v = attention_inputs()
    expected = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True) / 0.7
    grouped = {"dropout_p": 0.3, "enable_gqa": True}
    out = run(lambda q: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], **grouped), q)
    torch.testing.assert_close(out.where(out != 0, expected), expected)
    assert (out == 0).any()


def test_attention_in_half_precision_follows_the_fused_kernel() -> None:
    q, k, v = (tensor.bfloat16() for tensor in attention_inputs())
    expected = F.scaled_dot_product_attention(q, k, v) / 0.7
    out = run(lambda q: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), q)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.where(out != 0, expected), expected, rtol=3e-2, atol=1e-2)


def test_attention_refuses_what_torch_refuses_and_names_masks_it_does_not_know() -> None:
    q, k, v = attention_inputs()
    with pytest.raises(ValueError, match="not both"):
        run(lambda q: F.scaled_dot_product_attention(q, k, v, BAND, 0.3, is_causal=True), q)
    mask: Any = causal_lower_right(4, 5)
    with pytest.raises(UnkeyedRandomError, match="CausalBias"):
        run(lambda q: F.scaled_dot_product_attention(q, k, v, mask, 0.3), q)


N = 20_000
FLOATS: dict[str, tuple[Callable[[], Tensor], Any]] = {
    "rand": (lambda: torch.rand(N), stats.uniform()),
    "randn": (lambda: torch.randn(N), stats.norm()),
    "normal": (lambda: torch.normal(torch.full((N,), 1.0), 2.0), stats.norm(1, 2)),
    "uniform_": (lambda: torch.empty(N).uniform_(-1.0, 3.0), stats.uniform(-1, 4)),
    "uniform_ named": (
        lambda: torch.Tensor.uniform_(torch.empty(N), **{"from": -1.0, "to": 3.0}),
        stats.uniform(-1, 4),
    ),
    "normal_": (lambda: torch.empty(N).normal_(1.0, 2.0), stats.norm(1, 2)),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), stats.expon(scale=0.5)),
    "log_normal_": (lambda: torch.empty(N).log_normal_(0.5, 0.25), stats.lognorm(0.25, scale=torch.e**0.5)),
    "cauchy_": (lambda: torch.empty(N).cauchy_(1.0, 2.0), stats.cauchy(1, 2)),
    "randn complex": (lambda: torch.randn(N, dtype=torch.complex64).real, stats.norm(0, 0.5**0.5)),
    "rrelu": (lambda: -F.rrelu(-torch.ones(N), 0.1, 0.5, training=True), stats.uniform(0.1, 0.4)),
}


@pytest.mark.parametrize("name", FLOATS)
def test_continuous_distributions(name: str) -> None:
    draw, law = FLOATS[name]
    with keyed(Rng(key(3))):
        sample = draw()
    assert stats.kstest(sample.double().numpy(), law.cdf).pvalue > 1e-3


def counts_agree(sample: Tensor, probabilities: list[float]) -> bool:
    counts = torch.bincount(sample.long().flatten(), minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    expected = [p * sample.numel() for p in probabilities]
    keep = [i for i, e in enumerate(expected) if e > 0]
    assert all(counts[i] == 0 for i, e in enumerate(expected) if e == 0)
    return stats.chisquare([counts[i].item() for i in keep], [expected[i] for i in keep]).pvalue > 1e-3


WEIGHTS = torch.tensor([0.0, 0.1, 0.0, 0.4, 0.5, 0.0])
INTEGERS: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "randint": (lambda: torch.randint(3, 7, (N,)) - 3, [0.25] * 4),
    "random_": (lambda: torch.empty(N, dtype=torch.int32).random_(-2, 2) + 2, [0.25] * 4),
    "random_ bool": (lambda: torch.empty(N, dtype=torch.bool).random_(), [0.5] * 2),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), [0.7, 0.3]),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), [0.7, 0.3]),
    "multinomial": (lambda: torch.multinomial(WEIGHTS, N, replacement=True), WEIGHTS.tolist()),
    "multinomial first": (lambda: torch.multinomial(WEIGHTS.expand(N, 6), 2)[:, 0], WEIGHTS.tolist()),
    "gumbel_softmax": (
        lambda: F.gumbel_softmax(WEIGHTS.log().expand(N, 6), hard=True).argmax(-1),
        WEIGHTS.tolist(),
    ),
    "geometric_": (
        lambda: torch.empty(N).geometric_(0.5).clamp_max(4) - 1,
        [0.5, 0.25, 0.125, 0.125],
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_discrete_distributions(name: str) -> None:
    draw, probabilities = INTEGERS[name]
    with keyed(Rng(key(3))):
        assert counts_agree(draw(), probabilities)


def test_ranges_and_options_are_those_of_torch() -> None:
    with keyed(Rng(key(0))):
        whole = torch.empty(N, dtype=torch.int64).random_()
        assert whole.min() >= 0 and whole.max() > 2**62
        small = torch.empty(N, dtype=torch.uint8).random_()
        assert small.min() == 0 and small.max() == 255
        halves = torch.empty(N, dtype=torch.float16).random_()
        assert halves.max() <= 2048 and torch.equal(halves, halves.round())
        assert torch.rand(N, dtype=torch.bfloat16).max() < 1
        assert torch.empty(5).uniform_(2.0, 2.0).eq(2).all()
        order = torch.randperm(50, dtype=torch.int32)
        assert order.dtype == torch.int32 and order.sort().values.equal(torch.arange(50, dtype=torch.int32))
        assert torch.rand(3, requires_grad=True).requires_grad
        assert torch.rand(()).shape == () and torch.rand(0, 3).shape == (0, 3)
        assert torch.randn(2, 3, device="meta").shape == (2, 3)
        out = torch.empty(0)
        assert torch.rand(3, out=out) is out and out.shape == (3,)
        picks = torch.multinomial(torch.ones(100, 5), 5)
        assert picks.sort(-1).values.equal(torch.arange(5).expand(100, 5))
        assert nn.init.xavier_normal_(torch.empty(7, 5)).std() > 0
    with keyed(Rng(key(0))) as record:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.rand(2).dtype == torch.float64
        finally:
            torch.set_default_dtype(default)
    assert record.draws == 1


def test_a_draw_of_another_leading_size_is_one_for_the_whole_batch() -> None:
    whole = run(lambda x: torch.rand(5), torch.empty(6))
    assert torch.equal(run(lambda x: torch.rand(5), torch.empty(2), num_examples=2, first_example=4), whole)
    assert torch.equal(run(lambda x: torch.rand(6), torch.empty(6), num_examples=None)[:5], whole)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.data())
def test_rows_of_any_part_are_the_rows_of_the_whole(
    n: int, rows: int, rest: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, n - 1))
    size = data.draw(st.integers(1, n - first))
    whole = run(lambda x: torch.randn(n * rows, *([2] * rest)), torch.empty(n))
    part = run(lambda x: torch.randn(size * rows, *([2] * rest)), torch.empty(size), first_example=first)
    assert torch.equal(part, whole[first * rows : (first + size) * rows])


KEYS_FIRST: dict[str, Fn] = {
    name: CASES[name]
    for name in ("F.dropout", "F.dropout inplace", "F.dropout2d", "F.alpha_dropout", "sdpa", "gumbel_softmax")
    + ("rand_like", "bernoulli", "randint", "MultiheadAttention fused", "TransformerEncoderLayer")
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
            return torch.empty(3).normal_()

    with pytest.raises(UnkeyedRandomError, match=r"torch.Tensor.normal_.*members of a vmap.*randn_like"):
        vmap(fill)(split(key(0), 2))


@pytest.mark.parametrize("name", ["F.dropout", "sdpa", "TransformerEncoderLayer", "LSTM", "multinomial"])
def test_a_trace_equals_eager(name: str) -> None:
    x = images(2)

    def fn(x: Tensor, k: Tensor, first: Tensor) -> Tensor:
        return run(CASES[name], x, Rng(k), first_example=first)

    traced = make_fx(fn)(x, key(5), torch.tensor(0))
    torch.testing.assert_close(traced(x, key(6), torch.tensor(4)), fn(x, key(6), torch.tensor(4)))


def test_func_grad_equals_autograd() -> None:
    x, net = (
        images(2),
        seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Dropout(), nn.Linear(5, 1))),
    )
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
    "gamma": (lambda: torch.distributions.Gamma(torch.ones(3), 1.0).sample(), "_standard_gamma"),
    "dirichlet": (lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(), "_sample_dirichlet"),
    "linear": (lambda: nn.Linear(3, 2), "kaiming_uniform_"),
    "generator": (lambda: torch.rand(3, generator=torch.Generator()), r"torch.rand.*given a generator"),
    "generator in place": (lambda: torch.empty(3).normal_(generator=torch.Generator()), "given a generator"),
    "sparse": (lambda: torch.rand(3, layout=torch.sparse_coo), "sparse"),
    "packed": (
        lambda: LSTM(
            nn.utils.rnn.pack_padded_sequence(sequences(images()), torch.full((6,), 9), batch_first=True)
        ),
        "packed sequences",
    ),
    "detected": (
        lambda: torch.ops.aten.native_dropout(torch.ones(3), 0.5, True),
        "aten.native_dropout.default",
    ),
    "detected fill": (lambda: torch.ops.aten.normal_(torch.ones(3)), "aten.normal_.default"),
}


class Wrapped(nn.Module):
    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self) -> Any:
        return self.fn()


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_key_is_named_with_its_module(name: str) -> None:
    fn, named = REFUSED[name]
    before = torch.get_rng_state()
    with keyed(Rng(key(0))), detect(), pytest.raises(UnkeyedRandomError, match=rf"(?s){named}") as caught:
        Wrapped(fn)()
    assert "Wrapped.forward" in str(caught.value) or name == "packed" and "LSTM.forward" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_none_is_no_generator() -> None:
    with keyed(Rng(key(0))) as record:
        torch.rand(3, generator=None)
    assert record.draws == 1


def test_detect_lets_idle_operations_pass_and_names_the_first_that_is_not() -> None:
    x = images()
    with detect() as detector:
        F.dropout(x, 0.5, training=False)
        F.rrelu(x)
        F.scaled_dot_product_attention(x.float(), x.float(), x.float())
        with pytest.raises(UnkeyedRandomError, match="aten.bernoulli_.float"):
            F.dropout(x)
    assert detector.found == ["aten.bernoulli_.float"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (lambda: keyed(key(0)), TypeError),  # pyright: ignore[reportArgumentType]
        (lambda: keyed(Rng(key(0)), num_examples=2.0), TypeError),  # pyright: ignore[reportArgumentType]
        (lambda: keyed(Rng(key(0)), num_examples=-1), ValueError),
        (lambda: keyed(Rng(key(0)), first_example=torch.tensor([1, 2])), TypeError),
        (lambda: keyed(Rng(key(0)), first_example=True), TypeError),
    ],
)
def test_keyed_checks_its_arguments(arguments: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="keyed expects"):
        arguments()


class Block(nn.Module):
    """Two dropouts, one in a checkpointed region; `nested` puts a checkpoint in the region."""

    def __init__(self, checkpoint_fn: Callable[..., Tensor], nested: bool = False) -> None:
        super().__init__()
        self.checkpoint_fn, self.nested = checkpoint_fn, nested

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.4).cos()

    def region(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.4).tanh()
        return self.checkpoint_fn(self.inner, x).exp() if self.nested else self.inner(x).exp()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.dropout(self.checkpoint_fn(self.region, F.dropout(x, 0.4)), 0.4)
        return x


def plainly(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_with_checkpoint_are_those_without(nested: bool, inside: bool) -> None:
    x = images().requires_grad_()

    def gradient(checkpoint_fn: Callable[..., Any]) -> tuple[Tensor, Tensor, int]:
        with keyed(Rng(key(0)), num_examples=len(x)) as record:
            out = Block(checkpoint_fn, nested)(x)
            if inside:
                return out, torch.autograd.grad(out.sum(), x)[0], record.draws
        return out, torch.autograd.grad(out.sum(), x)[0], record.draws

    for result, expected in zip(gradient(checkpoint), gradient(plainly), strict=True):
        assert torch.equal(torch.as_tensor(result), torch.as_tensor(expected))


def test_a_checkpoint_can_be_computed_again_more_than_once() -> None:
    x = images().requires_grad_()
    with keyed(Rng(key(0))):
        out = Block(checkpoint)(x).sum()
        first = torch.autograd.grad(out, x, retain_graph=True)[0]
        after = F.dropout(x)
        assert torch.equal(torch.autograd.grad(out, x)[0], first)
    with keyed(Rng(key(0))):
        Block(plainly)(x)
        assert torch.equal(F.dropout(x), after)


def test_a_checkpoint_leaves_the_global_generator_alone_and_passes_keywords() -> None:
    x, before = images().requires_grad_(), torch.get_rng_state()
    with keyed(Rng(key(0))):
        out = checkpoint(F.dropout, x, p=0.25)
    torch.autograd.grad(out.sum(), x)
    assert torch.equal(out[out != 0], (x * (1 / 0.75))[out != 0])
    assert torch.equal(torch.get_rng_state(), before)


def test_outside_of_a_scope_a_checkpoint_is_torchs() -> None:
    x = images().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = torch.autograd.grad(Block(plainly)(x).sum(), x)[0]
        torch.manual_seed(0)
        assert torch.equal(torch.autograd.grad(Block(checkpoint)(x).sum(), x)[0], expected)


def test_under_a_transform_a_checkpoint_runs_plainly() -> None:
    def loss(checkpoint_fn: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: run(Block(checkpoint_fn), x).sum()

    x = images()
    assert torch.equal(grad(loss(checkpoint))(x), grad(loss(plainly))(x))
    keys = split(key(0), 2)
    stacked = vmap(lambda k: run(Block(checkpoint), x, Rng(k)))(keys)
    assert torch.equal(stacked[1], run(Block(plainly), x, Rng(keys[1])))


def test_torchs_own_checkpoint_around_a_draw_is_named() -> None:
    x = images().requires_grad_()
    with keyed(Rng(key(0))):
        with pytest.raises(UnkeyedRandomError, match="purecompose.checkpoint"):
            torch_checkpoint(F.dropout, x, use_reentrant=False)
        with pytest.raises(UnkeyedRandomError, match="purecompose.checkpoint"):
            checkpoint(lambda x: torch_checkpoint(F.dropout, x, use_reentrant=False), x)
        with pytest.raises(UnkeyedRandomError, match="purecompose.checkpoint"):
            torch_checkpoint(F.dropout, x, use_reentrant=True)
        with torch.no_grad():
            assert F.dropout(x).shape == x.shape


def test_torchs_own_checkpoint_around_a_whole_scope_draws_the_same_again() -> None:
    x = images().requires_grad_()
    forward = Block(plainly)
    out: Any = torch_checkpoint(lambda x: run(forward, x), x, use_reentrant=False)
    expected = run(forward, x)
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
