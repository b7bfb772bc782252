"""`data.loader`: keyed order, randomness that belongs to the sample, workers that change no bit, plain errors."""

import gc
import multiprocessing
import os
import random
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import purecompose as pc
from purecompose import compose, fit, loop_events
from purecompose.data import arrays, epoch_batches, loader
from purecompose.data.position import kept_globals, seed_globals, seed_words
from tests.helpers import assert_same, make_batch, make_state


KEY = pc.random.key(11)
# The machine may have fewer processors than a test has workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Augmented(Dataset):
    """Examples changed by draws from all three global generators, as torchvision and older libraries do it."""

    def __init__(self, size=10):
        self.inputs, self.targets = make_batch(0, size)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return self.inputs[index] + noise, self.targets[index]


class Whole(Augmented):
    """A data set that reads a whole batch in one call."""

    def __init__(self, size=10):
        super().__init__(size)
        self.asked = []

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [self[index] for index in indices]


def jitter(sample, rng):
    inputs, targets = sample
    return inputs + torch.randn((), generator=rng), targets


def by_index(batches, order, size):
    """Return each sample's inputs by its index."""
    chosen = order.split(size)
    return {
        i: x
        for (inputs, _), part in zip(batches, chosen, strict=True)
        for i, x in zip(part.tolist(), inputs, strict=True)
    }


def global_states():
    numpy = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().tolist(), random.getstate(), numpy["key"].tolist(), numpy["pos"]


# Order


def test_the_order_equals_that_of_arrays():
    inputs, targets = make_batch(0, 11)
    held = arrays(inputs, targets, 4)
    read = loader(TensorDataset(inputs, targets), 4)
    for epoch in range(3):
        assert torch.equal(read.order(KEY, epoch), held.order(KEY, epoch))
        assert_same([tuple(batch) for batch in read.epoch(KEY, epoch)], list(held.epoch(KEY, epoch)))
    assert_same([tuple(batch) for batch in read], list(held))


@given(st.integers(1, 12), st.integers(1, 5), st.booleans(), st.booleans(), st.data())
def test_every_start_gives_the_tail(size, batch_size, shuffle, drop_last, draw):
    if drop_last and batch_size > size:
        return
    read = loader(Augmented(size), batch_size, shuffle=shuffle, drop_last=drop_last, transform=jitter)
    epoch, start = draw.draw(st.integers(0, 3)), draw.draw(st.integers(0, len(read)))
    whole = list(read.epoch(KEY, epoch))
    assert len(whole) == len(read) == (size // batch_size if drop_last else -(-size // batch_size))
    assert_same(list(read.epoch(KEY, epoch, start)), whole[start:])


def test_batches_before_the_start_are_not_read():
    data = Whole()
    assert len(list(loader(data, 3, shuffle=False).epoch(KEY, 0, 2))) == 2
    assert data.asked == [[6, 7, 8], [9]]


def test_plain_iteration_has_the_stored_order_and_epoch_0_of_key_0():
    read = loader(Augmented(), 4, transform=jitter)
    unshuffled = loader(Augmented(), 4, transform=jitter, shuffle=False)
    first = list(read)
    assert_same(list(read), first)
    assert_same(list(unshuffled.epoch(pc.random.key(0), 0)), first)
    assert torch.equal(torch.cat([targets for _, targets in read]), read.dataset.targets)


# Randomness


def test_a_sample_depends_on_neither_batch_size_nor_position():
    four, three = loader(Augmented(), 4, transform=jitter), loader(Augmented(), 3, transform=jitter, shuffle=False)
    shuffled = by_index(four.epoch(KEY, 2), four.order(KEY, 2), 4)
    stored = by_index(three.epoch(KEY, 2), torch.arange(10), 3)
    assert len(shuffled) == 10
    assert all(torch.equal(shuffled[index], stored[index]) for index in range(10))


def test_samples_epochs_and_keys_differ():
    read = loader([torch.zeros(())] * 6, 6, shuffle=False, transform=lambda sample, rng: torch.rand((), generator=rng))
    drawn = [next(read.epoch(key, epoch)) for key, epoch in [(KEY, 0), (KEY, 1), (pc.random.key(0), 0)]]
    assert len(set(torch.cat(drawn).tolist())) == 18


@pytest.mark.parametrize(
    ("rng", "draw"),
    [
        ("torch", lambda _, rng: torch.rand((), generator=rng)),
        ("numpy", lambda _, rng: torch.tensor(rng.random())),
        ("key", lambda _, rng: pc.random.uniform(rng.named("shift"), ())),
    ],
)
def test_transforms_draw_from_their_second_argument(rng, draw):
    whole = next(loader(range(4), 4, shuffle=False, transform=draw, rng=rng).epoch(KEY, 3))
    for globals_too in (True, False):
        read = loader(range(4), 1, shuffle=False, transform=draw, rng=rng, seed_globals=globals_too)
        assert torch.equal(torch.cat(list(read.epoch(KEY, 3))), whole)
    assert len(set(whole.tolist())) == 4
    if rng == "key":
        place = pc.random.Rng(pc.random.fold_in(KEY, 3), pc.random.salt("data transform", "shift"))
        assert torch.equal(whole, pc.random.uniform(place.per_example(torch.arange(4)), (4,)))


def test_a_transform_of_one_argument_draws_globally():
    read = loader(range(5), 2, transform=lambda sample: torch.rand(2), rng=None)
    torch.manual_seed(1)
    first = list(read.epoch(KEY, 0))
    torch.manual_seed(2)
    assert_same(list(read.epoch(KEY, 0)), first)
    assert_same(list(read.epoch(KEY, 0, 2)), first[2:])


def test_the_transforms_generator_differs_from_the_global_one():
    both = next(iter(loader(range(8), 8, transform=lambda _, rng: (torch.rand(()), torch.rand((), generator=rng)))))
    assert len(set(torch.cat(both).tolist())) == 16


def test_collating_is_seeded_too():
    def mixed(samples):
        return torch.stack(samples) * torch.rand(()) * random.random()

    read = loader(torch.arange(1.0, 8.0), 2, collate=mixed)
    first = list(read.epoch(KEY, 1))
    torch.manual_seed(0)
    assert_same(list(read.epoch(KEY, 1, 2)), first[2:])
    other = next(loader(torch.arange(1.0, 8.0), 2, collate=mixed).epoch(pc.random.key(5), 1))
    assert not torch.equal(other, first[0])


def test_global_generators_are_unchanged_with_and_without_workers():
    for workers in (0, 1):
        before = global_states()
        read = loader(Augmented(), 4, transform=jitter, workers=workers)
        batches = read.epoch(KEY, 0)
        next(batches)
        assert global_states() == before
        batches.close()
        list(read)
        assert global_states() == before


def test_without_seeding_the_caller_controls_the_global_generators():
    read = loader(Augmented(), 4, seed_globals=False)
    with kept_globals():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        first = next(iter(read))
        assert not torch.equal(next(iter(read))[0], first[0])


class Drawing(Dataset):
    """A data set that draws for some of its samples, from some generators."""

    def __init__(self, kinds, every):
        self.kinds, self.every = kinds, every

    def __len__(self):
        return 40

    def __getitem__(self, index):
        draws = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": np.random.rand}
        return float(index + sum(draws[kind]() for kind in self.kinds if index % self.every == 0))


@pytest.mark.parametrize("kinds", [("torch",), ("python",), ("numpy",), ("torch", "numpy"), ("python", "numpy")])
@pytest.mark.parametrize("every", [1, 13])
def test_each_sample_draws_by_its_own_seed(kinds, every):
    data = Drawing(kinds, every)
    read, before = loader(data, 4), global_states()
    found = torch.cat(list(read.epoch(KEY, 2)))
    assert global_states() == before
    for place, index in enumerate(read.order(KEY, 2).tolist()):
        with kept_globals():
            seed_globals(seed_words(tuple(KEY.tolist()), pc.random.salt("data sample"), index, 2))
            assert data[index] == found[place].item()


@pytest.mark.parametrize("part", [None, range(7), [3, 2, -1, 5, 4]])
@pytest.mark.parametrize("transform", [None, jitter])
def test_tensors_are_read_by_the_batch_as_sample_by_sample(part, transform):
    class Own(TensorDataset):
        pass

    inputs, targets = make_batch(0, 10)
    one, many = Own(inputs, targets), TensorDataset(inputs, targets)
    if part is not None:
        one, many = Subset(one, part), Subset(many, part)  # type: ignore[arg-type]
    expected = list(loader(one, 3, transform=transform).epoch(KEY, 0))
    assert_same(list(loader(many, 3, transform=transform).epoch(KEY, 0)), expected)
    whole = DataLoader(many, 3, shuffle=True), DataLoader(one, 3, shuffle=True)
    assert_same(*(list(epoch_batches(data, KEY, 1)) for data in whole))


# Reading many samples in one call


def test_a_data_set_with_getitems_reads_many_at_once_and_repeats():
    data = Whole()
    read = loader(data, 4, transform=jitter)
    first = list(read.epoch(KEY, 0))
    assert data.asked == [part.tolist() for part in read.order(KEY, 0).split(4)]
    assert_same(list(read.epoch(KEY, 0, 1)), first[1:])


def test_a_subset_is_read_like_its_data_set():
    data = Whole()
    list(loader(Subset(data, range(4)), 2, shuffle=False))
    assert data.asked == [[0, 1], [2, 3]]
    part, whole = loader(Subset(Augmented(), range(6)), 2), loader(Subset(Augmented(), range(6)), 3)
    two = by_index(part.epoch(KEY, 0), part.order(KEY, 0), 2)
    three = by_index(whole.epoch(KEY, 0), whole.order(KEY, 0), 3)
    assert all(torch.equal(two[index], three[index]) for index in range(6))


class Rows:
    """An imitation of Hugging Face's `datasets.Dataset`: columns by name, rows by number, many rows in one call."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        return (
            self.columns[key] if isinstance(key, str) else {name: column[key] for name, column in self.columns.items()}
        )

    def __getitems__(self, keys):
        return [self[key] for key in keys]


def rows():
    inputs, targets = make_batch(0, 10)
    return {"input": inputs.tolist(), "label": targets.tolist()}


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_become_mappings_of_tensors(workers):
    read = loader(Rows({name: torch.tensor(column) for name, column in rows().items()}), 4, workers=workers)
    batch = next(read.epoch(KEY, 0))
    chosen = read.order(KEY, 0)[:4]
    assert torch.equal(batch["input"], torch.tensor(rows()["input"])[chosen])
    assert torch.equal(batch["label"], torch.tensor(rows()["label"])[chosen])


def test_hugging_face_data_sets():
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    columns = {"input": [0.5 * number for number in range(10)], "label": list(range(10))}
    table = datasets.table.InMemoryTable(pyarrow.table(columns))
    # `from_dict` would pickle pyarrow, which some versions of dill cannot do.
    data = datasets.Dataset(table, fingerprint="given")
    like = loader(Rows(columns), 4)
    assert_same(list(loader(data, 4).epoch(KEY, 0)), list(like.epoch(KEY, 0)))
    assert_same(list(loader(data, 4, workers=1).epoch(KEY, 0, 1)), list(like.epoch(KEY, 0, 1)))
    with pytest.raises(TypeError, match="choose one of them"):
        loader(datasets.DatasetDict({"train": data}), 4)


# Workers


@pytest.fixture
def children():
    """Return the workers started in this test that are alive."""
    gc.collect()  # other tests' workers, which tracebacks may keep alive
    before = set(multiprocessing.active_children())
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_workers_change_no_bit(workers):
    alone, many = (loader(Augmented(), 3, transform=jitter, workers=count) for count in (0, workers))
    for epoch, start in [(0, 0), (1, 0), (1, 2), (0, 0)]:  # the same workers, independent of their earlier work
        assert_same(list(many.epoch(KEY, epoch, start)), list(alone.epoch(KEY, epoch, start)))
    assert_same(list(many), list(alone))


def test_workers_are_kept_between_epochs_until_they_are_closed(children):
    read = loader(range(6), 2, workers=1, transform=lambda sample, rng: os.getpid())
    first, second = next(read.epoch(KEY, 0)), torch.cat(list(read.epoch(KEY, 1)))
    assert len(children()) == 1 and set(first.tolist()) == set(second.tolist())
    read.close()
    assert not children()
    list(read)
    del read
    assert not children()


@pytest.mark.parametrize("persistent", [True, False])
def test_an_abandoned_iterator_leaves_no_worker(persistent, children):
    read = loader(Augmented(), 2, workers=1, persistent_workers=persistent)
    batches = read.epoch(KEY, 0)
    next(batches)
    del batches
    assert len(children()) == persistent
    assert_same(list(read.epoch(KEY, 1)), list(loader(Augmented(), 2).epoch(KEY, 1)))
    del read
    assert not children()


def test_workers_end_with_a_loader_that_a_traceback_keeps_alive(children):
    def fail():
        read = loader(Augmented(), 2, workers=1)
        next(read.epoch(KEY, 0))
        try:
            raise OSError
        except OSError as error:
            hanging = error  # a cycle: the traceback holds this frame
        return weakref.ref(read), hanging

    begin = time.monotonic()
    seen = fail()[0]
    assert len(children()) == 1
    start = time.monotonic()
    gc.collect()
    assert seen() is None and not children()
    # Torch waits 5 seconds for a worker that it did not tell to end; a busy machine takes longer for everything.
    assert time.monotonic() - start < 4 + 2 * (start - begin)


def test_two_simultaneous_iterations_do_not_affect_each_other():
    read, alone = loader(Augmented(), 2, workers=1), loader(Augmented(), 2)
    outer = read.epoch(KEY, 0)
    found = [next(outer)]
    assert_same(list(read), list(alone))
    assert_same(found + list(outer), list(alone.epoch(KEY, 0)))


class Shy(Dataset):
    """A data set that detects that it is in a worker, and fails on one sample."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        assert info is None or info.dataset is self
        if index == 4:
            raise OSError("unreadable")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_name_the_sample_and_the_next_epoch_works(workers):
    read = loader(Shy(), 2, shuffle=False, workers=workers)
    batches = read.epoch(KEY, 3)
    assert next(batches).tolist() == [0, 1]
    before = global_states()
    with pytest.raises(OSError, match="sample 4 of epoch 3"):
        list(batches)
    assert global_states() == before
    assert next(read.epoch(KEY, 4)).tolist() == [0, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stray_stop_iteration_does_not_end_the_epoch(workers):
    read = loader(range(4), 2, workers=workers, transform=lambda sample, rng: next(iter(())))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(read)


# In fit


def trained(data, duration="2ep", state=None):
    state = make_state() if state is None else state
    return fit(compose(loop_events), state, data, duration=duration)


@pytest.mark.parametrize("stop", ["1ba", "2ba", "4ba", "5ba"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumed_within_an_epoch_equals_one_run(stop, workers):
    whole = trained(loader(Augmented(), 3, transform=jitter))
    middle = trained(loader(Augmented(), 3, transform=jitter, workers=workers), stop)
    torch.manual_seed(3)
    end = trained(loader(Augmented(), 3, transform=jitter, workers=workers), state=middle)
    assert_same(end, whole)


def test_training_and_evaluating_on_one_loader():
    read = loader(Augmented(), 4, workers=1)
    evaluator = pc.Evaluator(read, {"accuracy": pc.metrics.accuracy}, every="2ba")
    end = fit(compose(loop_events), make_state(), read, duration="2ep", evaluate=evaluator)
    assert_same(end.params, trained(loader(Augmented(), 4)).params)


# Errors


def test_samples_that_do_not_fit_together_are_named():
    with pytest.raises(RuntimeError, match=r"got \[2\] at entry 0 and \[3\] at entry 2") as caught:
        list(loader([torch.zeros(2), torch.zeros(2), torch.zeros(3)], 3))
    assert "samples [0, 1, 2], collating them" in caught.value.__notes__[0]


def test_errors_in_the_users_collate_name_the_place():
    with pytest.raises(ZeroDivisionError, match=r"samples \[0, 1\], collating"):
        list(loader([1, 2], 2, collate=lambda samples: 1 // 0))
