"""Loaders without a generator draw by the run's key; the global generator and loaders' own ones are unchanged."""

import gc
import multiprocessing
import random
import weakref
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import purecompose as pc
from purecompose import compose, fit, loop_events
from purecompose.data import epoch_batches
from purecompose.data.loaders import draws_globally, keyed_batches
from purecompose.errors import SkippingWarning
from tests.helpers import assert_same, make_batch, make_state


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
    """A stream of single examples that records when it is closed."""

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


def test_every_example_occurs_once_in_a_different_order():
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=5, shuffle=True)
    orders = [torch.cat([batch[0] for batch in keyed_batches(loader, KEY, epoch)]).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_global_generator_is_unchanged_and_does_not_matter():
    expected = list(keyed_batches(shuffled(), KEY, 0))
    found, before = [], torch.get_rng_state()
    for seed, batch in enumerate(keyed_batches(shuffled(), KEY, 0)):
        found.append(batch)
        torch.manual_seed(seed)  # between batches the caller may use it
        before = torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(found, expected)


def test_batches_without_shuffling_draw_differently_in_each_epoch():
    class Drawn(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(1), index

    first, second, again = ([draw for draw, _ in keyed_batches(DataLoader(Drawn(), 2), KEY, e)] for e in (0, 1, 0))
    assert_same(first, again)
    assert all(not torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_global_generator_is_unchanged_when_the_data_fail():
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


def test_loaders_that_draw_globally_are_recognised():
    assert draws_globally(shuffled())
    assert not draws_globally(shuffled(generator=torch.Generator()))
    assert not draws_globally([1, 2])


# Starting in the middle


class AnyNoise(Noisy):
    """A data set that draws from all three generators, and counts its reads."""

    def __init__(self):
        super().__init__()
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        inputs, targets = super().__getitem__(index)
        return inputs + random.random() + float(np.random.rand()), targets


class HomeMade:
    """A batch sampler that draws from Python's and numpy's generators, as many do."""

    def __iter__(self):
        numbers = list(range(12))
        random.shuffle(numbers)
        for number in numbers[:5]:
            yield [number, int(np.random.randint(12)), int(torch.randint(12, ()))]

    def __len__(self):
        return 5


def loaders(data, **options):
    return {
        "shuffled": DataLoader(data, 4, shuffle=True, **options),
        "sequential": DataLoader(data, 5, **options),
        "weighted": DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 6 + [5.0] * 6, 20), **options),
        "home-made": DataLoader(data, batch_sampler=HomeMade(), **options),
        "no batches": DataLoader(data, batch_size=None, shuffle=True, **options),
    }


@pytest.mark.parametrize("name", list(loaders(AnyNoise())))
@pytest.mark.parametrize("workers", [0, 1])
def test_every_start_gives_the_tail_and_reads_no_more(name, workers):
    whole = list(epoch_batches(loaders(AnyNoise())[name], KEY, 2))
    size = 1 if name == "no batches" else len(whole[0][1])
    for start in (0, 1, len(whole) - 1, len(whole)):
        data = AnyNoise()
        options = {"num_workers": workers, "persistent_workers": True} if workers else {}
        random.seed(start)
        np.random.seed(start)
        loader = loaders(data, **options)[name]
        assert_same(list(epoch_batches(loader, KEY, 2, start)), whole[start:])
        assert_same(list(epoch_batches(loader, KEY, 2)), whole)
        if not workers:
            assert data.read <= size * (2 * len(whole) - start)


def test_the_order_is_that_of_the_sampler_under_the_epochs_seed():
    seeds = []

    class Told(WeightedRandomSampler):
        def __iter__(self):
            seeds.append(torch.initial_seed())
            return super().__iter__()

    loader = DataLoader(TensorDataset(torch.arange(12)), 4, sampler=Told([1.0] * 12, 12))
    drawn = torch.cat([batch for (batch,) in keyed_batches(loader, KEY, 1)])
    generator = torch.Generator().manual_seed(seeds[0])
    assert torch.equal(drawn, torch.multinomial(torch.ones(12), 12, True, generator=generator))


def test_worker_info_contains_the_users_data_set():
    class Opened(Dataset):
        extra = 0.0

        def __len__(self):
            return 12

        def __getitem__(self, index):
            return self.extra

    def open_files(worker):
        info = torch.utils.data.get_worker_info()
        assert info is not None and isinstance(info.dataset, Opened)
        info.dataset.extra = 5.0 + worker

    loader = DataLoader(Opened(), 4, num_workers=1, worker_init_fn=open_files)
    assert next(keyed_batches(loader, KEY, 0)).tolist() == [5.0] * 4


def test_persistent_workers_end_with_their_loader():
    loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=1, persistent_workers=True)
    next(keyed_batches(loader, KEY, 0))
    seen = weakref.ref(loader)
    del loader
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_name_the_batch(workers):
    class Failing(Noisy):
        def __getitem__(self, index):
            raise OSError("unreadable")

    with pytest.raises(OSError, match="batch 0 of epoch 3"):
        next(keyed_batches(DataLoader(Failing(), 2, num_workers=workers), KEY, 3))


class Own(DataLoader):
    def __iter__(self) -> Any:
        return iter([1, 2, 3])


class Iterated:
    def __iter__(self):
        return iter([1, 2, 3])


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (Iterated(), "Iterated"),
        (iter([1, 2, 3]), "list_iterator.*loses its next items"),
        (Own(Noisy()), "Own over Noisy"),
        (DataLoader(Stream(), 4), "DataLoader over Stream"),
        (DataLoader(TensorDataset(torch.arange(3)), generator=torch.Generator()), "DataLoader over Tens"),
    ],
)
def test_loaders_that_cannot_start_in_the_middle_read_and_drop_with_a_warning(data, named):
    with pytest.warns(SkippingWarning, match=f"batch 1 of epoch 4: the 1 before it are read from {named}"):
        batches = epoch_batches(data, KEY, 4, 1)
    assert len(list(batches)) == 2


@pytest.mark.parametrize("data", [[1, 2, 3], (1, 2, 3)])
def test_lists_start_in_the_middle(data):
    assert list(epoch_batches(data, KEY, 4, 1)) == [2, 3]


class Told:
    """Data that shuffle by `set_epoch`, as Hugging Face's streams and distributed samplers do."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter([[self.epochs[-1], number] for number in range(3)])

    def __len__(self):
        return 3


class ToldStream(Told, IterableDataset):
    pass


def test_data_loaders_and_samplers_get_the_epoch():
    alone, stream, sampler = Told(), ToldStream(), Told()
    assert list(epoch_batches(alone, KEY, 5)) == [[5, 0], [5, 1], [5, 2]]
    list(epoch_batches(DataLoader(stream), KEY, 6))
    batches = epoch_batches(DataLoader(torch.arange(20), batch_sampler=sampler), KEY, 7)  # type: ignore[arg-type]
    assert torch.stack(list(batches)).tolist() == [[7, 0], [7, 1], [7, 2]]
    assert (alone.epochs, stream.epochs, sampler.epochs) == ([5], [6], [7])


class ToldItems(Dataset):
    """Twelve items, each of which is the epoch."""

    epoch = -1

    def __len__(self):
        return 12

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_data_sets_get_the_epoch_also_in_workers_that_stay(workers):
    loader = DataLoader(ToldItems(), 12, num_workers=workers, persistent_workers=workers > 0)
    epochs = [[batch.tolist() for batch in keyed_batches(loader, KEY, epoch)] for epoch in (3, 4)]
    assert epochs == [[[3] * 12], [[4] * 12]]


# In fit


def trained(loader, duration="2ep", state=None):
    state = make_state() if state is None else state  # layers are initialised by global draws
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
def test_continuing_within_an_epoch_equals_one_run(stop):
    whole = trained(shuffled())
    middle = trained(shuffled(), stop)
    torch.manual_seed(5)
    assert_same(trained(shuffled(), state=middle), whole)


def test_persistent_workers_can_be_interrupted_and_reused():
    data = TensorDataset(*make_batch(0, 12))
    loader = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
    end = trained(loader, state=trained(loader, "4ba"))
    whole = trained(DataLoader(data, 4, shuffle=True))
    assert_same(end, whole)
    assert_same(trained(loader), whole)
    assert loader.generator is None


def test_a_loader_with_its_own_generator_is_not_changed():
    def batches():
        generator = torch.Generator().manual_seed(3)
        return DataLoader(TensorDataset(*make_batch(0, 12)), 4, shuffle=True, generator=generator)

    step, state = compose(loop_events), make_state(duration="2ep")
    end = fit(step, state, batches())
    loader, expected = batches(), state
    for _ in range(2):
        for inputs, targets in islice(loader, 3):  # requesting a missing fourth one would draw, and fit does not
            expected = step(expected, (inputs, targets))
    assert_same(end.params, expected.params)


@pytest.mark.filterwarnings("ignore::purecompose.data.SkippingWarning")
def test_streams_of_unknown_length():
    loader = DataLoader(Stream(), batch_size=4)
    end = trained(loader)
    assert (end.timestamp.epoch, end.timestamp.batch, end.timestamp.run.batches_per_epoch) == (2, 6, None)
    middle = trained(loader, "4ba")
    assert_same(trained(loader, state=middle).params, end.params)


# Streams


class Shuffling(IterableDataset):
    """A stream that draws from all three generators and shuffles by `set_epoch`."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(12).tolist()
        random.shuffle(order)
        worker = torch.utils.data.get_worker_info()
        for number in order if worker is None else order[worker.id :: worker.num_workers]:
            yield torch.tensor([number, self.epoch, random.random(), np.random.rand()], dtype=torch.float64)


class Owned(DataLoader):
    """A loader with its own iteration, which wraps the inherited one."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield 2 * batch


@pytest.mark.parametrize("kind", [DataLoader, Owned])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_an_epoch_of_a_stream_does_not_depend_on_earlier_ones(kind, options):
    loader = kind(Shuffling(), 4, **options)
    first, second = (list(epoch_batches(loader, KEY, epoch)) for epoch in (0, 1))
    random.seed(5)
    np.random.seed(5)
    again = kind(Shuffling(), 4, **options)
    assert_same(list(epoch_batches(again, KEY, 1)), second)
    assert_same(list(epoch_batches(again, KEY, 0)), first)
    factor = 2 if kind is Owned else 1
    assert {row[1].item() for batch in second for row in batch} == {factor}
    assert not torch.equal(torch.cat(first)[:, 2:], torch.cat(second)[:, 2:])


def test_workers_of_a_stream_end_with_its_epoch():
    loader = DataLoader(Shuffling(), 4, num_workers=1, persistent_workers=True)
    batches = keyed_batches(loader, KEY, 0)
    next(batches)
    assert multiprocessing.active_children()
    del batches
    assert not multiprocessing.active_children()
    list(keyed_batches(loader, KEY, 0))
    assert not multiprocessing.active_children()
