"""Pytree helpers: both registries agree, and differences are found to the bit."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils import _pytree as torch_pytree

from purecompose import tree


class Pair(NamedTuple):
    left: Any
    right: Any


class Box:
    """A custom node: two children, one static part."""

    def __init__(self, first: Any, second: Any, label: str) -> None:
        self.first, self.second, self.label = first, second, label


tree.register_node(
    Box,
    lambda box: (("first", "second"), (box.first, box.second), box.label),
    lambda names, children, label: Box(**dict(zip(names, children, strict=True)), label=label),
)

leaf = st.one_of(st.integers(-5, 5), st.none(), st.floats(allow_nan=False))
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("zyxab"), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner, inner, st.just("label")),
        st.dictionaries(st.sampled_from("zyx"), inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=8,
)


@given(trees)
def test_both_registries_give_the_same_leaves_in_the_same_order(value):
    ours = tree.leaves(value)
    theirs = torch_pytree.tree_leaves(value)
    assert ours == theirs
    paths = [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path(value)[0]]
    assert list(tree.leaves_with_paths(value)) == paths


@given(trees)
def test_flatten_and_unflatten_are_inverse(value):
    found, treespec = tree.flatten(value)
    again = tree.unflatten(treespec, found)
    assert tree.structure(again) == treespec == tree.structure(value)
    assert tree.equal(again, value)
    assert tree.diff(again, value) == []


def test_dictionaries_keep_their_order_and_none_is_a_leaf():
    value = {"z": 1, "a": None, "m": {"y": 2, "b": 3}}
    assert tree.leaves(value) == [1, None, 2, 3]
    assert list(tree.map(lambda leaf: leaf, value)) == ["z", "a", "m"]
    assert tree.map(lambda a, b: (a, b), {"a": None}, {"a": 1}) == {"a": (None, 1)}


def test_a_registered_node_keeps_its_static_part_and_its_paths():
    box = Box(torch.ones(2), {"a": 3}, "kept")
    doubled = tree.map(lambda leaf: leaf * 2, box)
    assert isinstance(doubled, Box) and doubled.label == "kept" and doubled.second == {"a": 6}
    assert list(tree.leaves_with_paths(box)) == [".first", ".second['a']"]
    assert tree.structure(box) != tree.structure(Box(0, {"a": 1}, "other"))
    # torch.func knows the node as well
    gradient = torch.func.grad(lambda b: (b.first**2).sum())(Box(torch.ones(2), (), "kept"))
    assert gradient.first.tolist() == [2.0, 2.0] and gradient.label == "kept"


def test_optrees_own_order_is_not_changed():
    value: Any = {"z": 1, "a": 2}
    assert optree.tree_leaves(value) == [2, 1] and tree.leaves(value) == [1, 2]


nan = float("nan")


@pytest.mark.parametrize(
    "first, second, expected",
    [
        (torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0]), True),
        (torch.tensor(nan), -torch.tensor(nan), True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2, 2).t(), torch.ones(2, 2), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj(), True),
        (torch.tensor([1 + 0j]), torch.tensor([complex(1, -0.0)]), False),
        (torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0]), True),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
        (nan, float("-nan"), True),
        (1, 1.0, False),
        (None, None, True),
        ((1, 2), [1, 2], False),
        (Pair(1, 2), (1, 2), False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": {}}, {}, False),
        ({"a": ()}, {"a": []}, False),
    ],
)
def test_equal(first, second, expected):
    assert tree.equal(first, second) is expected
    assert tree.equal(second, first) is expected
    assert bool(tree.diff({"x": first}, {"x": second})) is not expected


@dataclass
class Data:
    x: Any
    note: Any = None


class Slotted:
    """An object that compares tensors in slots, which cannot be inspected."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return (self.x,) == (other.x,)  # pyright: ignore[reportAttributeAccessIssue]


unregistered = pytest.mark.parametrize(
    "make, path",
    [
        (Data, ".x"),
        (lambda x: UserDict(x=x), "['x']"),
        (lambda x: MappingProxyType({"x": x}), "['x']"),
        (lambda x: SimpleNamespace(x=x), ".x"),
        (lambda x: Data({"deep": (UserDict(x=x),)}), ".x['deep'][0]['x']"),
    ],
)


@unregistered
def test_objects_that_hold_tensors_are_compared_member_by_member(make, path):
    first, same, other = (make(torch.tensor(values)) for values in ([1.0, nan], [1.0, nan], [2.0, nan]))
    assert tree.equal({"b": first}, {"b": same})
    assert tree.diff({"b": first}, {"b": other}) == [f"['b']{path}: 1 of 2 elements differ, first at 0: 1.0 and 2.0"]
    assert not tree.equal(first, make(None)) and not tree.equal(make(None), first)
    assert list(tree.leaves_with_paths({"b": first}, into_objects=True))[0] == f"['b']{path}"
    assert list(tree.leaves_with_paths({"b": make(1)}, into_objects=True)) == ["['b']"]


def test_other_attributes_of_such_an_object_are_compared_too():
    x = torch.ones(2)
    assert tree.diff(Data(x, "a"), Data(x, "b")) == [".note: 'a' and 'b'"]
    assert not tree.equal(UserDict(x=x), {"x": x}) and not tree.equal(Data(x), SimpleNamespace(x=x, note=None))


def test_values_that_cannot_be_compared_with_equality():
    one, two = Slotted(torch.ones(2)), Slotted(torch.ones(2))
    assert tree.equal(one, one) and not tree.equal(one, two)
    numpy = pytest.importorskip("numpy")
    array = numpy.array([1.0, nan])
    assert tree.equal([array], [array.copy()])
    assert not tree.equal(array, array + 1) and not tree.equal(array, array.astype("float32"))
    assert not tree.equal(array, array[None]) and not tree.equal(array, [1.0, nan])


def test_diff_names_the_places_and_stops_at_the_limit():
    first = {"a": torch.zeros(3), "b": torch.zeros(2), "c": 1, "e": [1]}
    second = {"a": torch.tensor([0.0, 2.0, 0.0]), "b": torch.zeros(2, dtype=torch.int64), "d": 1, "e": (1,)}
    found = tree.diff(first, second)
    assert found == [
        "['c']: only in the first",
        "['d']: only in the second",
        "['a']: 1 of 3 elements differ, first at 1: 0.0 and 2.0",
        "['b']: float32[2] and int64[2]",
        "['e'][0]: in dict > list and in dict > tuple",
    ]
    assert tree.diff(first, second, limit=2) == found[:2]


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=4), max_size=4))
def test_global_norm_is_the_norm_of_all_numbers_together(rows):
    value = {str(index): torch.tensor(row, dtype=torch.float64) for index, row in enumerate(rows)}
    expected = sum(x * x for row in rows for x in row) ** 0.5
    assert tree.global_norm([value, None, "no tensor"]).item() == pytest.approx(expected)
    assert tree.global_norm(value).ndim == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_global_norm_of_half_precision_is_summed_in_float32(dtype):
    large = torch.full((100,), 6e4, dtype=dtype)
    norm = tree.global_norm({"a": large, "b": torch.zeros(1)})
    assert norm.dtype is torch.float32 and torch.equal(norm, tree.global_norm(large.float()))


def test_a_tolerance_is_a_share_of_the_largest_magnitude():
    first, second = {"a": torch.tensor([100.0, 0.0])}, {"a": torch.tensor([100.0, 0.05])}
    assert list(tree.differences(first, second, tolerance=1e-3)) == []
    (found,) = tree.differences(first, second, tolerance=1e-4)
    assert found.what == "1 of 2 elements differ, first at 1"


def test_a_tolerance_may_have_a_floor_and_depend_on_the_dtype():
    def rounding(dtype):
        return tree.Tolerance(0.0, 1e-3) if dtype is torch.float32 else tree.Tolerance(1e-9)

    values = {"a": torch.tensor([1e-4]), "b": torch.tensor([1.0]).double(), "c": torch.tensor([1]), "d": torch.ones(1)}
    close = {"a": torch.tensor([-1e-4]), "b": values["b"] + 1e-10, "c": torch.tensor([1]), "d": torch.ones(1)}
    assert list(tree.differences(values, close, tolerance=rounding)) == []
    far = {
        "a": torch.tensor([2e-3]),
        "b": values["b"] + 1e-8,
        "c": torch.tensor([2]),
        "d": torch.tensor([float("nan")]),
    }
    found = tree.differences(values, far, tolerance=rounding)
    assert [difference.path for difference in found] == ["['a']", "['b']", "['c']", "['d']"]


def test_tensors_are_described_in_words():
    assert tree.describe(torch.zeros(2, 3)) == "float32[2, 3]"
    assert tree.describe(torch.zeros((), dtype=torch.int64, device="meta")) == "int64[] on meta"
    assert tree.describe(torch.zeros(1, device="meta"), with_device=False) == "float32[1]"
    assert tree.diff(torch.zeros(1), torch.zeros(1, device="meta")) == [": float32[1] and float32[1] on meta"]
