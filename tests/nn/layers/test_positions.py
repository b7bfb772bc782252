"""Linear biases against the paper's formula, and attention with them against sums written out, in double precision."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from purecompose.nn.layers import AlibiAttention, NoPositions, SelfAttention, alibi_bias, alibi_slopes


HEADS = st.integers(1, 40)
LENGTHS = st.integers(1, 12)


def slopes_of_the_paper(num_heads: int) -> list[float]:
    """Return the paper's slopes: of a power of two, or else of the next lower one and every second of the next."""
    power = 1
    while 2 * power <= num_heads:
        power *= 2
    ratio = 2 ** (-8 / power)
    slopes = [ratio ** (head + 1) for head in range(power)]
    above = [2 ** (-8 * (head + 1) / (2 * power)) for head in range(2 * power)]
    return slopes + above[0::2][: num_heads - power]


def make_attention(seed: int = 0, num_heads: int = 3, *, is_causal: bool = True) -> SelfAttention:
    torch.manual_seed(seed)
    return SelfAttention(4 * num_heads, num_heads, is_causal=is_causal)


def attention_by_hand(layer: SelfAttention, input: torch.Tensor) -> torch.Tensor:
    """Return the layer's output with biases, head by head and query by query, in float64."""
    weight, bias = layer.qkv.weight.double(), layer.qkv.bias.double()
    num, length, width = input.shape
    size = width // layer.num_heads
    query, key, value = (input.double() @ weight.T + bias).split(width, dim=-1)
    mixed = torch.zeros(num, length, width, dtype=torch.float64)
    for h, slope in enumerate(slopes_of_the_paper(layer.num_heads)):
        part = slice(h * size, (h + 1) * size)
        for n in range(num):
            for i in range(length):
                keys = range(i + 1) if layer.is_causal else range(length)
                logits = [query[n, i, part] @ key[n, j, part] / math.sqrt(size) - slope * abs(i - j) for j in keys]
                weights = torch.softmax(torch.stack(logits), 0)
                mixed[n, i, part] = sum(w * value[n, j, part] for w, j in zip(weights, keys, strict=True))
    return mixed @ layer.out.weight.double().T + layer.out.bias.double()


@given(HEADS)
def test_slopes_equal_the_papers(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads)
    assert slopes.shape == (num_heads,) and bool(((slopes > 0) & (slopes < 1)).all())
    expected = torch.tensor(slopes_of_the_paper(num_heads), dtype=torch.float64)
    torch.testing.assert_close(slopes.double(), expected, rtol=1e-6, atol=0)


def test_slopes_of_twelve_heads() -> None:
    expected = [2.0**-h for h in range(1, 9)] + [0.7071, 0.3536, 0.1768, 0.0884]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(expected), rtol=0, atol=5e-5)


@given(HEADS, LENGTHS)
def test_the_bias_is_symmetric_zero_on_the_diagonal_and_falls_with_the_distance(num_heads: int, length: int) -> None:
    bias = alibi_bias(num_heads, length, is_causal=False)
    assert torch.equal(bias, bias.mT) and bool((bias <= 0).all()) and not bias.diagonal(dim1=1, dim2=2).any()
    assert torch.equal(bias[:, 1:, 1:], bias[:, :-1, :-1])  # Toeplitz
    distances = [[abs(i - j) for j in range(length)] for i in range(length)]
    expected = -torch.tensor(slopes_of_the_paper(num_heads), dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(bias.double(), expected * torch.tensor(distances), rtol=1e-6, atol=0)


@given(HEADS, LENGTHS)
def test_biases_in_double_precision_are_exact_to_it(num_heads: int, length: int) -> None:
    slopes = torch.tensor(slopes_of_the_paper(num_heads), dtype=torch.float64)
    torch.testing.assert_close(alibi_slopes(num_heads, dtype=torch.float64), slopes, rtol=1e-14, atol=0)
    bias = alibi_bias(num_heads, length, is_causal=False, dtype=torch.float64)
    torch.testing.assert_close(bias[:, 0], -slopes[:, None] * torch.arange(length), rtol=1e-14, atol=0)
    assert alibi_slopes(num_heads, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_the_first_query_may_be_a_tensor() -> None:
    late = alibi_bias(2, 7, first_query=torch.tensor(4), num_queries=2)
    assert torch.equal(late, alibi_bias(2, 7)[:, 4:6])


@given(HEADS, LENGTHS, LENGTHS, st.booleans())
def test_the_bias_of_a_shorter_sequence_is_a_corner_of_that_of_a_longer(
    num_heads: int, length: int, more: int, is_causal: bool
) -> None:
    long = alibi_bias(num_heads, length + more, is_causal=is_causal)
    assert torch.equal(alibi_bias(num_heads, length, is_causal=is_causal), long[:, :length, :length])
    late = alibi_bias(num_heads, length + more, is_causal=is_causal, first_query=length, num_queries=more)
    assert torch.equal(late, long[:, length:])


def test_near_distances_are_distinguished_in_half_precision() -> None:
    bias = alibi_bias(2, 4000, dtype=torch.bfloat16)
    assert torch.equal(bias[:, -1, -5:], alibi_bias(2, 5).to(torch.bfloat16)[:, -1])


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), LENGTHS, st.booleans())
def test_attention_is_the_sum_written_out(num_heads: int, length: int, is_causal: bool) -> None:
    layer = make_attention(num_heads, num_heads, is_causal=is_causal)
    input = torch.randn(2, length, 4 * num_heads)
    expected = attention_by_hand(layer, input)
    torch.testing.assert_close(AlibiAttention(layer).double()(input.double()), expected, rtol=1e-6, atol=1e-9)
    again = make_attention(num_heads, num_heads, is_causal=is_causal)
    torch.testing.assert_close(AlibiAttention(again)(input).double(), expected, rtol=1e-5, atol=1e-6)


def test_attention_takes_over_the_parameters_and_settings() -> None:
    layer = SelfAttention(8, 2, is_causal=True, dropout=0.25)
    after = AlibiAttention(layer)
    assert after.qkv is layer.qkv and after.out is layer.out
    assert str(after) == str(layer).replace("SelfAttention", "AlibiAttention")
    assert after.state_dict().keys() == layer.state_dict().keys()


def test_attention_under_vmap_grad_and_autocast() -> None:
    layer, input = AlibiAttention(make_attention()), torch.randn(5, 2, 6, 12)
    torch.testing.assert_close(torch.vmap(layer)(input), torch.stack([layer(one) for one in input]))
    params: dict[str, torch.Tensor] = dict(layer.named_parameters())

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(layer, params, (input[0],)).square().sum()

    grads = torch.func.grad(loss)(params)
    expected = torch.autograd.grad(loss(params), list(params.values()))
    torch.testing.assert_close(list(grads.values()), list(expected), rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(input[0])
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), layer(input[0]), rtol=0.05, atol=0.05)


def test_no_positions_is_zero_for_any_length_and_dtype() -> None:
    layer = NoPositions()
    assert not list(layer.parameters()) and not list(layer.buffers())
    for dtype in (torch.bfloat16, torch.float64):
        hidden = torch.randn(2, 3, dtype=dtype)
        assert torch.equal(hidden + layer(hidden), hidden) and (hidden + layer(7)).dtype == dtype


def test_bad_numbers_of_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"alibi_slopes: num_heads: expected an int >= 1, got 0 \(int\)"):
        alibi_slopes(0)
    with pytest.raises(TypeError, match="num_heads: expected an int"):
        alibi_bias(1.5, 3)  # pyright: ignore[reportArgumentType]
