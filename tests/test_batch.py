"""Batches of every shape: members are read, replaced and split, and nothing is edited in place."""

import operator
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

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
    """A dataclass that refuses fields that are not tensors, and computes one of its fields."""

    x: Tensor
    y: Tensor
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tensor):
            raise TypeError("x must be a tensor")
        self.total = self.x + self.y


class ModelOutputLike(OrderedDict):
    """Like the outputs of Hugging Face models: entries are also attributes, and there is no `update`."""

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
kinds = pytest.mark.parametrize("make, input_field, target_field", KINDS.values(), ids=list(KINDS))


@kinds
def test_members_are_read_and_replaced_without_editing(make, input_field, target_field):
    x, y, new = torch.arange(6.0).reshape(3, 2), torch.ones(3, 2), torch.zeros(3, 2)
    batch = make(x, y)
    assert batches.get(batch, input_field) is x and batches.get(batch, target_field) is y
    after = batches.put(batch, input_field, new)
    assert type(after) is type(batch)
    assert batches.get(after, input_field) is new and batches.get(after, target_field) is y
    assert batches.get(batch, input_field) is x, "the old batch was edited"
    after = batches.put(batch, target_field, new)
    assert batches.get(after, target_field) is new and batches.get(after, input_field) is x


@kinds
def test_examples_are_counted_and_split(make, input_field, target_field):
    x, y = torch.arange(10.0).reshape(5, 2), torch.ones(5, 2)
    batch = make(x, y)
    assert batches.num_examples(batch) == 5
    assert [leaf is x or leaf is y for leaf in batches.tensors(batch)][:2] == [True, True]
    parts = batches.split(batch, 3)
    assert all(type(part) is type(batch) for part in parts)
    assert [batches.num_examples(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([batches.get(part, input_field) for part in parts]), x)
    assert torch.equal(torch.cat([batches.get(part, target_field) for part in parts]), y)
    assert batches.get(batch, input_field) is x


def test_a_list_of_keys_names_several_members():
    batch = {"a": 1, "b": 2, "c": 3}
    assert batches.get(batch, ["c", "a"]) == [3, 1]
    assert batches.put(batch, ["c", "a"], [30, 10]) == {"a": 10, "b": 2, "c": 30}
    with pytest.raises(ValueError):
        batches.put(batch, ["c", "a"], [1])


def test_the_whole_batch_is_a_member():
    batch = {"a": 1}
    assert batches.get(batch, batches.WHOLE) is batch
    assert batches.put(batch, batches.WHOLE, (1, 2)) == (1, 2)


def test_the_rows_of_a_tensor_are_examples_and_not_members():
    rows = torch.arange(6.0).reshape(3, 2)
    assert batches.get(rows, 0) is rows
    assert batches.put(rows, 0, "other") == "other"
    for key in (1, -1, "x"):
        with pytest.raises(KeyError, match="rows are examples"):
            batches.get(rows, key)
        with pytest.raises(KeyError, match="rows are examples"):
            batches.put(rows, key, rows)


def test_other_contents_of_a_dataclass_or_mapping_are_kept():
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
def test_a_missing_member_is_an_error_that_lists_the_members(batch, key, names):
    for action in (lambda: batches.get(batch, key), lambda: batches.put(batch, key, 5)):
        with pytest.raises(KeyError) as caught:
            action()
        assert all(name in str(caught.value) for name in [*names, "input_field", "target_field"])


def test_a_getter_without_a_setter_cannot_write():
    assert batches.get({"a": 1}, operator.itemgetter("a")) == 1
    with pytest.raises(TypeError, match="getter, setter"):
        batches.put({"a": 1}, operator.itemgetter("a"), 2)


@pytest.mark.parametrize("key", [True, None, 1.5, (0, 1), (len,), (len, max, min), torch.ones(1)])
def test_arguments_that_are_not_keys_are_refused(key):
    with pytest.raises(TypeError, match="input_field="):
        batches.check_field(key, "input_field")


@pytest.mark.parametrize(
    "batch, found",
    [
        ((torch.ones(2), torch.ones(3)), r"2 \(by batch\[0\]\) or 3 \(by batch\[1\]\); name .* input_field="),
        (("no", 1), "no tensor"),
        ((np.ones((4, 2)), np.ones(4)), r"no tensor with rows in the batch \(tuple\); convert .* torch.from_numpy"),
        (torch.tensor(1.0), "no tensor"),
        ({"a": torch.ones(2), "b": {"c": torch.ones(3, 1)}}, r"2 \(by .*'a'\]\) or 3 \(by batch\['b'\]\['c'\]\)"),
    ],
)
def test_batches_without_a_common_leading_dimension(batch, found):
    with pytest.raises(ValueError, match=found):
        batches.num_examples(batch)


@pytest.mark.parametrize("num_parts", [0, -1, 4])
def test_splitting_into_impossible_numbers_is_refused(num_parts):
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


def names(num: int) -> list[str]:
    return [f"name {i}" for i in range(num)]


# The batch, and its per-example members: each has 12 examples, and none is a single tensor.
PER_EXAMPLE = {
    "list in a dict": ({"x": torch.arange(12), "id": names(12)}, lambda b: b["id"]),
    "tuple beside tensors": ((torch.arange(12), torch.ones(12), tuple(names(12))), lambda b: b[2]),
    "list of lists": ([torch.arange(12), [[i] * i for i in range(12)]], lambda b: b[1]),
    "dict of metadata": ({"x": torch.arange(12), "meta": {"id": names(12)}}, lambda b: b["meta"]["id"]),
    "list of dicts": ({"x": torch.arange(12), "meta": [{"id": i} for i in range(12)]}, lambda b: b["meta"]),
    "user dict": (UserDict(x=torch.arange(12), meta=UserDict(id=names(12))), lambda b: b["meta"]["id"]),
    "dataclass": (Data(torch.arange(12), Data(names(12), None)), lambda b: b.y.x),
    "object": (SimpleNamespace(x=torch.arange(12), id=names(12)), lambda b: b.id),
    "list of texts": (names(12), lambda b: b),
}
per_example = pytest.mark.parametrize("batch, member", PER_EXAMPLE.values(), ids=list(PER_EXAMPLE))


@per_example
def test_lists_with_an_entry_for_each_example_are_cut(batch, member):
    whole = member(batch)
    parts = [member(part) for part in batches.split(batch, 3)]
    assert parts == [whole[0:4], whole[4:8], whole[8:12]]
    assert [len(member(part)) for part in batches.split(batch, 5)] == [3, 3, 2, 2, 2]
    assert member(batch) is whole and len(whole) == 12


@per_example
def test_lists_with_an_entry_for_each_example_are_chosen_from(batch, member):
    whole, indices = member(batch), torch.tensor([7, 0, 7])
    taken = member(batches.take(batch, indices))
    assert taken == type(whole)([whole[7], whole[0], whole[7]])
    assert member(batch) is whole and len(whole) == 12


def test_members_shared_by_all_examples_are_in_each_part():
    common = {"text": "abcd", "number": 4, "size": [32, 32], "none": None, "pair": Named(1, 2), "settings": Data(1, 2)}
    batch = {"x": torch.arange(4), **common}
    for part in [*batches.split(batch, 2), batches.take(batch, torch.tensor([1]))]:
        assert {name: part[name] for name in common} == common
        assert part["settings"] is common["settings"]
    batch = {"x": torch.arange(2), "pair": Named(1, 2)}
    assert batches.split(batch, 2)[0]["pair"] == Named(1, 2), "a named tuple is not a list of examples"


@kinds
def test_take_picks_rows_in_order(make, input_field, target_field):
    x, y = torch.arange(10.0).reshape(5, 2), torch.ones(5, 2)
    taken = batches.take(make(x, y), torch.tensor([3, 0, 3]))
    assert batches.get(taken, input_field).tolist() == [[6, 7], [0, 1], [6, 7]]
    assert batches.get(taken, target_field).shape == (3, 2)


def test_take_of_lists_says_why_it_does_not_map():
    batch, indices = {"x": torch.arange(3), "id": names(3)}, torch.tensor([[0, 1], [2, 2]])
    rows = torch.func.vmap(lambda i: batches.take(batch["x"], i))(indices)
    assert rows.tolist() == [[0, 1], [2, 2]]
    with pytest.raises(TypeError, match="list with a row for each example.*not under vmap"):
        torch.func.vmap(lambda i: batches.take(batch, i)["x"])(indices)


UNEQUAL = {
    "weights of the classes": ({"x": torch.ones(8, 2), "y": torch.ones(8), "weights": torch.ones(3)}, "x"),
    "before the input": ({"weights": torch.ones(3), "x": torch.ones(8, 2)}, "x"),
    "several inputs": ({"weights": torch.ones(3), "x": torch.ones(8, 2), "z": torch.ones(8)}, ["x", "z"]),
    "a getter": (({"weights": torch.ones(3)}, {"x": torch.ones(8, 2)}), lambda b: b[1]),
}


@pytest.mark.parametrize("batch, key", UNEQUAL.values(), ids=list(UNEQUAL))
def test_if_lengths_disagree_the_input_decides_and_other_members_are_not_cut(batch, key):
    with pytest.raises(ValueError, match="cannot tell how many examples.*input_field="):
        batches.num_examples(batch)
    assert batches.num_examples(batch, key) == 8
    sizes = {id(leaf): len(leaf) for leaf in batches.tensors(batch)}
    taken = batches.take(batch, torch.tensor([1, 2, 4]), 8)
    for num, parts in ((4, batches.split(batch, 2, 8)), (3, [taken])):
        for part in parts:
            pairs = zip(batches.tensors(batch), batches.tensors(part), strict=True)
            assert all(len(new) == num if sizes[id(old)] == 8 else new is old for old, new in pairs)


def test_a_key_does_not_help_if_the_input_has_no_leading_dimension():
    batch = {"x": torch.tensor(1.0), "y": torch.ones(2), "z": torch.ones(3)}
    with pytest.raises(ValueError, match=r"2 \(by .*\) or 3 \(by"):
        batches.num_examples(batch, "x")
    with pytest.raises(KeyError, match="no member 'image'"):
        batches.num_examples(batch, "image")
    assert batches.num_examples({"x": torch.ones(2), "y": torch.ones(2, 1)}, "x") == 2


def test_sizes_may_be_symbols():
    def run(x, y):
        return x * batches.num_examples({"x": x, "y": y, "z": y})

    graph = make_fx(run, tracing_mode="symbolic")(torch.ones(5), torch.ones(5, 2))
    assert graph(torch.ones(7), torch.ones(7, 2)).tolist() == [7.0] * 7
