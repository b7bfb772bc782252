"""Small algorithms that keep all laws, to put into the step with the one under test.

A law must hold whatever other algorithms are in the step, so cases add some of these.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from purecompose import random
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import on


_WATCHED = (Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)


def bystander(name: str = "bystander") -> Algorithm:
    """Return an algorithm that draws, counts and reports, and changes nothing that others read.

    Its slot has "draws", float32 (2,), drawn from `state.rng(name)` at its last event; "example_draw", 0-d float32,
    drawn from the first example's key; and "count", "sum" and "has_acted", 0-d int64, float64 and bool, which depend on
    the number of events at which it acted.
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            zeros = torch.zeros(2, dtype=torch.float32, device=state.device)
            count = torch.zeros((), dtype=torch.int64, device=state.device)
            slot = {"draws": zeros, "example_draw": zeros[0], **_counts(count)}
            return state.replace(slots={**state.slots, name: slot})
        draws = random.uniform(state.rng(name), (2,))
        slot = {
            "draws": draws,
            "example_draw": random.uniform(state.example_rng(name), (state.num_examples,))[0],
            **_counts(state.slots[name]["count"] + 1),
        }
        return state.replace(slots={**state.slots, name: slot}, metrics={**state.metrics, f"{name}/draw": draws[0]})

    return Algorithm(name, on(Event.INIT, *_WATCHED), apply)


def _counts(count: Tensor) -> dict[str, Tensor]:
    """Return a count in several dtypes that algorithms often do not handle."""
    return {"count": count, "sum": 0.1 * count.to(torch.float64), "has_acted": count > 0}


def collector(name: str = "collector") -> Algorithm:
    """Return an algorithm that adds up the gradients of all batches in its slot, and changes nothing else.

    Its slot has a tensor for each trainable parameter, of its shape and dtype.
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            sums = {key: torch.zeros_like(state.params[key]) for key in state.context.trainable}
        else:
            grads = state.grads or {}
            sums = {key: kept + grads[key] if key in grads else kept for key, kept in state.slots[name].items()}
        return state.replace(slots={**state.slots, name: sums})

    return Algorithm(name, on(Event.INIT, Event.AFTER_TRAIN_BATCH), apply)


def noise(name: str = "noise", scale: float = 0.1) -> Algorithm:
    """Return an algorithm that adds keyed noise, drawn per example, to inputs that are one floating tensor."""

    def apply(event: Event, state: State) -> State:
        del event
        inputs = state.inputs
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            return state
        draws = random.normal(state.example_rng(name), tuple(inputs.shape)).to(inputs)
        return state.replace(inputs=inputs + scale * draws)

    return Algorithm(name, on(Event.AFTER_DATALOADER), apply, config={"scale": scale})


def shrink(name: str = "shrink", factor: float = 0.99) -> Algorithm:
    """Return an algorithm that shrinks the trainable parameters after the update."""

    def apply(event: Event, state: State) -> State:
        del event
        shrunk = {key: state.params[key] * factor for key in state.context.trainable}
        return state.replace(params={**state.params, **shrunk})

    return Algorithm(name, on(Event.BATCH_END), apply, config={"factor": factor})


COMPANIONS: Mapping[str, Callable[[str], Algorithm]] = MappingProxyType(
    {"bystander": bystander, "collector": collector, "noise": noise, "shrink": shrink}
)
"""Factories of the companions by name; each factory takes the name of its algorithm."""
