"""Philox against its authors' known answers and against a scalar version in Python integers."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.random import philox4x32
from purecompose.random.philox import philox_lanes


words = st.integers(0, 2**32 - 1)

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


def test_bits_above_32_are_dropped() -> None:
    key = torch.tensor([3, 4])
    counter = torch.tensor([-1, 2**32 + 1, 2**40, 5])
    assert philox4x32(counter, key).tolist() == philox_in_python([2**32 - 1, 1, 0, 5], [3, 4])
    assert philox4x32([-1, 2**32 + 1, 2**40, 5], key).tolist() == philox4x32(counter, key).tolist()


def test_inputs_are_not_changed() -> None:
    counter, key = torch.arange(8).reshape(2, 4), torch.tensor([1, 2])
    philox4x32(counter, key)
    assert torch.equal(counter, torch.arange(8).reshape(2, 4))
    assert key.tolist() == [1, 2]


def test_traces() -> None:
    counter, key = torch.arange(8).reshape(2, 4), torch.tensor([1, 2])
    traced = make_fx(philox4x32)(counter, key)
    other = torch.tensor([9, 2**32 - 1])
    assert torch.equal(traced(counter + 3, other), philox4x32(counter + 3, other))


def test_wrong_widths_are_named() -> None:
    with pytest.raises(ValueError, match="counter of 4 words, got 3"):
        philox4x32(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"key of shape \(\.\.\., 2\), got \(3,\)"):
        philox4x32(torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
