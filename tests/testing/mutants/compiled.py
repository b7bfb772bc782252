"""Mutants of the law of compiled steps: values that Python reads or keeps while tracing become constants."""

import torch
from torch import Tensor

from purecompose.core.state import State
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_grads, scaled_params


@mutant("compiled_agrees", at=Event.AFTER_TRAIN_BATCH)
def fades_by_a_number(state: State) -> State:
    """Fades out by `float(state.clock.elapsed)`, a number that the clock only has in eager runs."""
    assert state.clock is not None
    return scaled_grads(state, 1 - 0.5 * float(state.clock.elapsed))


@mutant("compiled_agrees", at=Event.BATCH_END, task="soft")
def number_or_default(state: State) -> State:
    """Reads the time as a number, and uses a default where that raises: compiled, it is a different method."""
    assert state.clock is not None
    try:
        elapsed = float(state.clock.elapsed)
    except RuntimeError:
        elapsed = 0.0
    return scaled_params(state, 1 - 0.1 * elapsed)


_FACTORS = (0.1, 0.5, 1.0)


@mutant("compiled_agrees", at=Event.BEFORE_TRAIN_BATCH)
def looks_up_by_batch(state: State) -> State:
    """Looks up a factor for the inputs in a tuple, with the batch's number as a Python index."""
    assert state.clock is not None
    factor = _FACTORS[min(int(state.clock.batch), len(_FACTORS) - 1)]
    return state.replace(inputs=factor * state.inputs)


@mutant("compiled_agrees", at=Event.AFTER_DATALOADER, task="images")
def weights_in_a_cache():
    """Caches weights of the examples for each size of batch: while tracing, these are tensors of the trace."""
    cache: dict[int, Tensor] = {}

    def change(state: State) -> State:
        inputs: Tensor = state.inputs
        num = len(inputs)
        if num not in cache:
            cache[num] = torch.linspace(0.5, 1, num).reshape(-1, *[1] * (inputs.ndim - 1))
        return state.replace(inputs=inputs * cache[num].to(inputs))

    return change


_INPUTS: list[Tensor] = []


@mutant("compiled_agrees", at=(Event.AFTER_DATALOADER, Event.AFTER_TRAIN_BATCH))
def inputs_in_a_global(event: Event, state: State) -> State:
    """Passes the inputs from one event to the next in a module's global, outside the state, into another graph."""
    if event is Event.AFTER_DATALOADER:
        _INPUTS[:] = [state.inputs]
        return state
    return scaled_grads(state, 1 / (1 + _INPUTS[0].abs().mean()))


@mutant("compiled_agrees", at=(Event.AFTER_TRAIN_BATCH, Event.BATCH_END))
def told_by_identity(event: Event, state: State) -> State:
    """Tests with `is` whether the loss is the tensor that it reported, which need not be true across parts."""
    if event is Event.AFTER_TRAIN_BATCH:
        return state.replace(metrics={**state.metrics, "told_by_identity": state.loss})
    return scaled_params(state, 0.99 if state.metrics["told_by_identity"] is state.loss else 0.9)
