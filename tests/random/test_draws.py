"""Basic draws, permutations and choices: laws of positions, exact bounds, and distributions at fixed seeds."""

import itertools
import math
import struct
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, given, strategies as st
from scipy import stats
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.random import (
    Rng,
    bernoulli,
    bits,
    choice,
    draws,
    fold_in,
    key,
    normal,
    permutation,
    randint,
    split,
    uniform,
)
from purecompose.random.draws import _greatest_below
from purecompose.random.philox import PRECISION
from tests.sampling import one_in


# The seeds are fixed, so a statistic that passes once always passes; a wrong law has a p-value of about 0.
LEAST_P = 1e-3

DRAWS: dict[str, Callable[..., Tensor]] = {
    "bits": bits,
    "uniform": uniform,
    "uniform64": lambda k, s: uniform(k, s, dtype=torch.float64),
    "uniform_bounds": lambda k, s: uniform(k, s, low=-1.0, high=3.0),
    "normal": normal,
    "normal64": lambda k, s: normal(k, s, mean=1.0, std=2.0, dtype=torch.float64),
    "bernoulli": lambda k, s: bernoulli(k, 0.3, s),
    "randint": lambda k, s: randint(k, s, -5, 17),
    "randint_wide": lambda k, s: randint(k, s, 0, 2**60),
}
EXACT = [name for name in DRAWS if not name.startswith("normal")]

each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


@each_draw
@given(few=st.integers(0, 20), more=st.integers(0, 20))
def test_longer_draws_start_with_shorter_ones(draw: Callable[..., Tensor], few: int, more: int) -> None:
    few, more = sorted((few, more))
    assert torch.equal(draw(key(1), more)[:few], draw(key(1), few))


@each_draw
@given(st.permutations(range(7)), st.integers(0, 7), st.integers(1, 6))
def test_rows_belong_to_their_examples(draw: Callable[..., Tensor], order: list[int], num: int, width: int) -> None:
    rng = Rng(fold_in(key(2), torch.tensor(4))).named("noise")
    whole = draw(rng.per_example(torch.arange(7)), (7, width))
    some = torch.tensor(order[:num], dtype=torch.int64)
    assert torch.equal(draw(rng.per_example(some), (num, width)), whole[some])


@each_draw
def test_an_example_alone_draws_its_row(draw: Callable[..., Tensor]) -> None:
    rng = Rng(key(2)).named("noise")
    whole = draw(rng.per_example(torch.arange(5)), (5, 3))
    mapped = torch.func.vmap(lambda index: draw(rng.per_example(index), 3))(torch.arange(5))
    torch.testing.assert_close(mapped, whole)
    assert torch.equal(draw(rng.per_example(torch.arange(5)), 5), whole[:, 0])


@each_draw
def test_different_places_have_different_draws(draw: Callable[..., Tensor]) -> None:
    rng = Rng(key(3))
    places = [
        rng,
        Rng(key(4)),
        rng.named("a"),
        rng.named("b"),
        Rng(fold_in(key(3), 1)),
        rng.per_example(torch.tensor(2)),
    ]
    drawn = [tuple(draw(place, 40).tolist()) for place in places]
    assert len(set(drawn)) == len(places)
    assert tuple(draw(key(3), 40).tolist()) == drawn[0]


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_equals_loop(name: str) -> None:
    keys = split(key(0), 5)
    mapped = torch.func.vmap(lambda k: DRAWS[name](k, (3, 2)))(keys)
    looped = torch.stack([DRAWS[name](k, (3, 2)) for k in keys])
    tolerance = 0.0 if name in EXACT else 1e-6
    torch.testing.assert_close(mapped, looped, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tracing_mode", one_in(2, ["real", "fake"]))
@each_draw
def test_traces(draw: Callable[..., Tensor], tracing_mode: Literal["real", "fake"]) -> None:
    def step(key: Tensor, first: Tensor, batch: Tensor) -> Tensor:
        return draw(Rng(fold_in(key, batch), 6).per_example(first + torch.arange(4)), (4, 3))

    traced = make_fx(step, tracing_mode=tracing_mode)(key(0), torch.tensor(0), torch.tensor(0))
    arguments = (key(9), torch.tensor(8), torch.tensor(3))
    assert torch.equal(traced(*arguments), step(*arguments))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # from inside Inductor
@pytest.mark.parametrize("name", DRAWS)
def test_compiled_equals_eager(name: str) -> None:
    def step(key: Tensor, examples: Tensor) -> Tensor:
        return DRAWS[name](Rng(fold_in(key, 2), 6).per_example(examples), (5, 3))

    torch.compiler.reset()  # otherwise the names count as recompilations of one function, which are limited
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    tolerance = 0.0 if name in EXACT else 1e-5
    result, expected = compiled(key(3), torch.arange(5)), step(key(3), torch.arange(5))
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@each_draw
def test_one_stream_and_no_global_generator(draw: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        calls.append(key)
        return numbers(key, shape, dtype)

    numbers = draws.numbers
    monkeypatch.setattr(draws, "numbers", counted)
    before = torch.get_rng_state()
    draw(key(0), (3, 5))
    assert len(calls) == 1
    assert torch.equal(torch.get_rng_state(), before)


@each_draw
def test_empty_and_scalar_shapes(draw: Callable[..., Tensor]) -> None:
    assert draw(key(0), 0).shape == (0,)
    assert draw(key(0), (2, 0, 3)).shape == (2, 0, 3)
    assert draw(key(0), ()).shape == ()
    assert draw(Rng(key(0)).per_example(torch.arange(0)), (0, 4)).shape == (0, 4)
    assert draw(key(0), torch.Size([2, 3])).shape == (2, 3)


# Uniform.


@each_draw
def test_a_tensor_gives_its_shape(draw: Callable[..., Tensor]) -> None:
    assert torch.equal(draw(key(3), torch.ones(2, 3, dtype=torch.float16)), draw(key(3), (2, 3)))


def test_bits_are_uniform_and_bytes_equally_likely() -> None:
    words = bits(key(0), 20_000)
    assert words.min() >= 0
    assert words.max() < 2**32
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(words >> shift & 0xFF, minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > LEAST_P
    assert stats.kstest(words.double().numpy() / 2**32, "uniform").pvalue > LEAST_P


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_distribution(dtype: torch.dtype) -> None:
    draw = uniform(key(1), 20_000, dtype=dtype)
    assert draw.dtype == dtype
    assert stats.kstest(draw.numpy(), "uniform").pvalue > LEAST_P
    moved = uniform(key(1), 20_000, low=-3.0, high=5.0, dtype=dtype)
    assert stats.kstest(moved.numpy(), "uniform", args=(-3, 8)).pvalue > LEAST_P


def test_uniform_is_the_words_lower_bits() -> None:
    words = bits(key(7), 50).tolist()
    assert uniform(key(7), 50).tolist() == [word % 2**24 / 2**24 for word in words]
    wide = [(high << 32 | low) % 2**53 / 2**53 for high, low in zip(words[::2], words[1::2], strict=True)]
    assert uniform(key(7), 25, dtype=torch.float64).tolist() == wide


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_halves_reach_every_step_and_never_one(dtype: torch.dtype, precision: int) -> None:
    draw = uniform(key(2), 60_000, dtype=dtype)
    assert draw.dtype == dtype
    steps = torch.bincount((draw.double() * 2**precision).long(), minlength=2**precision)
    assert len(steps) == 2**precision  # so 1.0 did not occur
    assert stats.chisquare(steps.numpy()).pvalue > LEAST_P


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(st.integers(-64, 64), st.sampled_from([2.0**-8, 0.25, 1.0, 4.0, 100.0]))
def test_uniform_stays_below_its_bound(dtype: torch.dtype, low: int, width: float) -> None:
    start = float(torch.tensor(low / 4, dtype=dtype))
    high = float(torch.tensor(start + width, dtype=dtype))
    assume(start < high)
    draw = uniform(key(3), 300, low=start, high=high, dtype=dtype)
    assert draw.min() >= start
    assert draw.max() < high


def constant(word: int) -> Callable[..., Tensor]:
    """Return a function in place of `draws.numbers` whose streams consist of one word."""

    def numbers(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype in PRECISION:
            scale = 2 ** PRECISION[dtype]
            return torch.full(shape, (word << 32 | word) % scale / scale, dtype=dtype)
        value = word if dtype == torch.uint32 else word << 32 | word
        wide = torch.full(shape, (value + 2**63) % 2**64 - 2**63)
        return wide.to(torch.int32) if dtype == torch.int32 else wide

    return numbers


def test_the_greatest_word_stays_below_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "numbers", constant(2**32 - 1))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for low, high in ((0.0, 1.0), (1.0, 2.0), (-2.0, -1.0), (0.0, 0.1), (-1.0, 0.0), (100.0, 101.0)):
            draw = uniform(key(0), (1,), low=low, high=high, dtype=dtype)
            assert low <= float(draw) < high
    assert randint(key(0), (1,), 3, 10).item() == 9
    assert randint(key(0), (1,), 0, 2**63 - 1).item() == 2**63 - 2
    assert torch.isfinite(normal(key(0), (1,))).all()


def test_the_least_word_keeps_normal_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "numbers", constant(0))
    assert normal(key(0), (1,)).item() == pytest.approx(math.sqrt(2 * 33 * math.log(2)))
    longest = normal(key(0), (1,), dtype=torch.float64).item()
    assert longest == pytest.approx(math.sqrt(2 * 54 * math.log(2)))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_greatest_below_is_the_next_float64(bound: float) -> None:
    assume(bound > -1.7976931348623157e308)
    assert _greatest_below(bound, torch.float64) == math.nextafter(bound, -math.inf)


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_greatest_below_is_the_next_float32(bound: float) -> None:
    """By the order of the bit patterns, independent of any arithmetic on spacings."""
    (pattern,) = struct.unpack("<i", struct.pack("<f", bound))
    if bound == 0:
        expected = -(2.0**-149)
    else:
        (expected,) = struct.unpack("<f", struct.pack("<i", pattern - 1 if bound > 0 else pattern + 1))
    assert _greatest_below(bound, torch.float32) == expected


# Normal.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_distribution(dtype: torch.dtype) -> None:
    draw = normal(key(4), 20_001, dtype=dtype)
    assert draw.dtype == dtype
    assert stats.kstest(draw.numpy(), "norm").pvalue > LEAST_P
    # The two halves of a pair have one radius, but must be independent.
    first, second = draw[:20_000].reshape(-1, 2).unbind(-1)
    for one, other in ((first, second), (first.abs(), second.abs())):
        result: Any = stats.spearmanr(one.numpy(), other.numpy())
        assert result.pvalue > LEAST_P


def test_normal_takes_tensors_and_lets_gradients_through() -> None:
    mean, std = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor(0.5, requires_grad=True)
    draw = normal(key(0), (4, 3), mean=mean, std=std)
    standard = normal(key(0), (4, 3))
    torch.testing.assert_close(draw, standard * 0.5 + torch.tensor([1.0, 2.0, 3.0]))
    grad_mean, grad_std = torch.autograd.grad(draw.sum(), (mean, std))
    assert grad_mean.tolist() == [4.0, 4.0, 4.0]
    torch.testing.assert_close(grad_std, standard.sum())


# Bernoulli and integers.


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9])
def test_bernoulli_frequency(p: float) -> None:
    draw = bernoulli(key(6), p, 20_000)
    assert draw.dtype == torch.bool
    assert stats.binomtest(int(draw.sum()), 20_000, p).pvalue > LEAST_P


@pytest.mark.parametrize("word", [0, 2**31 - 1, 2**31, 2**32 - 1])
def test_bernoulli_compares_the_word_as_a_signed_number(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "numbers", constant(word))
    share = (word + 2**31) % 2**32 / 2**32
    for p in (0.0, 2.0**-32, share, min(share + 2.0**-32, 1.0), 1.0):
        assert bernoulli(key(0), p, ()).item() == (share < p)
        assert bernoulli(key(0), torch.tensor(p, dtype=torch.float64)).item() == (share < p)


def test_bernoulli_bounds_are_certain() -> None:
    assert not bernoulli(key(0), 0.0, 5000).any()
    assert bernoulli(key(0), 1.0, 5000).all()
    assert bernoulli(key(0), torch.tensor([0, 1]).double()).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bernoulli_of_a_tensor_is_that_of_its_numbers(dtype: torch.dtype) -> None:
    p = torch.linspace(0, 1, 11).to(dtype)
    expected = torch.stack([bernoulli(key(1), float(value), 11)[i] for i, value in enumerate(p)])
    assert torch.equal(bernoulli(key(1), p), expected)
    assert torch.equal(bernoulli(key(1), p, (3, 11))[0], expected)


def test_randint_distribution() -> None:
    draw = randint(key(8), 21_000, -3, 18)
    assert draw.dtype == torch.int64
    counts = torch.bincount(draw + 3, minlength=21)
    assert len(counts) == 21
    assert stats.chisquare(counts.numpy()).pvalue > LEAST_P


spans = st.one_of(st.integers(1, 100), st.integers(2**31 - 2, 2**33), st.integers(1, 2**63 - 1))


@given(spans, st.integers(-(2**62), 0))
def test_randint_is_the_high_product(span: int, low: int) -> None:
    """The reference uses Python's integers, which do not wrap; the tensor form always takes the general path."""
    words = bits(key(9), 12).tolist()
    wide = [high << 32 | lower for high, lower in zip(words[::2], words[1::2], strict=True)]
    expected = [low + (word * span >> 64) for word in wide]
    if low + span <= 2**63 - 1:
        assert randint(key(9), 6, low, low + span).tolist() == expected
        assert randint(key(9), 6, torch.tensor(low), torch.tensor(low) + span).tolist() == expected


def test_randint_takes_a_range_per_element() -> None:
    high = torch.tensor([1, 2, 100])
    draw = randint(key(0), (1000, 3), 0, high)
    assert (draw < high).all()
    assert draw.amax(0).tolist() == [0, 1, 99]


# Permutations and choices


def frequencies(draws: Tensor, n: int) -> list[int]:
    """Return how often each ordered tuple of distinct positions occurred, in lexicographic order."""
    counts = dict.fromkeys(itertools.permutations(range(n), draws.shape[1]), 0)
    for row in draws.tolist():
        counts[tuple(row)] += 1
    return list(counts.values())


@given(st.integers(0, 2**64 - 1), st.integers(0, 50))
def test_permutation_returns_a_permutation(seed: int, n: int) -> None:
    assert sorted(permutation(key(seed), n).tolist()) == list(range(n))


def test_permutation_sorts_its_words() -> None:
    """The reference is Python's sort of (upper as signed, lower), from the words of `bits`."""
    words = bits(key(3), 40).tolist()
    keys = [((high ^ 2**31) << 32) | low for high, low in zip(words[::2], words[1::2], strict=True)]
    assert permutation(key(3), 20).tolist() == sorted(range(20), key=keys.__getitem__)


def test_permutation_takes_every_order_equally_often() -> None:
    draws = torch.func.vmap(lambda k: permutation(k, 4))(split(key(0), 4800))
    assert stats.chisquare(frequencies(draws, 4)).pvalue > LEAST_P


def test_permutation_puts_each_position_anywhere() -> None:
    draws = torch.func.vmap(lambda k: permutation(k, 30))(split(key(1), 2000))
    for column in (0, 7, 29):
        counts = torch.bincount(draws[:, column], minlength=30)
        assert stats.chisquare(counts.numpy()).pvalue > LEAST_P


def test_permutation_of_rows() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    assert torch.equal(permutation(key(0), rows), rows[permutation(key(0), 6)])


def test_several_examples_are_ignored_and_a_single_one_is_not() -> None:
    rng = Rng(fold_in(key(0), 2)).named("order")
    part, one = rng.per_example(torch.arange(3, 5)), rng.per_example(torch.tensor(3))
    assert torch.equal(permutation(part, 9), permutation(rng, 9))
    assert torch.equal(choice(part, 9, 4), choice(rng, 9, 4))
    assert not torch.equal(permutation(one, 9), permutation(rng, 9))
    assert not torch.equal(choice(one, 9, 4), choice(rng, 9, 4))
    assert not torch.equal(permutation(Rng(fold_in(key(0), 3)).named("order"), 9), permutation(rng, 9))


WEIGHTS = torch.tensor([1.0, 4.0, 0.0, 2.0, 3.0])


def test_permutation_maps_and_traces() -> None:
    keys = split(key(0), 6)
    looped = torch.stack([permutation(k, 11) for k in keys])
    assert torch.equal(torch.func.vmap(lambda k: permutation(k, 11))(keys), looped)
    assert torch.equal(make_fx(lambda k: permutation(k, 11))(keys[0])(keys[1]), looped[1])


@given(st.integers(0, 30), st.data())
def test_choice_without_replacement_is_distinct(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    chosen = choice(key(4), n, k).tolist()
    assert len(chosen) == len(set(chosen)) == k
    assert set(chosen) <= set(range(n))
    more = choice(key(4), n, n).tolist()
    assert more[:k] == chosen


def test_weighted_choice_draws_one_by_one() -> None:
    """P(i, then j) = w_i / W * w_j / (W - w_i), as for sequential draws from the rest."""
    weights = [1.0, 4.0, 2.0, 3.0]
    total, num = sum(weights), 6000
    draws = torch.func.vmap(lambda k: choice(k, 4, 2, weights))(split(key(6), num))
    expected = [
        num * weights[i] / total * weights[j] / (total - weights[i]) for i, j in itertools.permutations(range(4), 2)
    ]
    assert stats.chisquare(frequencies(draws, 4), expected).pvalue > LEAST_P


def test_weights_may_have_any_scale() -> None:
    assert torch.equal(choice(key(0), 5, 4, WEIGHTS), choice(key(0), 5, 4, WEIGHTS * 2.0**20))
    assert torch.equal(choice(key(0), 5, 4, WEIGHTS), choice(key(0), 5, 4, WEIGHTS.tolist()))


def test_weight_zero_is_never_chosen() -> None:
    keys = split(key(7), 500)
    assert (torch.func.vmap(lambda k: choice(k, 5, 4, WEIGHTS))(keys) != 2).all()
    # A tensor's values are not checked: the position of weight 0 comes last.
    assert choice(key(7), 5, 5, WEIGHTS)[-1] == 2
