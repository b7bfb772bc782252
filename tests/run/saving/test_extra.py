"""What a run keeps outside the state returns from a checkpoint as it was."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from purecompose import Checkpoints
from purecompose.errors import DamagedError, MismatchError
from purecompose.run.saving.checkpoint import outside_of, snapshot
from purecompose.run.saving.files import _plain, _restored
from purecompose.run.saving.folder import read_index
from purecompose.run.saving.leaves import pack, restore, unpack
from tests.helpers import assert_same, make_state


TREES: list[Any] = [
    {},
    {"float": "nan", "a": -0.0},
    {"float": float("nan")},
    {"!tensor": 1, "list": [True, None, "text", 2**70]},
    {0: "zero", ("a", 1): [()], "mixed": (1, (2.5, float("-inf")))},
    {"bytes": b"\x00\xff", "random": np.random.RandomState(3).get_state()},
    [torch.arange(3), torch.ones(2, 3).t(), torch.zeros((), dtype=torch.complex64), torch.empty(0)],
    [np.arange(6.0).reshape(2, 3)[:, ::-1], np.zeros((), dtype=bool), np.array([1, 2], dtype=np.uint16)],
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_values_return_from_json_as_they_were(tree: Any) -> None:
    packed, tensors = pack(tree, "extra")
    again = unpack(_restored(json.loads(json.dumps(_plain(packed), allow_nan=False))), tensors)
    assert repr(again) == repr(tree)
    assert_same(again, tree)


class Holding:
    """An object that holds one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def test_one_object_or_several_are_restored() -> None:
    net, held = torch.nn.Linear(2, 1), Holding((np.zeros(2), [1, {"games": torch.zeros(1)}]))
    weight, value = net.weight.detach().clone(), held.value
    packed, tensors = pack({"net": net, "held": held}, "extra")
    with torch.no_grad():
        net.weight.zero_()
    held.value = None
    restore({"net": net, "held": held}, unpack(packed, tensors))
    assert_same((net.weight.detach(), held.value), (weight, value))
    restore(held, 3)
    assert held.value == 3
    with pytest.raises(MismatchError, match="extra: 'net', 'held' in the checkpoint, 'held' here"):
        restore({"held": held}, unpack(packed, tensors))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"env": object()}, "expected an object with state_dict and load_state_dict, or a dict .* got <object"),
        (Holding(np.array(["a"])), r"extra.state_dict\(\) has the dtype <U1"),
        (3, r"got 3 \(int\)"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_the_run(extra: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Checkpoints("folder", extra=extra)


@pytest.mark.parametrize("forged", [{"!tensor": "extra/1"}, {"!tensor": "loss"}, {"!bytes": 1}, {"!tuple": 0}])
def test_a_forged_description_is_refused(tmp_path: pathlib.Path, forged: Any) -> None:
    snapshot(make_state(), outside={"extra": [torch.zeros(2)]}).write(tmp_path / "checkpoint")
    index = read_index(tmp_path / "checkpoint")
    index.memory["extra"] = forged
    with pytest.raises(DamagedError, match="does not describe what the run keeps outside the state"):
        outside_of(tmp_path / "checkpoint", index)
