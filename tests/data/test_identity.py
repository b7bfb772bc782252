"""A resumed run detects different data by their description."""

import pathlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, TensorDataset

from purecompose import Checkpoints, compose, data as pc_data, fit, loop_events
from purecompose.data.loaders import describe_data, differences
from purecompose.errors import CheckpointWarning
from tests.helpers import make_mlp, make_state


INPUTS, TARGETS = torch.randn(16, 4), torch.arange(16) % 3


def dealt(**changes: object) -> pc_data.Arrays:
    return pc_data.arrays(**{"inputs": INPUTS, "targets": TARGETS, "batch_size": 4, **changes})  # pyright: ignore


def test_equal_data_have_equal_descriptions() -> None:
    assert describe_data(dealt()) == describe_data(dealt(inputs=INPUTS.clone()))
    assert differences(describe_data(dealt()), describe_data(dealt())) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"inputs": INPUTS + 1}, "inputs"),
        ({"inputs": INPUTS.double()}, "inputs"),
        ({"targets": TARGETS.flip(0)}, "targets"),
        ({"batch_size": 8}, "batch_size"),
        ({"shuffle": False}, "shuffle"),
    ],
)
def test_differences_between_data_are_named(changes: dict[str, object], named: str) -> None:
    (line,) = differences(describe_data(dealt()), describe_data(dealt(**changes)))
    assert line.startswith(f"data: {named}: ") and "in the checkpoint" in line


@given(st.integers(0, 15))
def test_every_example_of_small_data_matters(row: int) -> None:
    changed = INPUTS.clone()
    changed[row, 0] += 1
    assert differences(describe_data(dealt()), describe_data(dealt(inputs=changed)))


def test_loaders_are_described_without_being_read() -> None:
    class Unread(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            raise AssertionError("read")

    set_of_16 = Unread(INPUTS, TARGETS)
    told = describe_data(DataLoader(set_of_16, batch_size=4))
    assert told["dataset"].endswith("Unread of 16") and told["sampler"] == "SequentialSampler"
    assert describe_data(pc_data.loader(set_of_16, 4))["batch_size"] == "4"


def test_iterators_and_older_checkpoints_cause_no_warning() -> None:
    assert describe_data(iter([1])) == {}
    assert differences({}, describe_data(dealt())) == []


def test_resuming_with_other_data_warns(tmp_path: pathlib.Path) -> None:
    step, settings = compose(loop_events), Checkpoints(tmp_path)
    start = make_state(make_mlp())
    fit(step, start, dealt(), duration="1ep", checkpoints=settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(step, start, dealt(), duration="2ep", checkpoints=settings, resume="auto")
    with pytest.warns(CheckpointWarning, match="other data: data: inputs: float32"):
        fit(step, start, dealt(inputs=-INPUTS), duration="3ep", checkpoints=settings, resume="auto")


class Odd:
    """Data whose attributes have another meaning, or none."""

    inputs = torch.tensor(3)  # a number, not examples
    targets = torch.eye(5).to_sparse()

    def epoch(self, key: torch.Tensor, epoch: int, start: int) -> Iterator[tuple[torch.Tensor, ...]]:
        return dealt().epoch(key, epoch, start)

    @property
    def batch_size(self) -> int:
        raise RuntimeError("not opened")

    @property
    def dataset(self) -> "Unopened":
        return Unopened()


class Unopened:
    def __len__(self) -> int:
        raise RuntimeError("not opened")


class Unreadable(torch.Tensor):
    def __getitem__(self, index: object) -> torch.Tensor:
        raise RuntimeError("not here")


@pytest.mark.parametrize(
    "inputs",
    [Odd.inputs, Odd.targets, torch.zeros(5, 2).as_subclass(Unreadable)],
    ids=["a number", "sparse", "unreadable"],
)
def test_properties_that_cannot_be_described_are_left_out(inputs: torch.Tensor) -> None:
    odd = Odd()
    odd.inputs = inputs
    assert describe_data(odd) == {"kind": "Odd"}


def test_odd_data_are_trained_on(tmp_path: pathlib.Path) -> None:
    start, settings = make_state(make_mlp()), Checkpoints(tmp_path)
    fit(compose(loop_events), start, Odd(), duration="1ep", checkpoints=settings)
    assert fit(compose(loop_events), start, Odd(), duration="8ba", checkpoints=settings, resume="auto")


def test_no_examples_are_described_too() -> None:
    assert "inputs" in describe_data(SimpleNamespace(inputs=torch.zeros(0, 3)))


def test_lists_and_tensor_data_sets_are_described_by_their_content() -> None:
    batches = [(INPUTS[:8], TARGETS[:8]), (INPUTS[8:], TARGETS[8:])]
    assert describe_data(batches) == describe_data([(one.clone(), other.clone()) for one, other in batches])
    (line,) = differences(describe_data(batches), describe_data(batches[::-1]))
    assert line.startswith("data: content: 2 batches ")
    assert describe_data(["a", "b"]) == {"kind": "list"}
    loaders = [DataLoader(TensorDataset(inputs, TARGETS), batch_size=4) for inputs in (INPUTS, INPUTS + 1)]
    (line,) = differences(*map(describe_data, loaders))
    assert line.startswith("data: dataset.tensors[0]: ")
