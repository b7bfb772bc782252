"""Signatures: everything about a value except its numbers."""

import dataclasses
from typing import Any

import torch
from hypothesis import given, strategies as st

from purecompose import tree
from purecompose.testing import strategies
from purecompose.transforms.signature import Signature


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


def test_signatures_are_alike_if_they_only_differ_in_strides() -> None:
    assert signature(ONE).is_alike(signature(DIFFERENT["strides"]))
    for name in ("shape", "dtype", "meta", "tuple", "dict"):
        assert not signature(ONE).is_alike(signature(DIFFERENT[name])), name


@given(batch=st.builds(lambda task, seed: task.make_batch(seed, 3), strategies.tasks(), st.integers(0, 9)))
def test_any_batch_is_rebuilt(batch: Any) -> None:
    one, tensors = Signature.of(batch)
    assert tree.equal(one.build(tensors), batch)
