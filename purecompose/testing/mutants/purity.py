"""Algorithms that are impure: they write into what they are given, draw or remember outside the state."""

import random as python_random
from typing import Any

import torch
from torch import Tensor

from purecompose import random
from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.state import State
from purecompose.testing.mutants.mutant import Mutant


__all__ = ["MUTANTS"]


def decays_in_place() -> Algorithm:
    """Weight decay as in an imperative loop, `param.mul_(...)`: the caller's weights shrink, too."""

    def apply(event: Event, state: State) -> State:
        del event
        for param in state.params.values():
            param.mul_(0.99)
        return state

    return Algorithm("decays_in_place", on(Event.BATCH_END), apply)


def clamps_through_data() -> Algorithm:
    """Clips weights through `param.data`, where torch counts no write, so that only the values tell."""

    def apply(event: Event, state: State) -> State:
        del event
        for param in state.params.values():
            param.data.clamp_(-0.05, 0.05)
        return state

    return Algorithm("clamps_through_data", on(Event.BATCH_END), apply)


def noise_into_batch() -> Algorithm:
    """Adds keyed noise to the inputs with `+=`: the loader's tensor is noisier in every epoch."""

    def apply(event: Event, state: State) -> State:
        del event
        inputs: Tensor = state.inputs
        inputs += 0.1 * random.normal(state.rng("noise_into_batch"), tuple(inputs.shape)).to(inputs)
        return state.replace(inputs=inputs)

    return Algorithm("noise_into_batch", on(Event.AFTER_DATALOADER), apply)


def replaces_entry() -> Algorithm:
    """Makes a new tensor, but puts it into the old state's dictionary."""

    def apply(event: Event, state: State) -> State:
        del event
        for name, param in list(state.params.items()):
            state.params[name] = param * 0.99
        return state.replace(params=state.params)

    return Algorithm("replaces_entry", on(Event.AFTER_TRAIN_BATCH), apply)


def flips_gradients_in_place() -> Algorithm:
    """Negates gradients in place: others that look at the state of before see the new ones."""

    def apply(event: Event, state: State) -> State:
        del event
        grads = state.grads or {}
        return state.replace(grads={name: grad.neg_() for name, grad in grads.items()})

    return Algorithm("flips_gradients_in_place", on(Event.AFTER_TRAIN_BATCH), apply)


def _scaled(state: State, factor: float) -> State:
    return state.replace(params={name: param * factor for name, param in state.params.items()})


def torch_noise() -> Algorithm:
    """Draws with `torch.randn`, from torch's global generator."""

    def apply(event: Event, state: State) -> State:
        del event
        inputs: Tensor = state.inputs
        return state.replace(inputs=inputs + 0.1 * torch.randn(inputs.shape))

    return Algorithm("torch_noise", on(Event.AFTER_DATALOADER), apply)


def python_coin() -> Algorithm:
    """Tosses a coin with Python's `random`."""

    def apply(event: Event, state: State) -> State:
        del event
        return _scaled(state, python_random.random())

    return Algorithm("python_coin", on(Event.BATCH_END), apply)


def numpy_mixing() -> Algorithm:
    """Takes the mixing coefficient from `numpy.random.beta`, as many a published MixUp does."""

    def apply(event: Event, state: State) -> State:
        import numpy  # the library needs it for this one mistake only

        del event
        inputs: Tensor = state.inputs
        share = float(numpy.random.beta(1.0, 1.0))
        return state.replace(inputs=(1 - share) * inputs + share * inputs.flip(0))

    return Algorithm("numpy_mixing", on(Event.AFTER_DATALOADER), apply)


def counts_in_closure() -> Algorithm:
    """Counts its calls in a closure, to warm up."""
    calls = 0

    def apply(event: Event, state: State) -> State:
        nonlocal calls
        del event
        calls += 1
        return _scaled(state, 1 - 1 / (1 + calls))

    return Algorithm("counts_in_closure", on(Event.BATCH_END), apply)


def caches_statistics() -> Algorithm:
    """Standardises inputs by a mean that the first call makes and each further one moves, kept in a closure."""
    cache: dict[str, Tensor] = {}

    def apply(event: Event, state: State) -> State:
        del event
        inputs: Tensor = state.inputs
        if "mean" not in cache:
            cache["mean"] = inputs.mean(0)
        cache["mean"] = 0.9 * cache["mean"] + 0.1 * inputs.mean()
        return state.replace(inputs=inputs - cache["mean"])

    return Algorithm("caches_statistics", on(Event.AFTER_DATALOADER), apply)


def mixes_with_last_batch() -> Algorithm:
    """Mixes each batch with the one before, which it keeps in a list."""
    last: list[Tensor] = []

    def apply(event: Event, state: State) -> State:
        del event
        inputs: Tensor = state.inputs
        partner = last[0] if last and last[0].shape == inputs.shape else inputs.roll(1)
        last[:] = [inputs]
        return state.replace(inputs=0.9 * inputs + 0.1 * partner)

    return Algorithm("mixes_with_last_batch", on(Event.AFTER_DATALOADER), apply)


_RECORD: dict[str, Any] = {"rounds": 0}


def module_global() -> Algorithm:
    """Anneals by a counter in a global of its module."""

    def apply(event: Event, state: State) -> State:
        del event
        _RECORD["rounds"] += 1
        return _scaled(state, 0.5 ** (_RECORD["rounds"] % 7))

    return Algorithm("module_global", on(Event.BATCH_END), apply)


def seeds_in_apply() -> Algorithm:
    """Calls `torch.manual_seed` to be reproducible: whoever draws after it repeats itself."""

    def apply(event: Event, state: State) -> State:
        del event
        torch.manual_seed(0)
        return _scaled(state, 0.999)

    return Algorithm("seeds_in_apply", on(Event.BATCH_END), apply)


def seeds_python_in_apply() -> Algorithm:
    """The same with Python's generator, at INIT."""

    def apply(event: Event, state: State) -> State:
        python_random.seed(0)
        return state if event is Event.INIT else _scaled(state, 0.999)

    return Algorithm("seeds_python_in_apply", on(Event.INIT, Event.BATCH_END), apply)


def sets_default_dtype() -> Algorithm:
    """Switches the default dtype to float64 for a computation, and not back."""

    def apply(event: Event, state: State) -> State:
        del event
        torch.set_default_dtype(torch.float64)
        return _scaled(state, 0.999)

    return Algorithm("sets_default_dtype", on(Event.AFTER_TRAIN_BATCH), apply)


def leaves_grad_mode() -> Algorithm:
    """Switches gradients on for a computation of its own, and leaves them so."""

    def apply(event: Event, state: State) -> State:
        del event
        torch.set_grad_enabled(True)
        return _scaled(state, 0.999)

    return Algorithm("leaves_grad_mode", on(Event.BATCH_END), apply)


def switches_grad_off() -> Algorithm:
    """Calls `torch.set_grad_enabled(False)` in place of `with torch.no_grad()`: the forward pass has no graph."""

    def apply(event: Event, state: State) -> State:
        del event
        torch.set_grad_enabled(False)
        return state.replace(inputs=state.inputs - state.inputs.mean())

    return Algorithm("switches_grad_off", on(Event.BEFORE_FORWARD), apply)


MUTANTS: tuple[Mutant, ...] = (
    *(
        Mutant(make, "input_untouched")
        for make in (
            decays_in_place,
            clamps_through_data,
            noise_into_batch,
            replaces_entry,
            flips_gradients_in_place,
        )
    ),
    *(
        Mutant(make, "deterministic")
        for make in (
            torch_noise,
            python_coin,
            numpy_mixing,
            counts_in_closure,
            caches_statistics,
            mixes_with_last_batch,
            module_global,
        )
    ),
    *(
        Mutant(make, "global_state_kept")
        for make in (seeds_in_apply, seeds_python_in_apply, sets_default_dtype, leaves_grad_mode, switches_grad_off)
    ),
)
"""Every mutant of this file."""
