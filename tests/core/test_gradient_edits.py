"""Several algorithms that edit the gradients of one step: none undoes what another has done without a warning."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import purecompose as pc
from purecompose import Algorithm, Event, State, Trait, algorithms as alg, compose, loop_events, on
from tests.helpers import make_batch, make_state


Edit = Callable[[State, str, Tensor], Tensor]


def method(name: str, edit: Edit, *traits: Trait, event: Event = Event.AFTER_TRAIN_BATCH) -> Algorithm:
    def apply(event: Event, state: State) -> State:
        grads = {key: edit(state, key, grad) for key, grad in (state.grads or {}).items()}
        return state.replace(grads=grads)

    return Algorithm(name, on(event), apply, traits=frozenset(traits))


def ones(state: State, key: str, grad: Tensor) -> Tensor:
    """Return gradients that do not depend on the step's, of length 30."""
    del grad
    size = sum(param.numel() for param in state.params.values())
    return torch.full_like(state.params[key], 30 / size**0.5)


def doubled(state: State, key: str, grad: Tensor) -> Tensor:
    del state, key
    with torch.no_grad():
        return 2 * grad


def messages(algorithms: list[Algorithm], wrap: Callable[[pc.Step], pc.Step] = lambda step: step) -> list[str]:
    """Return the warnings of the first step."""
    step = wrap(compose(loop_events, algorithms, microbatches=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(step.init(make_state()), make_batch())
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("first", [True, False], ids=["listed first", "listed last"])
def test_clipping_bounds_the_gradients_of_an_own_method(first: bool) -> None:
    own, clipping = method("own", ones), alg.gradient_clipping("norm", 0.5)
    listed = [own, clipping] if first else [clipping, own]
    step = compose(loop_events, [*listed, alg.gradient_norm()])
    end = step(step.init(make_state()), make_batch())
    torch.testing.assert_close(end.metrics["gradient_norm"], torch.tensor(0.5))


@pytest.mark.parametrize("first", [True, False], ids=["listed first", "listed last"])
def test_accumulation_collects_the_gradients_of_an_own_method(first: bool) -> None:
    own, accumulation = method("own", ones), alg.gradient_accumulation(2)
    step = compose(loop_events, [own, accumulation] if first else [accumulation, own])
    start = step.init(make_state())
    middle = step(start, make_batch())
    assert not pc.tree.diff(start.params, middle.params)
    assert pc.tree.diff(middle.params, step(middle, make_batch(1)).params)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_that_are_computed_twice_are_reported(is_compiled: bool) -> None:
    own = method("own", ones, Trait.RENEWS_GRADIENTS)
    wrap = (lambda step: pc.compile(step, backend="eager")) if is_compiled else lambda step: step
    (message,) = messages([own, alg.sam(0.05)], wrap)
    assert "own at Event.AFTER_TRAIN_BATCH computes the gradients again: what sam did to them is lost" in message
    (message,) = messages([alg.sam(0.05), own], wrap)
    assert "sam at Event.AFTER_TRAIN_BATCH computes the gradients again: what own did to them is lost" in message


def test_gradients_that_are_computed_before_they_are_edited_are_not_reported() -> None:
    edits = [method("a", doubled), method("b", doubled), alg.gradient_accumulation(2), alg.skip_nonfinite()]
    assert messages([*edits, alg.sam(0.05), alg.gradient_clipping("norm", 1.0)]) == []
    renewed = method("own", ones, Trait.RENEWS_GRADIENTS)
    assert messages([method("before", doubled, event=Event.AFTER_BACKWARD), renewed]) == []


@pytest.mark.parametrize(
    "edits", [alg.gradient_clipping("norm", 1e-6), method("own", doubled)], ids=["clipping", "own"]
)
def test_edits_after_the_last_update_are_reported(edits: Algorithm) -> None:
    *before, event, update, advance, end = loop_events
    assert event is Event.AFTER_TRAIN_BATCH
    with pytest.warns(UserWarning, match=f"{edits.name} at Event.AFTER_TRAIN_BATCH changed the gradients after the"):
        compose([*before, update, event, advance, end], [edits])(make_state(), make_batch())
    assert not messages([edits])
