"""Attention, feed-forward parts and positions, against formulas written out in float64."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from purecompose.nn.layers import FeedForward, PositionEmbedding, SelfAttention


def attention_by_hand(layer: SelfAttention, input: Tensor) -> Tensor:
    """Return the output, computed head by head and position by position in float64."""
    weight, bias = layer.qkv.weight.double(), layer.qkv.bias.double()
    (length, width), size = input.shape[1:], input.shape[2] // layer.num_heads
    results = torch.zeros(input.shape, dtype=torch.float64)
    for n, example in enumerate(input.double()):
        for head in range(layer.num_heads):
            rows = [slice(part * width + head * size, part * width + (head + 1) * size) for part in range(3)]
            query, key, value = (example @ weight[row].T + bias[row] for row in rows)
            for place in range(length):
                seen = place + 1 if layer.is_causal else length
                scores = torch.stack([query[place] @ key[other] / math.sqrt(size) for other in range(seen)]).exp()
                results[n, place, head * size : (head + 1) * size] = scores / scores.sum() @ value[:seen]
    return results @ layer.out.weight.double().T + layer.out.bias.double()


@given(
    heads=st.integers(1, 3),
    size=st.integers(1, 4),
    length=st.integers(1, 5),
    is_causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_is_its_formula(heads, size, length, is_causal, seed):
    torch.manual_seed(seed)
    layer = SelfAttention(heads * size, heads, is_causal=is_causal)
    input = torch.randn(2, length, heads * size)
    expected = attention_by_hand(layer, input)
    assert (layer(input) - expected).norm() < 1e-6 * expected.norm()


@given(order=st.permutations(range(6)), seed=st.integers(0, 99))
def test_attention_that_is_not_causal_ignores_the_order(order, seed):
    torch.manual_seed(seed)
    layer, input = SelfAttention(8, 2), torch.randn(3, 6, 8)
    torch.testing.assert_close(layer(input[:, order]), layer(input)[:, order])


@given(share=st.floats(0.1, 0.9), seed=st.integers(0, 9))
def test_dropout_keeps_the_mean(share, seed):
    """With all values equal, the mean over positions is that value; the other weights compensate for dropped ones."""
    torch.manual_seed(seed)
    layer = SelfAttention(2, 1, dropout=share)
    with torch.no_grad():
        layer.qkv.weight.zero_()
        layer.qkv.bias.fill_(1.0)
        layer.out.weight.copy_(torch.eye(2))
        layer.out.bias.zero_()
    found = layer(torch.zeros(1000, 20, 2))[..., 0]
    deviation = math.sqrt(share / (1 - share) / 20)
    torch.testing.assert_close(found.std().item(), deviation, rtol=0.1, atol=0.0)
    assert abs(found.mean().item() - 1) < 6 * deviation / math.sqrt(20_000)


@given(width=st.integers(1, 5), hidden=st.integers(1, 7), seed=st.integers(0, 99))
def test_feed_forward_is_two_layers_and_gelu(width, hidden, seed):
    torch.manual_seed(seed)
    layer, input = FeedForward(width, hidden), torch.randn(3, 4, width)
    inner = input.double() @ layer.up.weight.double().T + layer.up.bias.double()
    inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    expected = inner @ layer.down.weight.double().T + layer.down.bias.double()
    torch.testing.assert_close(layer(input).double(), expected, rtol=1e-5, atol=1e-6)


def test_feed_forward_takes_an_activation_and_drops_after_it():
    layer = FeedForward(3, 4, nn.ReLU(), 0.25)
    assert isinstance(layer.act, nn.ReLU)
    assert isinstance(layer.dropout, nn.Dropout) and layer.dropout.p == 0.25
    assert isinstance(FeedForward(3, 4).dropout, nn.Identity)


@given(places=st.integers(1, 6), data=st.data())
def test_positions_are_the_first_vectors(places, data):
    layer = PositionEmbedding(places, 3)
    length = data.draw(st.integers(1, places))
    assert torch.equal(layer(length), layer.weight[:length])
    assert torch.equal(layer(torch.zeros(2, length, 7)), layer.weight[:length])
    assert torch.equal(layer(torch.zeros(2, length, dtype=torch.int64)), layer.weight[:length])


@pytest.mark.parametrize(
    ("make_fn", "message"),
    [
        (lambda: SelfAttention(6, 4), r"SelfAttention: width=6 is not a multiple of num_heads=4"),
        (lambda: SelfAttention(4, 2, dropout=1.0), r"SelfAttention: dropout: .* in \[0, 1\), got 1.0"),
        (
            lambda: PositionEmbedding(4, 2)(5),
            r"at most 4 positions, got 5; truncate it, or build the model with a larger",
        ),
    ],
)
def test_bad_arguments_are_refused(make_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_fn()
