"""Orders and seeds of an epoch, and the global generators: seeded, kept, and exchanged for a stream."""

import random

import numpy as np
import pytest
import torch

from purecompose.data import arrays
from purecompose.data.position import (
    Stream,
    epoch_order,
    epoch_seed,
    kept_globals,
    load_numpy,
    seed_globals,
    seed_words,
)
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


load_numpy()


def draws():
    return torch.rand(1).item(), torch.randn(1).item(), random.random(), random.gauss(0, 1), float(np.random.randn())


def test_seeding_makes_draws_repeat_and_every_word_counts():
    with kept_globals():
        seed_globals([1, 2, 3, 4])
        first = draws()
        seed_globals([1, 2, 3, 4])
        assert draws() == first
        seed_globals([9, 2, 3, 4])
        assert draws()[0] != first[0] and draws()[2:4] != first[2:4]
        for words in ([1, 9, 3, 4], [1, 2, 9, 4]):
            seed_globals(words)
            assert draws()[2] != first[2]
        seed_globals([1, 2, 3, 9])
        assert draws()[4] != first[4]


def test_torch_draws_as_after_manual_seed():
    with kept_globals():
        seed_globals([17, 0, 0, 0])
        seeded = torch.rand(5)
        torch.manual_seed(17)
        assert torch.equal(seeded, torch.rand(5))


def test_generators_are_restored_even_after_an_error():
    with kept_globals():
        seed_globals([1, 2, 3, 4])
        with pytest.raises(OSError), kept_globals():
            draws()
            raise OSError
        inside = draws()
        seed_globals([1, 2, 3, 4])
        assert draws() == inside


def test_a_stream_continues_where_it_stopped_and_changes_nothing_outside():
    def taken(count, is_disturbed):
        stream, found = Stream([1, 2, 3, 4], 5), []
        for _ in range(count):
            with stream.drawing():
                found.append(draws())
            if is_disturbed:
                draws()
        return found

    with kept_globals():
        seed_globals([5, 6, 7, 8])
        expected = draws()
        seed_globals([5, 6, 7, 8])
        calm = taken(3, is_disturbed=False)
        assert draws() == expected
        assert taken(3, is_disturbed=True) == calm
        assert len(set(calm)) == 3
