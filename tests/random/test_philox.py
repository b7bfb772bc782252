"""Philox and the bits of keys: known answers, Python's integers, and every path by which a draw is computed."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.random import Rng, bernoulli, bits, fold_in, key, normal, permutation, split, uniform
from purecompose.random.philox import (
    DTYPES,
    MOST_ON_HOST,
    emulated,
    emulated_keys,
    filled,
    folded,
    has_kernels,
    keys_on_host,
    next_keys,
    numbers,
    on_host,
    philox_lanes,
    traced,
)


words = st.integers(0, 2**32 - 1)


def philox4x32(counter: Tensor | Sequence[Any], key: Tensor) -> Tensor:
    """Return the words of counters (..., 4), or of four lanes, under keys (..., 2)."""
    lanes: Any = counter.unbind(-1) if isinstance(counter, Tensor) else counter
    return torch.stack(philox_lanes(*lanes, *key.unbind(-1)), dim=-1)


# Random123, kat_vectors, philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    """Compute one counter as in the paper: two products, a swap, a key that advances by constants."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def parse(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    assert philox_in_python(parse(counter), parse(key)) == parse(answer)
    result = philox4x32(torch.tensor(parse(counter)), torch.tensor(parse(key)))
    assert result.dtype == torch.int64
    assert result.tolist() == parse(answer)


@given(st.lists(st.tuples(words, words, words, words), min_size=1, max_size=6), st.tuples(words, words))
def test_equals_python(counters: list[tuple[int, ...]], key: tuple[int, int]) -> None:
    result = philox4x32(torch.tensor(counters), torch.tensor(key))
    assert result.tolist() == [philox_in_python(list(counter), list(key)) for counter in counters]


@given(st.tuples(words, words, words, words), st.tuples(words, words), st.sets(st.integers(0, 3)))
def test_words_of_a_counter_may_be_ints(counter: tuple[int, ...], key: tuple[int, int], ints: set[int]) -> None:
    lanes = [word if i in ints else torch.tensor([word, 0, 5]) for i, word in enumerate(counter)]
    result = philox4x32(lanes, torch.tensor(key)).reshape(-1, 4)
    assert result[0].tolist() == philox_in_python(list(counter), list(key))


def test_words_of_a_counter_broadcast() -> None:
    columns, rows = torch.arange(3), torch.arange(2).unsqueeze(-1)
    result = torch.stack(philox_lanes(columns, 7, rows, 9, *torch.tensor([1, 2])), dim=-1)
    assert result.shape == (2, 3, 4)
    assert result[1, 2].tolist() == philox_in_python([2, 7, 1, 9], [1, 2])


def test_keys_broadcast_and_map() -> None:
    keys = torch.tensor([[0, 1], [2**32 - 1, 5], [77, 2**31]])
    counters = torch.arange(12).reshape(3, 4) * 0x1234567
    expected = [philox_in_python(c, k) for c, k in zip(counters.tolist(), keys.tolist(), strict=True)]
    assert philox4x32(counters, keys).tolist() == expected
    assert torch.func.vmap(philox4x32)(counters, keys).tolist() == expected
    by_key = torch.func.vmap(philox4x32, in_dims=(None, 0))(counters[0], keys)
    assert by_key.tolist() == [philox_in_python(counters[0].tolist(), k) for k in keys.tolist()]
    by_counter = torch.func.vmap(philox4x32, in_dims=(0, None))(counters, keys[1])
    assert by_counter.tolist() == [philox_in_python(c, keys[1].tolist()) for c in counters.tolist()]


def test_traces() -> None:
    counter, key = torch.arange(8).reshape(2, 4), torch.tensor([1, 2])
    traced = make_fx(philox4x32)(counter, key)
    other = torch.tensor([9, 2**32 - 1])
    assert torch.equal(traced(counter + 3, other), philox4x32(counter + 3, other))


KINDS = (*DTYPES, torch.uint32)
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (0,), (3, 0), (2, 7), (8,)]
# Offsets at which the counter carries into its second word, and at which it wraps.
KEYS = torch.tensor([[5, 0], [-(2**63), 2**32 - 1], [7 << 40 | 3, -1], [-1, 2**63 - 1]])

needs_kernels = pytest.mark.skipif(not has_kernels("cpu"), reason="this torch has no such kernels for the CPU")


def words_of(seed: int, offset: int, count: int) -> list[int]:
    """Return words of a stream in Python's integers: the counter is the position, the Philox key is the seed."""
    words: list[int] = []
    for block in range((count + 3) // 4):
        low, high = ((offset + block) % 2**64) % 2**32, ((offset + block) % 2**64) >> 32
        words += philox_in_python([low, high, 0, 0], [seed % 2**32, seed % 2**64 >> 32])
    return words[:count]


def expected(seed: int, offset: int, count: int, dtype: torch.dtype) -> list[Any]:
    """Return the numbers of a stream, from the words in Python."""
    if dtype in (torch.int64, torch.float64):
        words = words_of(seed, offset, 2 * count)
        pairs = [high << 32 | low for high, low in zip(words[::2], words[1::2], strict=True)]
        if dtype == torch.int64:
            return [(pair + 2**63) % 2**64 - 2**63 for pair in pairs]
        return [pair % 2**53 / 2**53 for pair in pairs]
    words = words_of(seed, offset, count)
    if dtype == torch.int32:
        return [(word + 2**31) % 2**32 - 2**31 for word in words]
    if dtype == torch.uint32:
        return words
    precision = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    return [word % 2**precision / 2**precision for word in words]


def test_known_answers_of_a_key() -> None:
    """Recorded from torch.func._random in torch 2.15 with the key (42 + (7 << 40), 0)."""
    root = key(42 + (7 << 40))
    assert [f"{word:08x}" for word in bits(root, 6).tolist()] == [
        *("5a6b6ac6", "a8695184", "f1a9b290", "0f6accdb"),
        *("a3c25ccc", "8d949daf"),
    ]
    assert [int(number * 2**24) for number in uniform(root, 3).tolist()] == [0x6B6AC6, 0x695184, 0xA9B290]
    assert [int(number * 2**53) for number in uniform(root, 1, dtype=torch.float64).tolist()] == [0xB6AC6A8695184]
    folded_in = [number % 2**64 for number in fold_in(root, 2**40 + 5).tolist()]
    assert folded_in == [0xE6941B9C051323D7, 0x255B80C429340BB9]


@pytest.mark.parametrize("dtype", KINDS)
@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.integers(0, 9))
def test_numbers_are_those_of_the_words(dtype: torch.dtype, seed: int, offset: int, count: int) -> None:
    one = torch.tensor([key(seed)[0].item(), offset])
    for draw in (numbers, emulated, on_host):
        assert draw(one, (count,), dtype).tolist() == expected(seed, offset, count, dtype)


def draw_of(draw: Callable[..., Tensor], shape: Sequence[int], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda keys: draw(keys, (*keys.shape[:-1], *shape), dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keys", [KEYS[1], KEYS, KEYS[:0], KEYS.reshape(2, 2, 2)], ids=["one", "many", "none", "table"])
def test_many_keys_draw_what_each_draws(dtype: torch.dtype, shape: tuple[int, ...], keys: Tensor) -> None:
    ways = [draw_of(draw, shape, dtype)(keys) for draw in (numbers, emulated, on_host)]
    for drawn in ways:
        assert drawn.shape == (*keys.shape[:-1], *shape)
        assert drawn.dtype == (torch.int64 if dtype == torch.uint32 else dtype)
        assert torch.equal(drawn, ways[0])
    alone = [numbers(one, shape, dtype) for one in keys.reshape(-1, 2)]
    assert all(torch.equal(*pair) for pair in zip(ways[0].reshape(len(alone), *shape), alone, strict=True))


@pytest.mark.parametrize("dtype", KINDS)
def test_draws_are_equal_on_both_sides_of_the_threshold(dtype: torch.dtype) -> None:
    per_block = 2 if dtype in (torch.int64, torch.float64) else 4
    most = MOST_ON_HOST * per_block
    longer = numbers(KEYS[2], (most + 1,), dtype)
    assert torch.equal(longer[:most], numbers(KEYS[2], (most,), dtype))


def test_keys_are_folded_alike_on_every_path() -> None:
    words = [words_of(seed, offset, 4) for seed, offset in KEYS.tolist()]
    signed = [[(high << 32 | low) for low, high in (four[:2], four[2:])] for four in words]
    for follow in (emulated_keys, keys_on_host):
        assert [[number % 2**64 for number in pair] for pair in follow(KEYS).tolist()] == signed
    assert torch.equal(keys_on_host(KEYS[:0]), KEYS[:0])
    index = torch.tensor([0, 3, 2**40, -1])
    each = torch.stack([fold_in(KEYS[2], number) for number in index.tolist()])
    assert torch.equal(folded(KEYS[2], index), each)
    assert torch.equal(torch.func.vmap(folded, in_dims=(None, 0))(KEYS[2], index), each)


@pytest.mark.parametrize("dtype", KINDS)
def test_mapped_draws_equal_those_of_each_key(dtype: torch.dtype) -> None:
    keys = KEYS.reshape(2, 2, 2)
    whole = numbers(keys, (2, 2, 5), dtype)
    assert torch.equal(torch.func.vmap(lambda some: numbers(some, (2, 5), dtype))(keys), whole)
    by_second = torch.func.vmap(torch.func.vmap(lambda one: numbers(one, (5,), dtype)), in_dims=1, out_dims=1)
    assert torch.equal(by_second(keys), whole)


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
@pytest.mark.parametrize("dtype", KINDS)
def test_traced_draws_equal_eager_ones(dtype: torch.dtype, tracing_mode: Literal["real", "fake"]) -> None:
    graph = make_fx(lambda one: numbers(one, (5,), dtype), tracing_mode=tracing_mode)(KEYS[0])
    assert all(torch.equal(graph(one), numbers(one, (5,), dtype)) for one in KEYS)


def test_draws_under_a_gradient_equal_others() -> None:
    """Keys that are derived within a transform may outlive it."""
    seen: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        seen.append(fold_in(KEYS[0], 3))
        return (x * uniform(seen[0], 3)).sum()

    grad = torch.func.grad(loss)(torch.zeros(3))
    assert torch.equal(grad, uniform(fold_in(KEYS[0], 3), 3))
    assert torch.equal(uniform(seen[0], 3), grad)


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        drawn = uniform(KEYS[0], 3), fold_in(KEYS[0], 3), split(KEYS[0])
    assert all(map(torch.equal, drawn, (uniform(KEYS[0], 3), fold_in(KEYS[0], 3), split(KEYS[0]))))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_give_the_same_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for keys in (KEYS[1], KEYS, KEYS.reshape(2, 2, 2)):
        expected = draw_of(emulated, shape, dtype)(keys)
        assert torch.equal(draw_of(filled, shape, dtype)(keys), expected)
        assert torch.equal(draw_of(traced, shape, dtype)(keys), expected)
    assert torch.equal(next_keys(KEYS), emulated_keys(KEYS))


@needs_kernels
def test_bare_keys_are_those_of_torch() -> None:
    theirs = pytest.importorskip("torch.func._random")
    for one in KEYS:
        other = one.view(torch.uint64)
        assert torch.equal(theirs.uniform(other, (3, 5)), uniform(one, (3, 5)))
        assert torch.equal(theirs.uniform(other, 5, dtype=torch.float64), uniform(one, 5, dtype=torch.float64))
        words = theirs.bits(other, 9, dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
        assert torch.equal(words, bits(one, 9))
        assert torch.equal(theirs.split(other, 3).view(torch.int64), split(one, 3))
        assert torch.equal(theirs.fold_in(other, 2**64 - 7).view(torch.int64), fold_in(one, -7))
        torch.testing.assert_close(theirs.normal(other, 501), normal(one, 501), rtol=1e-5, atol=1e-6)
        wide = normal(one, 501, dtype=torch.float64)
        torch.testing.assert_close(theirs.normal(other, 501, dtype=torch.float64), wide, rtol=1e-12, atol=1e-12)
    assert torch.equal(theirs.key(2**64 - 3).view(torch.int64), key(2**64 - 3))


@needs_kernels
def test_a_draw_is_one_operation_of_a_graph() -> None:
    graph = make_fx(lambda one: uniform(Rng(one).named("noise"), (3, 2)))(KEYS[0]).graph
    operations = [node.target for node in graph.nodes if node.op == "call_function"]
    assert operations == [torch.ops.aten.add.Tensor, torch.ops.purecompose.philox.default]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # from inside Inductor
def test_compiled_draws_equal_eager_ones() -> None:
    def draw(one: Tensor, examples: Tensor) -> tuple[Tensor, ...]:
        rng = Rng(fold_in(one, 3)).named("noise")
        row = rng.per_example(examples)
        return uniform(one, 5), bits(row, (4, 3)), bernoulli(row, 0.3, (4, 9)), permutation(rng, 9), split(one)

    compiled = torch.compile(draw, fullgraph=True)
    arguments = KEYS[1], torch.arange(4)
    assert all(map(torch.equal, compiled(*arguments), draw(*arguments)))
