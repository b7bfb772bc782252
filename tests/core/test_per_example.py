"""Values of each example, which several processes compute together."""

from typing import Any

import pytest
import torch

from purecompose import Event, State, algorithms as alg, compose, loop_events, tree
from purecompose.testing.process import played
from tests.helpers import changing, make_batch, make_mlp, make_state


def values(state: State) -> dict[str, Any]:
    outputs = state.forward(state.inputs, train=True, name="pass")
    return {"outputs": outputs, "right": outputs.argmax(1) == state.targets, "number": state.targets.short()}


def with_values(event: Event, passes: list[int]) -> Any:
    """Return an algorithm that writes values of each example into the metrics, and notes how many it computes."""

    def noted(part: State) -> dict[str, Any]:
        passes.append(part.num_examples)
        return values(part)

    return changing("values", event, lambda state: state.replace(metrics=state.per_example(noted)))


@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.AFTER_TRAIN_BATCH])
@pytest.mark.parametrize(("num", "size", "parts"), [(8, 2, [4, 4]), (7, 3, [3, 2, 2]), (2, 3, [1, 1, 1])])
def test_processes_compute_a_part_each_and_have_all(event, num, size, parts):
    state, batch = make_state(make_mlp(dropout=0.5)), make_batch(size=num)
    whole = compose(loop_events, [with_values(event, [])])(state, batch).metrics
    passes: list[int] = []
    ends = played(compose(loop_events, [with_values(event, passes)]), size)(lambda step: step(state, batch))
    assert set(passes) == set(parts)
    for end in ends:
        torch.testing.assert_close(end.metrics, whole, rtol=1e-6, atol=1e-6)


def test_what_is_computed_for_a_part_is_not_divided_again():
    passes: list[int] = []
    step = compose(loop_events, [with_values(Event.AFTER_FORWARD, passes), alg.sam(0.1)])
    played(step, 2)(lambda one: one(make_state(), make_batch(size=8)))
    assert set(passes) == {4}


def test_in_one_process_it_is_the_function_without_a_gradient():
    state = make_state().replace(batch=make_batch())
    found = state.per_example(values)
    assert not found["outputs"].requires_grad
    assert tree.equal(found, values(state))


@pytest.mark.parametrize("wrong", [lambda state: state.inputs.sum(), lambda state: state.inputs[1:], lambda state: 3])
def test_values_without_a_row_for_each_example_are_refused(wrong):
    state = make_state().replace(batch=make_batch())
    with pytest.raises(ValueError, match="one row for each of 8 examples"):
        state.per_example(wrong)
