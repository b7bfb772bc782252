"""Batches of every shape: members are read, replaced and split, and nothing is edited in place."""

import operator
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from purecompose import batch as batches


class Named(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Data:
    x: Any
    y: Any
    note: str = "kept"


@dataclass
class Checked:
    """A dataclass that refuses what is no tensor, and computes a field of its own."""

    x: Tensor
    y: Tensor
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tensor):
            raise TypeError("x must be a tensor")
        self.total = self.x + self.y


class ModelOutputLike(OrderedDict):
    """Like the outputs of Hugging Face models: item and attribute at once, and no `update`."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("no update")


def output_like(x: Tensor, y: Tensor) -> ModelOutputLike:
    made = ModelOutputLike()
    made["x"], made["y"] = x, y
    return made


def filled(x: Tensor, y: Tensor) -> defaultdict[str, Any]:
    made: defaultdict[str, Any] = defaultdict(list)
    made["x"], made["y"] = x, y
    return made


# Every kind of batch with two members, and the keys of the members.
KINDS = {
    "tuple": (lambda x, y: (x, y), 0, 1),
    "tuple from the end": (lambda x, y: (x, y), -2, -1),
    "list": (lambda x, y: [x, y], 0, 1),
    "dict": (lambda x, y: {"x": x, "y": y}, "x", "y"),
    "defaultdict": (filled, "x", "y"),
    "user dict": (lambda x, y: UserDict(x=x, y=y), "x", "y"),
    "read-only mapping": (lambda x, y: MappingProxyType({"x": x, "y": y}), "x", "y"),
    "model output": (output_like, "x", "y"),
    "namedtuple by name": (Named, "x", "y"),
    "namedtuple by index": (Named, 0, 1),
    "dataclass": (Data, "x", "y"),
    "checked dataclass": (Checked, "x", "y"),
    "object": (lambda x, y: SimpleNamespace(x=x, y=y), "x", "y"),
    "nested, by getter and setter": (
        lambda x, y: {"in": (x, "text"), "out": Data(y, None)},
        (lambda b: b["in"][0], lambda b, value: {**b, "in": (value, b["in"][1])}),
        (lambda b: b["out"].x, lambda b, value: {**b, "out": Data(value, None)}),
    ),
}
kinds = pytest.mark.parametrize("make, input_key, target_key", KINDS.values(), ids=list(KINDS))


@kinds
def test_members_are_read_and_replaced_without_editing(make, input_key, target_key):
    x, y, new = torch.arange(6.0).reshape(3, 2), torch.ones(3, 2), torch.zeros(3, 2)
    batch = make(x, y)
    assert batches.get(batch, input_key) is x and batches.get(batch, target_key) is y
    after = batches.put(batch, input_key, new)
    assert type(after) is type(batch)
    assert batches.get(after, input_key) is new and batches.get(after, target_key) is y
    assert batches.get(batch, input_key) is x, "the old batch was edited"
    after = batches.put(batch, target_key, new)
    assert batches.get(after, target_key) is new and batches.get(after, input_key) is x


@kinds
def test_examples_are_counted_and_split(make, input_key, target_key):
    x, y = torch.arange(10.0).reshape(5, 2), torch.ones(5, 2)
    batch = make(x, y)
    assert batches.num_examples(batch) == 5
    assert [leaf is x or leaf is y for leaf in batches.tensors(batch)][:2] == [True, True]
    parts = batches.split(batch, 3)
    assert all(type(part) is type(batch) for part in parts)
    assert [batches.num_examples(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([batches.get(part, input_key) for part in parts]), x)
    assert torch.equal(torch.cat([batches.get(part, target_key) for part in parts]), y)
    assert batches.get(batch, input_key) is x


def test_a_list_of_keys_names_several_members():
    batch = {"a": 1, "b": 2, "c": 3}
    assert batches.get(batch, ["c", "a"]) == [3, 1]
    assert batches.put(batch, ["c", "a"], [30, 10]) == {"a": 10, "b": 2, "c": 30}
    with pytest.raises(ValueError):
        batches.put(batch, ["c", "a"], [1])


def test_the_whole_batch_and_a_row_of_a_tensor_are_members():
    batch = {"a": 1}
    assert batches.get(batch, batches.WHOLE) is batch
    assert batches.put(batch, batches.WHOLE, (1, 2)) == (1, 2)
    rows = torch.arange(6.0).reshape(3, 2)
    assert batches.get(rows, 1).tolist() == [2.0, 3.0]
    assert batches.put(rows, -1, torch.zeros(2)).tolist() == [[0, 1], [2, 3], [0, 0]]
    assert rows[2, 1] == 5


def test_what_a_dataclass_or_a_mapping_holds_besides_its_members_is_kept():
    assert batches.put(Data(1, 2, "other"), "y", 3) == Data(1, 3, "other")
    assert batches.split(Data(torch.ones(4), torch.ones(4), "other"), 2)[1].note == "other"
    assert batches.put(filled(torch.ones(1), torch.ones(1)), "x", 1)["new"] == []
    checked = batches.put(Checked(torch.ones(2), torch.ones(2)), "x", torch.zeros(2))
    assert checked.total.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "batch, key, names",
    [
        ((1, 2), 2, ["tuple", "2 members"]),
        ([1], "x", ["list", "1 members"]),
        ({"image": 1}, "label", ["dict", "'image'", "'label'"]),
        (Data(1, 2), "z", ["Data", "'x'", "'y'"]),
        (None, 0, ["NoneType"]),
        ({"image": 1}, 0, ["dict", "'image'"]),
    ],
)
def test_a_missing_member_is_an_error_that_lists_what_there_is(batch, key, names):
    for action in (lambda: batches.get(batch, key), lambda: batches.put(batch, key, 5)):
        with pytest.raises(KeyError) as caught:
            action()
        assert all(name in str(caught.value) for name in [*names, "input_key", "target_key"])


def test_a_getter_alone_cannot_write():
    assert batches.get({"a": 1}, operator.itemgetter("a")) == 1
    with pytest.raises(TypeError, match="getter, setter"):
        batches.put({"a": 1}, operator.itemgetter("a"), 2)


@pytest.mark.parametrize("key", [0, -1, "x", [0, "x"], len, (len, max)])
def test_keys(key):
    batches.check_key(key, "input_key")


@pytest.mark.parametrize("key", [True, None, 1.5, (0, 1), (len,), (len, max, min), torch.ones(1)])
def test_what_is_no_key(key):
    with pytest.raises(TypeError, match="input_key="):
        batches.check_key(key, "input_key")


@pytest.mark.parametrize(
    "batch, found",
    [
        ((torch.ones(2), torch.ones(3)), r"\[2, 3\]"),
        (("no", 1), "no tensor"),
        (torch.tensor(1.0), "no tensor"),
        ({"a": torch.ones(2), "b": {"c": torch.ones(3, 1)}}, r"\[2, 3\]"),
    ],
)
def test_batches_without_a_common_leading_dimension(batch, found):
    with pytest.raises(ValueError, match=found):
        batches.num_examples(batch)


@pytest.mark.parametrize("num_parts", [0, -1, 4])
def test_splitting_into_impossible_numbers(num_parts):
    with pytest.raises(ValueError, match=f"3 examples into {num_parts}"):
        batches.split(torch.ones(3), num_parts)


@given(st.integers(1, 12), st.data())
def test_split_is_a_partition_into_nearly_equal_parts(total, data):
    num_parts = data.draw(st.integers(1, total))
    rows, scalar = torch.arange(total), torch.tensor(7)
    batch = {"rows": rows, "same": rows, "inner": [(rows.float(), "text", scalar)], "none": None}
    parts = batches.split(batch, num_parts)
    sizes = [batches.num_examples(part) for part in parts]
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    for name in ("rows", "same"):
        assert torch.equal(torch.cat([part[name] for part in parts]), rows)
    assert all(part["inner"][0][1:] == ("text", scalar) and part["none"] is None for part in parts)


def test_objects_without_tensors_are_shared_by_map_tensors():
    plain, module = SimpleNamespace(a=1), torch.nn.Linear(1, 1)
    batch = (torch.ones(2), plain, module, {"text": ["a", "b"]})
    after = batches.map_tensors(lambda leaf: leaf * 2, batch)
    assert after[0].tolist() == [2.0, 2.0] and after[1] is plain and after[2] is module
    assert batches.tensors(batch) == [batch[0]], "a module's weights are no members of a batch"
