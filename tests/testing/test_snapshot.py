"""A state as bytes and back."""

import dataclasses
import io

import pytest
import torch
from hypothesis import given, settings

from purecompose import tree
from purecompose.algorithms import FACTORIES
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.snapshot import SnapshotError, from_bytes, to_bytes
from purecompose.testing.strategies import cases


def after_steps(case: Case) -> State:
    step = case.step(FACTORIES["label_smoothing"](0.1))
    state = step.init(case.state())
    for batch in case.batches():
        state = step(state, batch)
    return state


def template(case: Case) -> State:
    step = case.step(FACTORIES["label_smoothing"](0.1))
    return step.init(dataclasses.replace(case, seed=case.seed + 1, start=0).state())


@given(cases())
@settings(max_examples=10)
def test_a_snapshot_restores_a_state_with_other_values(case: Case) -> None:
    state = after_steps(case)
    loaded = from_bytes(to_bytes(state), like=template(case))
    assert tree.equal(loaded, state)
    assert loaded.timestamp == state.timestamp
    assert loaded.context == state.context


def test_the_frozen_names_are_restored() -> None:
    state = Case().state().replace(frozen=frozenset({"0.weight"}))
    loaded = from_bytes(to_bytes(state), like=Case().state())
    assert loaded.context.trainable == state.context.trainable == ("0.bias", "3.weight", "3.bias")


def test_the_run_keeps_the_templates_length() -> None:
    state = Case(epochs=4, start=3).state()
    loaded = from_bytes(to_bytes(state), like=Case(epochs=9).state())
    assert loaded.timestamp.run.total_batches == 18
    assert (loaded.timestamp.batch, loaded.timestamp.epoch, loaded.timestamp.batch_in_epoch) == (3, 1, 1)


def test_memory_formats_are_kept() -> None:
    state = Case().state()
    slot = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    state = state.replace(slots={"a": slot, "b": torch.ones(1).expand(4)})
    loaded = from_bytes(to_bytes(state), like=state)
    assert loaded.slots["a"].stride() == slot.stride()
    assert tree.equal(loaded.slots, state.slots)


def with_slot(**slot: object) -> State:
    return Case().state().replace(slots={"method": slot})


@pytest.mark.parametrize(
    ("saved", "like", "complaint"),
    [
        (
            with_slot(a=torch.zeros(2)),
            with_slot(a=torch.zeros(3)),
            r"float32\[2\] in the checkpoint, float32\[3\] here",
        ),
        (with_slot(a=torch.zeros(2)), with_slot(a=torch.zeros(2).double()), r"in the checkpoint, float64\[2\] here"),
        (with_slot(a=torch.zeros(2)), with_slot(a=None), r"\['a'\]: a plain value here, a tensor there"),
        (
            with_slot(),
            with_slot(a=torch.zeros(2)),
            r"slots\['method'\]\['a'\]: float32\[2\] here, not in the checkpoint",
        ),
        (with_slot(a=torch.zeros(2)), with_slot(), r"slots\['method'\]\['a'\]: in the checkpoint, not here"),
    ],
)
def test_leaves_that_do_not_fit_are_named(saved: State, like: State, complaint: str) -> None:
    with pytest.raises(SnapshotError, match=complaint):
        from_bytes(to_bytes(saved), like=like)


def test_values_other_than_tensors_and_plain_data_are_not_saved() -> None:
    with pytest.raises(SnapshotError, match=r"state.slots\['method'\]\['a'\] holds object"):
        to_bytes(with_slot(a=object()))
    with pytest.raises(SnapshotError, match="state.metrics/m holds object"):
        to_bytes(Case().state().replace(metrics={"m": object()}))


class Spy:
    """An object that a careless unpickler would execute."""

    ran = False

    def __reduce__(self) -> tuple:
        return setattr, (Spy, "ran", True)


def test_nothing_is_executed_on_loading() -> None:
    buffer = io.BytesIO()
    torch.save({"leaves": Spy()}, buffer)
    with pytest.raises(SnapshotError, match="are not a snapshot"):
        from_bytes(buffer.getvalue(), like=Case().state())
    assert not Spy.ran


def test_bytes_that_are_not_a_snapshot_are_refused() -> None:
    buffer = io.BytesIO()
    torch.save({"leaves": {}}, buffer)
    for data in (b"", b"abc", buffer.getvalue(), to_bytes(Case().state())[:-300]):
        with pytest.raises(SnapshotError, match="are not a snapshot"):
            from_bytes(data, like=Case().state())
