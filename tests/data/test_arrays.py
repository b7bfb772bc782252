"""In-memory batches: every example once per epoch, in an order given by (key, epoch), resumed anywhere."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose.data import Arrays, arrays, split
from purecompose.random import key


def numbered(num_examples: int, batch_size: int, **options: Any) -> Arrays:
    """Return a data set whose targets are the examples' numbers and whose inputs can be checked against them."""
    targets = torch.arange(num_examples)
    return arrays(torch.stack([targets * 2.0, -targets.float()], dim=1), targets, batch_size, **options)


def dealt(batches) -> list[list[int]]:
    """Return the examples' numbers, batch by batch, after checking that inputs and targets still match."""
    rows = []
    for inputs, targets in batches:
        assert torch.equal(inputs, torch.stack([targets * 2.0, -targets.float()], dim=1))
        rows.append(targets.tolist())
    return rows


sizes = st.integers(1, 40)
seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 1000)


@given(num_examples=sizes, batch_size=sizes, seed=seeds, epoch=epochs)
def test_an_epoch_deals_every_example_once(num_examples, batch_size, seed, epoch):
    data = numbered(num_examples, batch_size)
    batches = dealt(data.epoch(key(seed), epoch))
    assert sorted(itertools.chain(*batches)) == list(range(num_examples))
    assert len(batches) == len(data) == -(-num_examples // batch_size)
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(num_examples=sizes, batch_size=sizes, shuffle=st.booleans(), drop_last=st.booleans(), draw=st.data())
def test_resuming_gives_the_rest_of_the_epoch(num_examples, batch_size, shuffle, drop_last, draw):
    batch_size = min(batch_size, num_examples)
    data = numbered(num_examples, batch_size, shuffle=shuffle, drop_last=drop_last)
    start = draw.draw(st.integers(0, len(data)))
    whole = dealt(data.epoch(key(3), 2))
    assert len(whole) == len(data)
    assert dealt(data.epoch(key(3), 2, start)) == whole[start:]


@given(num_examples=sizes, batch_size=sizes)
def test_drop_last_deals_full_batches_of_the_same_order(num_examples, batch_size):
    batch_size = min(batch_size, num_examples)
    full = numbered(num_examples, batch_size, drop_last=True)
    every = numbered(num_examples, batch_size)
    assert len(full) == num_examples // batch_size
    assert dealt(full.epoch(key(1), 0)) == dealt(every.epoch(key(1), 0))[: len(full)]
    assert dealt(full) == dealt(every)[: len(full)]


def test_plain_iteration_and_shuffle_off_keep_the_stored_order():
    stored = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    data = numbered(10, 4)
    assert dealt(data) == stored
    assert dealt(data) == stored  # A second pass starts again.
    assert dealt(numbered(10, 4, shuffle=False).epoch(key(0), 5)) == stored


def test_the_order_only_depends_on_key_and_epoch():
    data = numbered(50, 7)
    order = data.order(key(0), 0)
    torch.manual_seed(99)
    assert torch.equal(data.order(key(0), 0), order)
    assert torch.equal(numbered(50, 8, drop_last=True).order(key(0), 0), order)
    others = [data.order(key(0), 1), data.order(key(1), 0), data.order(key(0), 2)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations([order, *others], 2))


def test_orders_of_many_epochs_are_uniform():
    # Each of the 24 orders of four examples is expected 2400 / 24 = 100 times; chi-square with 23 degrees of
    # freedom exceeds 59 once in 20 000 seeds.
    data, counts = numbered(4, 2), dict.fromkeys(itertools.permutations(range(4)), 0)
    for epoch in range(2400):
        counts[tuple(data.order(key(0), epoch).tolist())] += 1
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 59


def test_iteration_does_not_change_data_and_global_generator():
    data = numbered(9, 4)
    inputs, before = data.inputs.clone(), torch.get_rng_state()
    for batch_inputs, batch_targets in data.epoch(key(0), 0):
        batch_inputs.zero_()
        batch_targets.zero_()
    assert torch.equal(data.inputs, inputs) and data.targets is not None and data.targets.tolist() == list(range(9))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("names", [None, ("image",)])
def test_data_without_targets_have_the_inputs_of_the_same_batches(names):
    labelled, inputs = numbered(10, 4), numbered(10, 4).inputs
    alone = arrays(inputs, batch_size=4, names=names)
    for pairs, found in ((labelled, alone), (labelled.epoch(key(2), 1), alone.epoch(key(2), 1))):
        batches = [batch if names is None else batch["image"] for batch in found]
        assert all(torch.equal(ours, theirs) for ours, (theirs, _) in zip(batches, pairs, strict=True))
    assert alone.to("meta").inputs.device.type == "meta" and "targets" not in repr(alone)


def test_to_moves_both_tensors_and_keeps_the_settings():
    data = numbered(9, 4, shuffle=False, drop_last=True)
    moved = data.to("meta")
    assert moved.targets is not None
    assert (moved.inputs.device.type, moved.targets.device.type, moved.device.type) == ("meta",) * 3
    assert (moved.batch_size, moved.shuffle, moved.drop_last, moved.num_examples) == (4, False, True, 9)
    assert data.device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_order_is_the_same_on_the_accelerator():
    data = numbered(100, 9)
    on_device = list(data.to("cuda").epoch(key(0), 4))
    assert on_device[0][0].device.type == "cuda"
    assert [targets.tolist() for _, targets in on_device] == dealt(data.epoch(key(0), 4))


# Values that a type checker would refuse, to test that they are refused at run time too.


@given(num_examples=st.integers(2, 60), seed=seeds, draw=st.data())
def test_split_by_count_divides_the_examples(num_examples, seed, draw):
    count = draw.draw(st.integers(1, num_examples - 1))
    data = numbered(num_examples, 1)
    parts = split(data.inputs, torch.arange(num_examples), count, seed=seed)
    kept, held = dealt([parts[:2], parts[2:]])
    assert len(held) == count
    assert sorted(kept + held) == list(range(num_examples))


def test_split_by_fraction_and_seed():
    data = numbered(30, 1)

    def held(size: float, seed: int) -> list[int]:
        return split(data.inputs, torch.arange(30), size, seed=seed).test_targets.tolist()

    assert len(held(0.25, 0)) == 8  # round(7.5), to even
    assert held(0.2, 0) == held(6, 0)
    assert held(0.2, 0) != held(0.2, 1)
    assert held(6, 0) == held(7, 0)[:6]
