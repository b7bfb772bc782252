"""Loaders without a generator draw by the run's key; the global generator and loaders with their own are left alone."""

from itertools import islice

import pytest
import torch
from helpers import assert_same, make_batch, make_state
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import purecompose as pc
from purecompose import compose, fit, loop_events
from purecompose.data.loaders import draws_globally, keyed_batches


KEY = pc.random.key(7)


class Noisy(Dataset):
    """Twelve examples; each is augmented with global draws, as torchvision does it."""

    def __init__(self):
        self.inputs, self.targets = make_batch(0, 12)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.inputs[index] + torch.randn(4), self.targets[index]


class Stream(IterableDataset):
    """Examples one by one; says when it is closed."""

    def __init__(self):
        self.inputs, self.targets = make_batch(0, 12)
        self.is_closed = False

    def __iter__(self):
        try:
            yield from zip(self.inputs, self.targets, strict=True)
        finally:
            self.is_closed = True


def shuffled(**options):
    return DataLoader(Noisy(), batch_size=4, shuffle=True, **options)


def test_the_same_key_and_epoch_give_the_same_batches():
    first = list(keyed_batches(shuffled(), KEY, 3))
    torch.manual_seed(99)
    assert_same(list(keyed_batches(shuffled(), KEY, 3)), first)
    others = [keyed_batches(shuffled(), KEY, 4), keyed_batches(shuffled(), pc.random.key(8), 3)]
    for other in others:
        assert not torch.equal(next(other)[0], first[0][0])


def test_all_examples_come_once_in_another_order():
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=5, shuffle=True)
    orders = [torch.cat([batch[0] for batch in keyed_batches(loader, KEY, epoch)]).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_global_generator_stays_and_does_not_matter():
    expected = list(keyed_batches(shuffled(), KEY, 0))
    found, before = [], torch.get_rng_state()
    for seed, batch in enumerate(keyed_batches(shuffled(), KEY, 0)):
        found.append(batch)
        torch.manual_seed(seed)  # between batches it is the caller's own
        before = torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(found, expected)


def test_the_global_generator_stays_when_the_data_fail():
    class Failing(Noisy):
        def __getitem__(self, index):
            torch.randn(3)
            raise OSError("unreadable")

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="unreadable"):
        next(keyed_batches(DataLoader(Failing(), shuffle=True), KEY, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_early_break_closes_the_inner_iterator():
    data = Stream()
    batches = keyed_batches(DataLoader(data, batch_size=4), KEY, 0)
    next(batches)
    assert not data.is_closed
    del batches
    assert data.is_closed


def test_what_draws_globally():
    assert draws_globally(shuffled())
    assert not draws_globally(shuffled(generator=torch.Generator()))
    assert not draws_globally([1, 2])


# In fit


def trained(loader, duration="2ep", state=None):
    state = make_state() if state is None else state  # layers start from global draws
    before = torch.get_rng_state()
    end = fit(compose(loop_events), state, loader, duration=duration)
    assert torch.equal(torch.get_rng_state(), before)
    return end


def test_fit_repeats_bit_for_bit_and_leaves_the_generator():
    first = trained(shuffled())
    torch.manual_seed(5)
    assert_same(trained(shuffled()), first)
    other_key = trained(shuffled(), state=make_state(key=1))
    assert not torch.equal(other_key.params["0.weight"], first.params["0.weight"])


@pytest.mark.parametrize("stop", ["1ba", "2ba", "3ba", "5ba"])
def test_going_on_within_an_epoch_equals_one_run(stop):
    whole = trained(shuffled())
    middle = trained(shuffled(), stop)
    torch.manual_seed(5)
    assert_same(trained(shuffled(), state=middle), whole)


def test_workers_repeat_too():
    whole = trained(shuffled(num_workers=1))
    middle = trained(shuffled(num_workers=1), "4ba")
    assert_same(trained(shuffled(num_workers=1), state=middle), whole)


def test_persistent_workers_can_be_left_and_taken_up():
    data = TensorDataset(*make_batch(0, 12))
    loader = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
    end = trained(loader, state=trained(loader, "4ba"))
    whole = trained(DataLoader(data, 4, shuffle=True))
    assert_same(end, whole)
    assert_same(trained(loader), whole)
    assert loader.generator is None


def test_a_loader_with_its_own_generator_is_left_alone():
    def batches():
        generator = torch.Generator().manual_seed(3)
        return DataLoader(TensorDataset(*make_batch(0, 12)), 4, shuffle=True, generator=generator)

    step, state = compose(loop_events), make_state(duration="2ep")
    end = fit(step, state, batches())
    loader, expected = batches(), state
    for _ in range(2):
        for inputs, targets in islice(loader, 3):  # a fourth that is not there would draw, and fit does not ask for it
            expected = step(expected, (inputs, targets))
    assert_same(end.params, expected.params)


def test_streams_of_unknown_length():
    loader = DataLoader(Stream(), batch_size=4)
    end = trained(loader)
    assert (end.timestamp.epoch, end.timestamp.batch, end.timestamp.run.batches_per_epoch) == (2, 6, None)
    middle = trained(loader, "4ba")
    assert_same(trained(loader, state=middle).params, end.params)


def test_a_break_after_some_batches_draws_no_more_than_they_need():
    taken = list(islice(keyed_batches(shuffled(), KEY, 0), 2))
    assert_same(taken, list(keyed_batches(shuffled(), KEY, 0))[:2])
