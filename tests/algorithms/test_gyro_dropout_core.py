"""The functional cores of gyro dropout; the algorithm in a step is in test_gyro_dropout."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose import random
from purecompose.algorithms._gyro_dropout import gyro_dropout_mask, gyro_dropout_period


WIDE = 64  # two random masks of this size are equal with probability 2**-64
banks = st.integers(1, 12).flatmap(lambda sigma: st.tuples(st.just(sigma), st.integers(1, sigma)))


def distinct(masks):
    return {tuple(row) for row in masks.flatten(1).tolist()}


@given(st.integers(1, 40), banks)
def test_rows_come_in_consecutive_groups_of_nearly_equal_size(num, bank):
    sigma, tau = bank
    rows = gyro_dropout_mask(random.key(1), (num, WIDE), sigma=sigma, tau=tau).tolist()
    starts = [i for i in range(num) if i == 0 or rows[i] != rows[i - 1]]
    sizes = [end - start for start, end in zip(starts, [*starts[1:], num], strict=True)]
    assert len(sizes) == min(num, tau) == len({tuple(row) for row in rows})
    assert max(sizes) - min(sizes) <= 1


def test_the_repeat_length_is_not_the_number_of_masks():
    # The original's test has 16 of each.
    mask = gyro_dropout_mask(random.key(0), (12, WIDE), tau=3)
    for group in mask.split(4):
        assert (group == group[0]).all()
    assert len(distinct(mask)) == 3


@given(banks, st.lists(st.integers(0, 10**6), min_size=1, max_size=12, unique=True), st.integers(0, 2**32))
def test_a_run_has_sigma_masks_and_a_period_tau_of_them(bank, periods, seed):
    sigma, tau = bank
    # The whole bank, by choosing sigma of sigma masks.
    whole = distinct(gyro_dropout_mask(random.key(seed), (sigma, WIDE), sigma=sigma, tau=sigma))
    assert len(whole) == sigma
    seen = set()
    for period in periods:
        masks = gyro_dropout_mask(random.key(seed), (24, WIDE), sigma=sigma, tau=tau, period=period)
        assert len(distinct(masks)) == tau
        seen |= distinct(masks)
    assert seen <= whole


def test_every_mask_is_chosen_equally_often():
    # 6000 periods, 2 of 5 each: 2400 times each, with a standard deviation of 38.
    periods = torch.arange(6000)
    fn = torch.func.vmap(lambda period: gyro_dropout_mask(random.key(3), (2, 20), sigma=5, tau=2, period=period))
    rows, counts = fn(periods).flatten(0, 1).unique(dim=0, return_counts=True)
    assert len(rows) == 5 and counts.sum() == 12000
    assert ((counts - 2400).abs() < 5 * 38).all()


@given(st.sampled_from([0.1, 0.5, 0.8]), st.integers(0, 2**32))
def test_the_kept_fraction_and_the_mean_are_right(p, seed):
    masks = gyro_dropout_mask(random.key(seed), (256, 400), p=p, tau=256)
    num = masks.numel()
    deviation = math.sqrt(p * (1 - p) / num)
    assert abs(masks.double().mean().item() - (1 - p)) < 6 * deviation
    # The mean over the masks, divided by 1 - p, is 1: each element's error is p / (1 - p) / 256 squared.
    assert (masks.double().mean(0) / (1 - p) - 1).abs().max() < 6 * math.sqrt(p / (1 - p) / 256)


def test_a_mask_does_not_depend_on_sizes_and_counts():
    """Mask j only depends on the key, on j and on the element."""
    long = distinct(gyro_dropout_mask(random.key(2), (8, WIDE), sigma=8, tau=8))
    short = distinct(gyro_dropout_mask(random.key(2), (8, 32), sigma=8, tau=8))
    assert {row[:32] for row in long} == short
    larger = distinct(gyro_dropout_mask(random.key(2), (16, WIDE), sigma=16, tau=16))
    assert long < larger
    assert long.isdisjoint(distinct(gyro_dropout_mask(random.key(3), (8, WIDE), sigma=8, tau=8)))


def test_an_rngs_name_matters_but_not_its_examples():
    rng = random.Rng(random.key(0)).named("layer")
    mask = gyro_dropout_mask(rng, (8, WIDE))
    assert torch.equal(gyro_dropout_mask(rng.per_example(torch.arange(8)), (8, WIDE)), mask)
    assert distinct(mask).isdisjoint(distinct(gyro_dropout_mask(rng.named("other"), (8, WIDE))))


@pytest.mark.parametrize("shape", [(6,), (6, 10), (6, 5, 7), (6, 3, 4, 5), (6, 0)])
def test_every_rank_has_a_decision_for_each_element(shape):
    mask = gyro_dropout_mask(random.key(0), shape, sigma=6, tau=2)
    assert mask.shape == shape and mask.dtype == torch.bool
    assert torch.equal(mask[:3], mask[:1].expand_as(mask[:3]))


def test_groups_determine_the_mask_of_a_row():
    groups = torch.tensor([2, 0, 2, 1, 0])
    mask = gyro_dropout_mask(random.key(0), (5, WIDE), tau=3, groups=groups)
    plain = gyro_dropout_mask(random.key(0), (3, WIDE), tau=3)
    assert torch.equal(mask, plain[groups])


# The period's length


@pytest.mark.parametrize(
    ("total", "sigma", "tau", "expected"),
    [
        (196 * 100, 256, 16, 1216),  # int(76.56) * 16
        (19600.0, 256, 16, 1216),
        (2560, 256, 16, 160),
        (256, 256, 16, 16),
        (255, 256, 16, 15),  # below sigma the product is only rounded
        (100, 256, 16, 6),
        (10, 256, 16, 1),
        (0.5, 256, 16, 1),
        (12, 1, 1, 12),
        (12, 4, 4, 12),
    ],
)
def test_period_length(total, sigma, tau, expected):
    assert gyro_dropout_period(total, sigma, tau) == expected


@given(st.integers(1, 10**6), banks)
def test_choices_of_a_run_use_the_bank_about_once(total, bank):
    sigma, tau = bank
    length = gyro_dropout_period(total, sigma, tau)
    assert 1 <= length <= max(1, total * tau / sigma) and length <= gyro_dropout_period(total + 1, sigma, tau)
    if total >= sigma:
        assert length == total // sigma * tau
        assert 1 <= total / length * tau / sigma < 2  # how often a mask is chosen, on average


# Errors


def test_bad_keys_and_lengths_are_refused():
    with pytest.raises(TypeError, match="expected a key"):
        gyro_dropout_mask(torch.zeros(2), (4, 3))
    with pytest.raises(ValueError, match="total_batches"):
        gyro_dropout_period(0)
    with pytest.raises(ValueError, match="tau <= sigma"):
        gyro_dropout_period(100, 2, 3)
