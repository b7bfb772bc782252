"""Signatures: everything about a value except its numbers."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose import tree
from purecompose.testing import strategies
from purecompose.testing.tasks import TASKS
from purecompose.transforms.signature import ABSENT, Signature, spec_of


@dataclasses.dataclass
class Pair:
    """A class that is not a registered pytree."""

    x: torch.Tensor
    name: str = "pair"


def signature(value: Any) -> Signature:
    return Signature.of(value)[0]


ONE = torch.arange(6.0).reshape(2, 3)
DIFFERENT = {
    "plain": ONE,
    "shape": ONE.reshape(3, 2),
    "dtype": ONE.double(),
    "strides": ONE.t().contiguous().t(),
    "meta": ONE.to("meta"),
    "tuple": (ONE,),
    "list": [ONE],
    "dict": {"a": ONE},
    "other name": {"b": ONE},
    "nested": {"a": {"a": ONE}},
    "more": {"a": ONE, "b": ONE},
    "order": {"b": ONE, "a": ONE[:1]},
    "constant": {"a": ONE, "b": 1},
    "float": {"a": ONE, "b": 1.0},
    "bool": {"a": ONE, "b": True},
    "text": {"a": ONE, "b": "1"},
    "none": {"a": ONE, "b": None},
    "object": Pair(ONE),
    "another object": Pair(ONE, "other"),
    "objects in a list": [Pair(ONE)],
    "nothing": None,
    "empty": {},
}


def test_signatures_differ_where_values_differ() -> None:
    signatures = {name: signature(value) for name, value in DIFFERENT.items()}
    for first, one in signatures.items():
        for second, other in signatures.items():
            assert (one == other) is (first == second), (first, second)
    assert len(set(signatures.values())) == len(signatures)


@pytest.mark.parametrize("value", DIFFERENT.values(), ids=DIFFERENT)
def test_signatures_ignore_numbers_and_rebuild_values_with_them(value: Any) -> None:
    one, tensors = Signature.of(value)
    other, _ = Signature.of(tree.map(lambda leaf: leaf + 1 if isinstance(leaf, torch.Tensor) else leaf, value))
    assert one == other and hash(one) == hash(other)
    assert [spec_of(tensor) for tensor in tensors] == list(one.specs)
    fresh = [torch.empty_like(tensor) for tensor in tensors]
    again, found = Signature.of(one.build(fresh))
    assert again == one and all(new is old for new, old in zip(found, fresh, strict=True))


def test_signatures_are_alike_if_they_only_differ_in_strides() -> None:
    assert signature(ONE).is_alike(signature(DIFFERENT["strides"]))
    for name in ("shape", "dtype", "meta", "tuple", "dict"):
        assert not signature(ONE).is_alike(signature(DIFFERENT[name])), name


def test_absent_is_the_signature_of_none() -> None:
    assert signature(None) == ABSENT and ABSENT.specs == () and ABSENT.build([]) is None


def test_a_spec_makes_tensors_of_its_shape_and_dtype() -> None:
    spec = spec_of(DIFFERENT["strides"])
    assert spec_of(spec.empty()) == spec


@pytest.mark.parametrize("value", [ONE.to_sparse(), [ONE, ONE.to_sparse()], {"x": Pair(ONE.to_sparse())}], ids=type)
def test_sparse_tensors_are_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match="to_dense"):
        Signature.of(value)


def test_lazy_signs_and_conjugations_are_resolved() -> None:
    z = torch.complex(ONE, ONE)
    for lazy in (z.conj(), z.conj().imag):
        found, (tensor,) = Signature.of({"z": lazy, "constant": 1})
        assert not tensor.is_neg() and not tensor.is_conj() and torch.equal(tensor, lazy)
        assert found.specs == (spec_of(tensor),)
        assert torch.equal(Signature.of((lazy,))[1][0], lazy)


@given(data=st.data())
def test_batches_of_one_kind_have_one_signature(data: st.DataObject) -> None:
    task = TASKS[data.draw(st.sampled_from(sorted(TASKS)))]
    size = data.draw(st.integers(1, 4))
    one, other = (task.make_batch(seed, size) for seed in (0, 1))
    assert signature(one) == signature(other)
    assert signature(one) != signature(task.make_batch(0, size + 1))


@given(batch=st.builds(lambda task, seed: task.make_batch(seed, 3), strategies.tasks(), st.integers(0, 9)))
def test_any_batch_is_rebuilt(batch: Any) -> None:
    one, tensors = Signature.of(batch)
    assert tree.equal(one.build(tensors), batch)
