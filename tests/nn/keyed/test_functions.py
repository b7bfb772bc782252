"""The keyed forms of torch's random layers and functions against torch's, and against their laws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from purecompose.errors import UnkeyedRandomError
from purecompose.nn.keyed.modules import detect, keyed
from purecompose.random.keys import Rng, key
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
    "F.rrelu eval": lambda x: F.rrelu(x.abs()) * x.sign(),
}


@pytest.mark.parametrize("name", IDLE)
def test_without_training_or_with_p_0_nothing_is_drawn(name: str) -> None:
    x = images()
    with keyed(Rng(key(0)), num_examples=len(x)) as record, detect():
        assert torch.equal(IDLE[name](x), x)
    assert record.count == 0


@pytest.mark.parametrize("module", [MHA, ENCODER, DECODER, LSTM, GRU], ids=lambda m: type(m).__name__)
def test_modules_in_eval_are_those_of_torch(module: nn.Module) -> None:
    s = sequences(images())
    inputs = {"MultiheadAttention": (s, s, s), "TransformerDecoderLayer": (s, s)}.get(type(module).__name__, (s,))
    module.eval()
    try:
        expected = module(*inputs)
        with keyed(Rng(key(0)), num_examples=len(s)) as record, detect():
            result = module(*inputs)
    finally:
        module.train()
    assert record.count == 0
    torch.testing.assert_close(result, expected)


P_ONE: dict[str, Fn] = {
    "F.dropout": lambda x: F.dropout(x, 1.0),
    "F.dropout inplace": lambda x: F.dropout(x * 1, 1.0, inplace=True),
    "F.dropout2d": lambda x: F.dropout2d(x, 1.0),
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


def test_an_lstm_equals_its_layers_with_dropout_between_them() -> None:
    s = sequences(images())
    lstm = seeded(lambda: nn.LSTM(8, 5, 2, dropout=0.4, batch_first=True))
    layers = [seeded(lambda: nn.LSTM(8, 5, batch_first=True)), seeded(lambda: nn.LSTM(5, 5, batch_first=True))]
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
    for fn in (F.dropout2d, lambda x: F.dropout3d(x.unsqueeze(2)).squeeze(2), lambda x: F.dropout1d(x.flatten(2))):
        out = run(fn, x).flatten(2)
        assert out.eq(out[..., :1]).all()
        assert stats.binomtest(int((out[..., 0] != 0).sum()), 1000, 0.5).pvalue > 1e-3


def test_feature_dropout_of_unbatched_input_drops_channels() -> None:
    out = run(lambda x: F.dropout1d(x), torch.ones(64, 5), num_examples=None)
    assert out.shape == (64, 5) and out.eq(out[:, :1]).all() and out[:, 0].unique().tolist() == [0.0, 2.0]
    x = torch.ones(64, 5)
    assert run(lambda x: F.dropout1d(x, inplace=True), x, num_examples=None) is x and torch.equal(x, out)


def test_in_place_forms_write_into_their_input() -> None:
    for name, fn in {"dropout": F.dropout, "dropout2d": F.dropout2d}.items():
        x = images()
        expected = run(lambda x, fn=fn: fn(x, 0.4), x)
        assert run(lambda x, fn=fn: fn(x, 0.4, True, True), x) is x, name
        assert torch.equal(x, expected)


def test_in_place_dropout_of_a_leaf_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="leaf Variable"):
        run(lambda x: F.dropout(x, inplace=True), images().requires_grad_())


def attention_inputs(heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs whose values are the identity, so that the output is the matrix of weights."""
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_half_precision_takes_a_bias_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in attention_inputs())
    bias = torch.linspace(-1, 1, 16).reshape(4, 4)
    expected = F.scaled_dot_product_attention(q, k, v, bias) / 0.7
    out = run(lambda q: F.scaled_dot_product_attention(q, k, v, bias, 0.3), q)
    assert out.dtype == dtype
    torch.testing.assert_close(out.where(out != 0, expected), expected, rtol=3e-2, atol=1e-2)


def test_attention_refuses_the_same_as_torch_and_names_unknown_masks() -> None:
    q, k, v = attention_inputs()
    with pytest.raises(ValueError, match="not both"):
        run(lambda q: F.scaled_dot_product_attention(q, k, v, BAND, 0.3, is_causal=True), q)
    mask: Any = causal_lower_right(4, 5)
    with pytest.raises(UnkeyedRandomError, match="CausalBias"):
        run(lambda q: F.scaled_dot_product_attention(q, k, v, mask, 0.3), q)


# Random functions: their distributions, ranges and options


N = 20_000
NAMED: dict[str, Any] = {"from": -1.0, "to": 3.0}
FLOATS: dict[str, tuple[Callable[[], Tensor], Any]] = {
    "rand": (lambda: torch.rand(N), stats.uniform()),
    "randn": (lambda: torch.randn(N), stats.norm()),
    "normal": (lambda: torch.normal(torch.full((N,), 1.0), 2.0), stats.norm(1, 2)),
    "uniform_": (lambda: torch.empty(N).uniform_(-1.0, 3.0), stats.uniform(-1, 4)),
    "uniform_ named": (lambda: torch.empty(N).uniform_(**NAMED), stats.uniform(-1, 4)),
    "normal_": (lambda: torch.empty(N).normal_(1.0, 2.0), stats.norm(1, 2)),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), stats.expon(scale=0.5)),
    "randn complex": (lambda: torch.randn(N, dtype=torch.complex64).real, stats.norm(0, 0.5**0.5)),
}


@pytest.mark.parametrize("name", FLOATS)
def test_continuous_distributions(name: str) -> None:
    draw, law = FLOATS[name]
    with keyed(Rng(key(3))):
        sample = draw()
    assert stats.kstest(sample.double().numpy(), law.cdf).pvalue > 1e-3


def test_exponential_numbers_in_half_precision_are_never_0() -> None:
    with keyed(Rng(key(10))):
        assert F.gumbel_softmax(torch.zeros(2**19, 8, dtype=torch.float16)).isfinite().all()
        assert torch.empty(N, dtype=torch.float16).exponential_(1e6).gt(0).all()


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
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), [0.7, 0.3]),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), [0.7, 0.3]),
    "multinomial": (lambda: torch.multinomial(WEIGHTS, N, replacement=True), WEIGHTS.tolist()),
    "multinomial first": (lambda: torch.multinomial(WEIGHTS.expand(N, 6), 2)[:, 0], WEIGHTS.tolist()),
    "gumbel_softmax": (lambda: F.gumbel_softmax(WEIGHTS.log().expand(N, 6), hard=True).argmax(-1), WEIGHTS.tolist()),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_discrete_distributions(name: str) -> None:
    draw, probabilities = INTEGERS[name]
    with keyed(Rng(key(3))):
        assert counts_agree(draw(), probabilities)


def test_ranges_and_options_are_those_of_torch() -> None:
    with keyed(Rng(key(0))):
        assert torch.rand(N, dtype=torch.bfloat16).max() < 1
        assert torch.empty(5).uniform_(2.0, 2.0).eq(2).all()
        order = torch.randperm(50, dtype=torch.int32)
        assert order.dtype == torch.int32 and order.sort().values.equal(torch.arange(50, dtype=torch.int32))
        assert torch.rand(3, requires_grad=True).requires_grad
        assert torch.rand(()).shape == () and torch.rand(0, 3).shape == (0, 3)
        assert torch.randn(2, 3, device="meta").shape == (2, 3)
        picks = torch.multinomial(torch.ones(100, 5), 5)
        assert picks.sort(-1).values.equal(torch.arange(5).expand(100, 5))
    with keyed(Rng(key(0))) as record:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.rand(2).dtype == torch.float64
        finally:
            torch.set_default_dtype(default)
    assert record.count == 1
