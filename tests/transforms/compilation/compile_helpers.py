"""Helpers for the tests of compiled steps: traced graphs left uncompiled, comparisons with eager runs, algorithms."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import purecompose as pc
from purecompose import Algorithm, Event, State, Step, compose, every, loop_events, on, tree
from purecompose.transforms.compilation import CompiledStep
from tests.helpers import changing


# The package's attribute of this name is the function.
LIBRARY = sys.modules["purecompose.transforms.compilation.building"]


def compiled(step: Step, **options: Any) -> CompiledStep:
    """Return the step as traced graphs that are not compiled further: fast to build, and exact."""
    return pc.compile(step, **{"backend": "eager", "quiet": True, **options})


def made(algorithms: Sequence[Algorithm] = (), *, microbatches: int = 1, **options: Any) -> tuple[Step, CompiledStep]:
    """Return a step of the usual loop, composed and compiled."""
    step = compose(loop_events, algorithms, microbatches=microbatches)
    return step, compiled(step, **options)


def readable(state: State) -> State:
    """Return the state after reading all its leased fields."""
    return state if state.lease is None else state.unleased()


# Steps with and without donation only differ in the last copy, so only one of the two is among the quick tests.
DONATE = pytest.mark.parametrize("donate", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["donate", "keep"])


def assert_agree(eager: Any, other: Any, tolerance: tree.ToleranceLike = 1e-5) -> None:
    """Assert that both agree leaf by leaf, up to a fraction of the leaf's largest magnitude."""
    first, second = (readable(tree_) if isinstance(tree_, State) else tree_ for tree_ in (eager, other))
    found = list(map(str, tree.differences(first, second, tolerance=tolerance)))
    assert not found, "\n".join(found[:5])


def assert_runs_agree(
    step: Step, other: Callable[[State, Any], State], state: State, batches: Sequence[Any], tolerance: float = 1e-5
) -> State:
    """Assert that both agree after every batch and keep the first state; return the last state of the compiled run."""
    before = state.copy()
    eager, fast = state, state
    for number, batch in enumerate(batches):
        eager, fast = step(eager, batch), other(fast, batch)
        for what in ("loss", "metrics", "key"):
            found = list(tree.differences(getattr(eager, what), getattr(fast, what), tolerance=tolerance))
            assert not found, f"after batch {number}: {what}: {found[0]}"
    assert eager.timestamp == fast.timestamp
    assert eager.context == fast.context
    assert_agree(eager, fast, tolerance)
    assert tree.equal(before, state), "the first state has changed"
    return fast


def flipped_choice(step: Step, state: State, batch: Any) -> str | None:
    """Return the algorithm, with its event, whose choice changes if the weights only differ by rounding."""

    def applications(start: State) -> list[tuple[str, State]]:
        found: list[tuple[str, State]] = []
        step.fold(start, batch, lambda a, event, _, after, code: found.append((f"{a.name} at {event}", after)))
        return found

    usual = applications(state)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        moved = {k: p * (1 + 1e-6 * torch.randn(p.shape, generator=generator)) for k, p in state.params.items()}
        for (name, one), (_, other) in zip(usual, applications(state.replace(params=moved)), strict=True):
            if list(tree.differences(one.batch, other.batch, tolerance=1e-4)):
                return name
    return None


def spent_text(state: State) -> str:
    """Return the error message of reading a spent state's parameters; fail if they can be read."""
    try:
        _ = state.params
    except pc.errors.SpentStateError as error:
        return str(error)
    raise AssertionError("the state can still be read")


# Algorithms


def sharpness(name: str = "sam", radius: float = 0.05, **options: Any) -> Algorithm:
    """Return an algorithm that uses the gradient at the worst nearby point: a second gradient after the first."""

    def climb(state: State) -> State:
        assert state.grads is not None and state.loss is not None
        norm = tree.global_norm(state.grads)
        there = {k: p + radius * state.grads[k] / norm if k in state.grads else p for k, p in state.params.items()}
        grads, loss = state.gradient(there)
        return state.replace(grads=grads, metrics={**state.metrics, "sharpness": loss - state.loss})

    return changing(name, Event.AFTER_TRAIN_BATCH, climb, **options)


def average(name: str = "ema", *, when: Any = None) -> Algorithm:
    """Return an average of the weights that at INIT consists of the weights' own tensors."""

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return state.replace(slots={**state.slots, name: dict(state.params)})
        new = {key: torch.lerp(old, state.params[key], 0.1) for key, old in state.slots[name].items()}
        return state.replace(slots={**state.slots, name: new})

    ends = on(Event.BATCH_END)
    return Algorithm(name, on(Event.INIT) | (ends if when is None else ends & when), apply)


def swap(name: str = "swap") -> Algorithm:
    """Return an algorithm that swaps two tensors of its slot in every step and reports both and a weight as metrics."""

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return state.replace(slots={**state.slots, name: {"a": torch.ones(3), "b": torch.zeros(3)}})
        slot = state.slots[name]
        shown = {"a": slot["a"], "view": slot["b"][1:], "weight": next(iter(state.params.values()))}
        return state.replace(
            slots={**state.slots, name: {"a": slot["b"], "b": slot["a"]}}, metrics={**state.metrics, **shown}
        )

    return Algorithm(name, on(Event.INIT, Event.BATCH_END), apply)


def scaling(name: str, event: Event, factor: float, period: int | None = None, **options: Any) -> Algorithm:
    """Return an algorithm that scales the inputs at an event before the gradient, the parameters at one after it."""

    def apply(state: State) -> State:
        if event in (Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD):
            return state.replace(inputs=state.inputs * factor)
        return state.replace(params={key: param * factor for key, param in state.params.items()})

    return changing(name, event, apply, when=None if period is None else every(period), **options)


def host_log(log: list[Any], event: Event, read: Callable[[State], Any], name: str = "log") -> Algorithm:
    """Return a host algorithm that appends the values it reads to a list."""

    def apply(state: State) -> State:
        log.append(read(state))
        return state

    return changing(name, event, apply, host=True)


def cloned(value: Any) -> Any:
    """Return a deep copy of the tensors, to compare with later."""
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def breaking(monkeypatch: Any, errors: list[BaseException | None]) -> None:
    """Make calls of compiled graphs raise these errors in turn, before they do anything; `None` lets a call pass."""
    original = LIBRARY.compile_graph

    def compile_graph(*args: Any) -> Callable[[list[Tensor]], Any]:
        call = original(*args)

        def run(tensors: list[Tensor]) -> Any:
            error = errors.pop(0) if errors else None
            if error is not None:
                raise error
            return call(tensors)

        return run

    monkeypatch.setattr(LIBRARY, "compile_graph", compile_graph)


def kept_graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Return a list to which the graphs of the steps that are compiled from now on are added."""
    seen: list[fx.GraphModule] = []
    original = LIBRARY.compile_graph

    def compile_and_keep(graph: fx.GraphModule, *options: Any) -> Any:
        seen.append(graph)
        return original(graph, *options)

    monkeypatch.setattr(LIBRARY, "compile_graph", compile_and_keep)
    return seen


def count(graph: fx.GraphModule, name: str) -> int:
    """Return how often a graph calls an operation of the package."""
    return len(graph.graph.find_nodes(op="call_function", target=getattr(torch.ops.purecompose, name).default))
