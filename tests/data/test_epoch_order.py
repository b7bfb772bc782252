"""Orders and seeds depend on (key, epoch) and an index."""

import pytest
import torch

from purecompose.data import arrays
from purecompose.data.seeding import epoch_order, epoch_seed, seed_words
from purecompose.random import key


@pytest.mark.parametrize("num_examples", [1, 7, 40])
def test_an_order_is_a_permutation_and_equals_that_of_arrays(num_examples):
    order = epoch_order(key(3), 2, num_examples)
    assert sorted(order.tolist()) == list(range(num_examples))
    values = torch.arange(num_examples)
    assert torch.equal(order, arrays(values, values, 4).order(key(3), 2))


def test_orders_and_seeds_differ_between_epochs_and_keys():
    places = [(key(0), 0), (key(0), 1), (key(1), 0)]
    assert len({tuple(epoch_order(*place, 20).tolist()) for place in places}) == 3
    assert len({epoch_seed(*place) for place in places}) == 3


def test_words_of_a_place_depend_on_every_part_of_it():
    place = ((5, 6), 1, 2, 7)
    others = [((4, 6), 1, 2, 7), ((5, 7), 1, 2, 7), ((5, 6), 2, 2, 7), ((5, 6), 1, 3, 7), ((5, 6), 1, 2, 8)]
    assert seed_words(*place) == seed_words(*place)
    words = [word for each in [place, *others] for word in seed_words(*each)]
    assert len(set(words)) == 6 * 8 and all(0 <= word < 2**32 for word in words)
    assert seed_words((2**32 - 1, 0), 2**32 - 1, 2**64 - 1, 2**64 - 1)


def test_seeds_are_uniform():
    words = torch.tensor([seed_words((0, 0), 0, number, 0) for number in range(2000)])
    ones = torch.stack([(words >> bit) & 1 for bit in range(32)]).float().mean(1)
    assert (ones - 0.5).abs().max() < 0.06  # five standard deviations of a mean of 2000 fair coins
