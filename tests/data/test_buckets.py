"""`data.buckets`: samples of similar length together, padded to few sizes, in keyed order."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import compose, loop_events
from purecompose.data import Buckets, arrays, buckets, loader
from tests.helpers import assert_same


KEY = pc.random.key(5)
LENGTHS = [int(length) for length in torch.randint(1, 21, (50,), generator=torch.Generator().manual_seed(0))]


def texts(lengths: list[int]) -> list[dict[str, Any]]:
    """Return samples whose tokens are the number of the sample + 1, and labels that repeat them."""
    return [
        {"input_ids": torch.full((length,), i + 1), "labels": torch.full((length,), i % 3), "place": i}
        for i, length in enumerate(lengths)
    ]


PAD = {"input_ids": 0, "labels": -100}
SOME = st.lists(st.integers(0, 12), min_size=1, max_size=30)


@given(SOME, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_an_epoch_has_each_sample_once_in_a_batch_of_its_bucket(lengths, size, number, drop_last, epoch):
    chosen = buckets(lengths, batch_size=size, bounds=number)
    if drop_last and not chosen.num_batches(drop_last=True):
        return
    read = loader(list(range(len(lengths))), chosen, drop_last=drop_last)
    for parts in (read.indices(KEY, epoch), read.indices()):
        assert len(parts) == len(read)
        counts = Counter(index for part in parts for index in part)
        assert set(counts.values()) <= {1} and (drop_last or len(counts) == len(lengths))
        for part in parts:
            [bound] = {next(bound for bound in chosen.bounds if bound >= lengths[index]) for index in part}
            assert bound in chosen.bounds and len(part) <= size and (len(part) == size or not drop_last)
    short = [part[0] for part in read.indices() if len(part) < size]
    numbers = Counter(next(bound for bound in chosen.bounds if bound >= lengths[index]) for index in short)
    assert set(numbers.values()) <= {1}  # at most one short batch in each bucket


def test_the_order_is_that_of_the_key_and_the_epoch():
    read = loader(list(range(50)), buckets(LENGTHS, batch_size=4, bounds=5))
    assert read.indices(KEY, 1) == read.indices(KEY, 1)
    others = read.indices(KEY, 2), read.indices(pc.random.key(6), 1), read.indices()
    assert all(other != read.indices(KEY, 1) for other in others)
    assert all(sorted(map(tuple, other)) != sorted(map(tuple, read.indices(KEY, 1))) for other in others)
    bounds = [max(LENGTHS[index] for index in part) for part in read.indices(KEY, 1)]
    assert bounds != sorted(bounds) and bounds != sorted(bounds, reverse=True)
    unshuffled = loader(list(range(50)), buckets(LENGTHS, batch_size=4, bounds=5), shuffle=False)
    assert unshuffled.indices(KEY, 1) == read.indices()
    plain = loader(list(range(50)), 4)
    assert plain.indices(KEY, 1) == [part.tolist() for part in arrays(torch.arange(50), None, 4).order(KEY, 1).split(4)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_batches_are_padded_to_bounds_and_any_start_gives_the_tail(workers):
    read = loader(texts(LENGTHS), buckets(LENGTHS, batch_size=4, bounds=[6, 12, 20], pad=PAD), workers=workers)
    whole = list(read.epoch(KEY, 3))
    assert {batch["input_ids"].shape[1] for batch in whole} == {6, 12, 20}
    for batch, part in zip(whole, read.indices(KEY, 3), strict=True):
        assert batch["place"].tolist() == part
        for row, labels, i in zip(batch["input_ids"], batch["labels"], part, strict=True):
            assert row.tolist() == [i + 1] * LENGTHS[i] + [0] * (len(row) - LENGTHS[i])
            assert labels.tolist() == [i % 3] * LENGTHS[i] + [-100] * (len(row) - LENGTHS[i])
    for start in (1, len(read) - 1, len(read)):
        assert_same(list(read.epoch(KEY, 3, start)), whole[start:])
    read.close()


def test_longest_pads_less_and_multiples_round_up():
    lengths = [3, 5, 9]
    for settings, shape in (
        ({"pad_to": "longest"}, (3, 9)),
        ({"bounds": [20]}, (3, 20)),
        ({"multiple_of": 8}, (3, 16)),
        ({"multiple_of": 8, "pad_to": "longest"}, (3, 9)),
    ):
        data = loader([torch.ones(n) for n in lengths], buckets(lengths, batch_size=3, **{"bounds": 1, **settings}))
        [batch] = data
        assert tuple(batch.shape) == shape and batch.sum() == sum(lengths)


def test_a_number_of_tokens_bounds_each_batch():
    chosen = buckets(LENGTHS, max_tokens=40, bounds=[5, 10, 20])
    assert chosen.sizes == (8, 4, 2)
    for batch in loader(texts(LENGTHS), chosen).epoch(KEY, 0):
        assert batch["input_ids"].numel() <= 40


@pytest.mark.parametrize(
    ("samples", "batch"),
    [
        ([[1, 2], [3]], torch.tensor([[1, 2], [3, 9]])),
        ([(torch.ones(2, 3), "a"), (torch.ones(1, 3), "b")], None),
        ([([1, 2], 0), ([3], 1)], (torch.tensor([[1, 2], [3, 9]]), torch.tensor([0, 1]))),
    ],
)
def test_samples_may_be_lists_tuples_and_have_members_without_rows(samples, batch):
    [found] = loader(samples, buckets([2, 1], batch_size=2, bounds=1, pad=9), shuffle=False)
    if batch is None:
        assert found[1] == ["a", "b"] and found[0].shape == (2, 2, 3) and (found[0][1, 1] == 9).all()
    else:
        assert_same(found, batch)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_an_empty_list_has_the_dtype_of_the_others(order):
    samples = [([1] * length, [0.5] * length) for length in (2, 0, 3)]
    chosen = buckets([2, 0, 3], batch_size=3, bounds=1, pad=-1)
    ids, weights = chosen.collate([samples[at] for at in order])
    expected = torch.tensor([[1, 1, -1], [-1, -1, -1], [1, 1, 1]])[list(order)]
    assert_same(ids, expected)
    assert_same(weights, torch.where(expected > 0, 0.5, -1.0))
    assert_same(chosen.collate([samples[at][0] for at in order]), expected)


class Tokens(nn.Module):
    """Scores of three classes for each token, (N, 3, L)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(51, 8), nn.Conv1d(8, 3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).movedim(2, 1))


def new_state(**options: Any) -> pc.State:
    torch.manual_seed(0)
    settings = {"duration": "2ep", "input_field": "input_ids", "target_field": "labels", **options}
    return pc.State.create(Tokens(), loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), **settings)


def test_a_run_resumes_in_the_middle_of_an_epoch_to_the_same_bits():
    read = loader(texts(LENGTHS), buckets(LENGTHS, batch_size=4, bounds=4, pad=PAD))
    step = compose(loop_events)
    whole = pc.fit(step, new_state(), read)
    half = pc.fit(step, new_state(), read, duration=f"{len(read) // 2}ba")
    assert_same(pc.fit(step, half, read, duration="2ep"), whole)
    assert whole.timestamp.batch == 2 * len(read) and whole.timestamp.sample == 100


def test_padding_changes_neither_loss_nor_gradient():
    padded = next(iter(loader(texts([3, 5]), buckets([3, 5], batch_size=2, bounds=[16], pad=PAD), shuffle=False)))
    exact = next(iter(loader(texts([3, 5]), buckets([3, 5], batch_size=2, bounds=1, pad=PAD), shuffle=False)))
    ends = [compose(loop_events)(new_state(), batch) for batch in (padded, exact)]
    torch.testing.assert_close(ends[0].params, ends[1].params)
    torch.testing.assert_close(ends[0].loss, ends[1].loss)


@pytest.mark.parametrize(
    ("options", "drop_last", "pad_to", "most"),
    [
        ({}, True, "bound", 4),
        ({}, False, "bound", 8),
        ({"dynamic": True}, False, "bound", 8),  # a last batch may have a single sample
        ({"dynamic": "all"}, False, "longest", 4),
    ],
)
def test_a_compiled_step_has_few_variants(options, drop_last, pad_to, most):
    """One for each bucket and one for its last batch; with all sizes open one, besides those of sizes 0 and 1."""
    chosen = buckets(LENGTHS, batch_size=4, bounds=4, pad=PAD, pad_to=pad_to)
    read = loader(texts(LENGTHS), chosen, drop_last=drop_last)
    step = compose(loop_events)
    fast = pc.compile(step, backend="eager", donate=False, quiet=True, **options)
    ends = [pc.fit(one, new_state(duration="3ep"), read) for one in (step, fast)]
    torch.testing.assert_close(ends[0].params, ends[1].params)
    assert 0 < len(fast.variants()) <= most
    if options:
        sizes = {tuple(batch["input_ids"].shape) for epoch in range(3) for batch in read.epoch(KEY, epoch)}
        assert len(fast.variants()) < len(sizes)


def test_outputs_of_a_prediction_are_said_to_be_in_another_order():
    read = loader(texts(LENGTHS), buckets(LENGTHS, batch_size=4, pad=PAD))
    with pytest.warns(UserWarning, match="not in the order of its data set"):
        found = pc.predict(new_state(), read)
    assert [len(outputs) for outputs in found] == [len(part) for part in read.indices()]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ValueError, "either batch_size or max_tokens"),
        ({"batch_size": 2, "max_tokens": 40}, ValueError, "either batch_size or max_tokens"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"max_tokens": 10}, ValueError, "max_tokens"),
        ({"batch_size": 2, "bounds": [5, 10]}, ValueError, "more than the last bound"),
        ({"batch_size": 2, "bounds": [10, 5, 20]}, ValueError, "rising order"),
        ({"batch_size": 2, "bounds": []}, ValueError, "rising order"),
        ({"batch_size": 2, "bounds": 0}, ValueError, "bounds"),
        ({"batch_size": 2, "multiple_of": 0}, ValueError, "multiple_of"),
        ({"batch_size": 2, "pad": {"x": "a"}}, TypeError, "pad"),
        ({"batch_size": 2, "pad_to": "bucket"}, ValueError, "'bound' or 'longest'"),
    ],
)
def test_wrong_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        buckets(LENGTHS, **settings)


def test_lengths_and_members_that_do_not_fit_are_refused():
    for lengths in ([], [1.5], [-1], [[1]]):
        with pytest.raises(ValueError, match="lengths"):
            buckets(lengths, batch_size=2)  # pyright: ignore
    with pytest.raises(ValueError, match="lengths of 50 samples, got those of 3"):
        loader(texts(LENGTHS), buckets([1, 2, 3], batch_size=2))
    with pytest.raises(ValueError, match="leaves no batch at all: batch_size=3 .* more than any bucket has samples"):
        loader(texts([1, 2]), buckets([1, 2], batch_size=3), drop_last=True)
    with pytest.raises(ValueError, match="samples have no 'ids'"):
        list(loader(texts([1, 2]), buckets([1, 2], batch_size=2, pad={"ids": 0})))
    assert isinstance(buckets(torch.tensor(LENGTHS), batch_size=3), Buckets)
