"""Calls of a step within `torch.compile`, by itself and in a function of the user."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch._dynamo.utils import counters as COUNTERS

from purecompose import Event, State, Step, algorithms as alg, compose, loop_events, population, stack_states, tree
from purecompose.transforms.compilation import step as step_module
from tests.helpers import changing, loss_of, make_batch, make_batches, make_state, run_steps
from tests.transforms.compilation.compile_helpers import assert_agree, compiled, readable, scaling


pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # while Inductor is imported


@pytest.fixture(autouse=True)
def _without_cached_code() -> Iterator[None]:
    torch.compiler.reset()
    COUNTERS.clear()
    yield
    torch.compiler.reset()


class Graphs(list[Any]):
    """A backend of `torch.compile` that keeps the graphs it is given."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.append(graph)
        return graph.forward


def changing_step() -> Step:
    """Return a step with two schedules."""
    return compose(loop_events, [alg.mixup(0.2), scaling("late", Event.BATCH_START, 0.5, period=3)])


def num_frames() -> int:
    """Return how many functions Dynamo has compiled."""
    return COUNTERS["frames"]["ok"]


@pytest.mark.slow
def test_a_step_is_one_graph_for_each_schedule_and_size() -> None:
    graphs, step = Graphs(), changing_step()
    by_torch, by_us = torch.compile(step, backend=graphs), compiled(step, donate=False)
    state = other = step.init(make_state(duration="12ba"))
    for batch in [*make_batches(6), *make_batches(6, size=6)]:
        state, other = by_torch(state, batch), by_us(other, batch)
        assert tree.equal(readable(state), readable(other))
    assert len(graphs) == len(by_us.variants()) == 4


def test_dynamo_compiles_nothing_again_for_other_times_and_other_steps() -> None:
    state, batch = make_state(duration="99ba"), make_batch()
    for _ in range(10):  # more than Dynamo compiles a function
        step = torch.compile(compose(loop_events), backend="eager")
        for _ in range(3):
            state = step(state, batch)
    assert state.timestamp.batch == 30
    assert num_frames() == 1


def test_a_step_in_a_function_of_the_user() -> None:
    step = changing_step()
    by_us = compiled(step, donate=False)

    @torch.compile(backend="eager")
    def two_steps(state: State, batch: Any) -> Any:
        first = step(state, batch)
        second = step(first, (batch[0] * 2, batch[1]))
        return second, 2 * loss_of(second), second.params["0.weight"].sum()

    state = other = step.init(make_state(duration="99ba"))
    frames = []
    for batch in make_batches(6):
        state, loss, total = two_steps(state, batch)
        other = by_us(by_us(other, batch), (batch[0] * 2, batch[1]))
        assert tree.equal(readable(state), readable(other))
        assert loss == 2 * loss_of(other) and total == other.params["0.weight"].sum()
        frames.append(num_frames())
    assert frames[2] == frames[-1], "compiled again in every call"


def test_the_state_is_not_spent() -> None:
    step, batch = torch.compile(compose(loop_events), backend="eager"), make_batch()
    state = step(make_state(), batch)
    assert_agree(step(state, batch), step(state, batch), tolerance=0.0)


def test_fullgraph_is_an_error_that_names_the_reason() -> None:
    step = torch.compile(compose(loop_events), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="which algorithms act.*pc.compile"):
        step(make_state(), make_batch())


@pytest.mark.parametrize("stance", ["force_eager", "eager_then_compile"])
def test_stances(stance: Literal["force_eager", "eager_then_compile"]) -> None:
    step = compose(loop_events)
    state = other = make_state()
    with torch.compiler.set_stance(stance):
        for batch in make_batches(3):
            state, other = torch.compile(step, backend="eager")(state, batch), step(other, batch)
    assert_agree(other, state)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"backend": "inductor", "dynamic": False}),
        ({"mode": "max-autotune-no-cudagraphs"}, {"mode": "max-autotune-no-cudagraphs"}),
        ({"mode": "default"}, {"backend": "inductor"}),
        ({"backend": "eager", "dynamic": True}, {"backend": "eager", "dynamic": True}),
    ],
)
def test_arguments_of_torch_compile(given: dict[str, Any], expected: dict[str, Any], monkeypatch: Any) -> None:
    passed: list[dict[str, Any]] = []

    def compile(step: Step, **options: Any) -> Step:
        passed.append(options)
        return compiled(step)

    monkeypatch.setattr(step_module, "compile", compile)
    torch.compile(compose(loop_events), **given)(make_state(), make_batch())
    assert passed[0] == {"donate": False, "fallback": True, "quiet": True, "dynamic": False, **passed[0], **expected}


def test_options_without_effect_are_reported(monkeypatch: Any) -> None:
    monkeypatch.setattr(step_module, "compile", lambda step, **options: compiled(step))
    step = torch.compile(compose(loop_events), options={"max_autotune": True})
    with pytest.warns(UserWarning, match=r"options=.*no effect"):
        state = step(make_state(), make_batch())
    step(state, make_batch())  # no second warning


def test_a_step_that_cannot_be_traced_runs_as_composed_after_one_warning() -> None:
    def by_number(state: State) -> State:
        assert state.grads is not None and state.loss is not None
        return state.replace(grads={n: g * 0.5 for n, g in state.grads.items()}) if state.loss > 0 else state

    step = compose(loop_events, [changing("by_number", Event.AFTER_TRAIN_BATCH, by_number)])
    by_torch, state = torch.compile(step, backend="eager"), make_state()
    with pytest.warns(UserWarning, match="by_number"):
        after = by_torch(state, make_batch())
    assert_agree(step(state, make_batch()), after, tolerance=0.0)
    by_torch(after, make_batch())


def test_a_compiled_step_within_torch_compile_runs_as_it_does_outside() -> None:
    step = compiled(compose(loop_events))
    state = run_steps(torch.compile(step, backend="eager"), make_state(), make_batches(3))
    assert [variant.hits for variant in step.variants()] == [3]
    assert_agree(run_steps(step.step, make_state(), make_batches(3)), state)


def test_a_population_within_torch_compile() -> None:
    step, state = population(compose(loop_events), 3), stack_states([make_state(key=i) for i in range(3)])
    after = torch.compile(step, backend="eager")(state, make_batch())
    assert_agree(step(state, make_batch()), after)
