"""Data that are not batches are refused where they are given."""

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from purecompose import Evaluator, data, predict
from purecompose.data.checks import check_batches


INPUTS, TARGETS = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(INPUTS, TARGETS)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (TensorDataset(INPUTS, TARGETS), r"the data set TensorDataset.*wrap it in data\.loader"),
        ((INPUTS, TARGETS), r"inputs and targets.*data\.arrays"),
        ([INPUTS, TARGETS], r"inputs and targets.*\[\(inputs, targets\)\]"),
        (INPUTS, r"one tensor, .*\(4, 3\): .*\[batch\]"),
        ({"x": INPUTS, "y": TARGETS}, r"a mapping of 'x', 'y'.*\[batch\]"),
        (None, "got None"),
        ("train", "got 'train'"),
        (list, "got <class 'list'>"),
    ],
)
def test_arguments_that_are_not_batches_are_refused(given, message):
    with pytest.raises(TypeError, match=f"^fit: data: expected batches, .*{message}"):
        check_batches(given, "fit: data")
    with pytest.raises(TypeError, match="^Evaluator: data: expected batches"):
        Evaluator(given)
    with pytest.raises(TypeError, match="^predict: data: expected batches"):
        predict(None, given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "given",
    [
        [(INPUTS, TARGETS)],
        (INPUTS, INPUTS),
        [INPUTS, torch.zeros(4, 5)],
        iter([(INPUTS, TARGETS)]),
        data.arrays(INPUTS, TARGETS, batch_size=2),
        data.loader(TensorDataset(INPUTS, TARGETS), batch_size=2),
        torch.utils.data.DataLoader(TensorDataset(INPUTS, TARGETS)),
        Stream(),
    ],
    ids=lambda given: type(given).__name__,
)
def test_batches_of_every_kind_are_accepted(given):
    check_batches(given, "fit: data")


def test_data_in_memory_print_without_their_numbers():
    printed = "Arrays(inputs=float32[4, 3], targets=int64[4], batch_size=2, shuffle=True, drop_last=False, names=None)"
    arrays = data.arrays(INPUTS, TARGETS, batch_size=2)
    assert repr(arrays) == printed
    assert "tensor" not in repr(Evaluator(arrays)) + repr(Evaluator([(INPUTS, TARGETS)]))
