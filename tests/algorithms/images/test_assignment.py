"""Treatments are spread evenly, with equal chances for each image, and with the same indices on every path."""

import torch
from hypothesis import given, strategies as st
from scipy import stats

from purecompose import random
from purecompose.algorithms.images.batches import assigned, treated


def rng(seed: int) -> random.Rng:
    return random.Rng(random.key(seed))


def owners(seed: int, num: int, num_treatments: int) -> torch.Tensor:
    """Return the treatment of each image."""
    marks = [lambda images, index, mark=mark: images + mark for mark in range(num_treatments)]
    return treated(rng(seed), torch.zeros(num, dtype=torch.int64), marks)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 15))
def test_every_image_gets_one_treatment_and_they_are_spread_evenly(seed: int, num: int, num_treatments: int) -> None:
    counts = owners(seed, num, num_treatments).bincount(minlength=num_treatments)
    assert len(counts) == num_treatments and counts.sum() == num
    assert counts.max() - counts.min() <= 1


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 15))
def test_images_come_back_in_their_places(seed: int, num: int, num_treatments: int) -> None:
    images = torch.arange(num)
    negated = [lambda some, index: -some] * num_treatments
    assert torch.equal(treated(rng(seed), images, negated), -images)
    indexed = [lambda some, index: index] * num_treatments
    assert torch.equal(treated(rng(seed), images, indexed), images)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 15))
def test_the_lists_have_equal_lengths_and_contain_every_image(seed: int, num: int, num_treatments: int) -> None:
    lists, places = assigned(rng(seed), num, num_treatments, torch.device("cpu"))
    assert {len(chosen) for chosen in lists} == {-(-num // num_treatments)}
    assert torch.equal(torch.cat(lists)[places], torch.arange(num))


def test_each_treatment_has_the_same_chance_for_each_image() -> None:
    chosen = torch.stack([owners(seed, 5, 4) for seed in range(2000)])
    for image in range(5):
        assert stats.chisquare(chosen[:, image].bincount(minlength=4).numpy()).pvalue > 1e-3


def test_few_images_get_any_treatments() -> None:
    pairs = {tuple(sorted(owners(seed, 2, 5).tolist())) for seed in range(400)}
    assert len(pairs) == 10
