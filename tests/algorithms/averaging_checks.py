"""Helpers for the tests of methods that average weights: runs of a network with BatchNorm, and shared checks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import purecompose as pc
from purecompose import Algorithm, Evaluator, State, compose, loop_events
from purecompose.surgery.weights import averages_in
from tests.helpers import assert_close, assert_same, make_batches, make_cnn, make_state


BATCHES = make_batches(12, shape=(2, 6, 6))
"""Batches of three epochs of four."""


def cnn_state(**options: Any) -> State:
    """Return the state of a network with BatchNorm, in a run over the batches."""
    return make_state(make_cnn(), **{"duration": "3ep", "batches_per_epoch": 4, "key": 3, **options})


def states_after(algorithms: Algorithm | Sequence[Algorithm], state: State, batches: Sequence[Any]) -> list[State]:
    """Return the states after INIT and after each batch."""
    step = compose(loop_events, [algorithms] if isinstance(algorithms, Algorithm) else algorithms)
    states = [step.init(state)]
    for batch in batches:
        states.append(step(states[-1], batch))
    return states


def weights_of(state: State) -> dict[str, Tensor]:
    """Return trainable parameters and floating buffers, in float64."""
    floating = {name: buffer for name, buffer in state.buffers.items() if buffer.is_floating_point()}
    trained = {name: state.params[name] for name in state.context.trainable}
    return {name: tensor.double() for name, tensor in (*trained.items(), *floating.items())}


def averages_of(state: State, name: str) -> dict[str, Tensor]:
    """Return the averages of a method, in float64."""
    found = averages_in(state, name)
    return {key: tensor.double() for key, tensor in (*found.params.items(), *found.buffers.items())}


def check_evaluation_sees_averages(method: Algorithm) -> None:
    """Check that only `evaluate`, `predict` and fit's evaluators see averages, and that training does not change."""
    step, data = compose(loop_events, [method]), BATCHES[:2]
    state = states_after(method, cnn_state(), BATCHES)[-1]
    before = state.copy()
    averaged = pc.surgery.with_weights(state, method.name)
    expected = pc.evaluate(averaged, data)
    assert pc.evaluate(state, data, step=step) == expected != pc.evaluate(state, data)
    assert_same(pc.predict(state, data, step=step), pc.predict(averaged, data))
    net = pc.to_module(state, weights=method.name).eval()
    with torch.no_grad():
        assert_same(pc.predict(state, data, step=step), [net(inputs) for inputs, _ in data])
    assert_same(state, before)

    seen: dict[int, float] = {}

    def observe(event: pc.Event, state: State) -> None:
        if event is pc.Event.EVAL_END:
            seen[state.timestamp.batch] = state.metrics["eval/loss"].item()

    end = pc.fit(step, cnn_state(), BATCHES[:4], evaluate=Evaluator(data, every="2ba"), observers=observe)
    states = states_after(method, cnn_state(), BATCHES[:4] * 3)
    assert seen == {at: pc.evaluate(states[at], data, step=step)["loss"] for at in (2, 4, 6, 8, 10, 12)}
    assert_same(end.replace(metrics={}), states[-1].replace(metrics={}))


def check_init(method: Algorithm, surgery: Callable[[], Algorithm], state: State) -> None:
    """Check that with surgery, in either order, the new network is averaged, and that a second INIT has no effect."""
    for algorithms in ([method, surgery()], [surgery(), method]):
        step = compose(loop_events, algorithms)
        begun = step.init(state)
        assert begun.params.keys() != state.params.keys()
        assert averages_in(begun, method.name).params.keys() == set(begun.context.trainable)
        assert_same(step.init(begun), begun)
        step(begun, BATCHES[0])


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that float32 results equal float64 formulas."""
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
