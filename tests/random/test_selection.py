"""Permutations and choices: exact laws of order, and their frequencies at fixed seeds."""

import itertools

import torch
from hypothesis import given, strategies as st
from scipy import stats
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.random import Rng, bits, choice, fold_in, key, permutation, split


LEAST_P = 1e-3  # the seeds are fixed, so a statistic that passes once always passes


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
