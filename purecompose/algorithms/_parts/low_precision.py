"""Shared part of the methods on normalisations, which act in half precision and after all other methods."""

from purecompose import surgery
from purecompose._support.device import AUTOCAST
from purecompose._support.messages import warn
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import on


def half_precision_method(name: str, rules: surgery.Rules) -> Algorithm:
    """Return a surgery at INIT that changes states with a half-precision forward pass, and warns about other states.

    It runs last, so that it finds layers that other methods have inserted.
    """

    def apply(event: Event, state: State) -> State:
        del event
        changed, report = surgery.operate(state, rules, name=name, skips_frozen=True)
        precision = state.context.precision
        if precision in AUTOCAST or not report.replaced:
            return changed
        warn(
            f"{name} has no effect under precision={precision!r}: torch's normalisations are single kernels already, "
            f"and only a forward pass in half precision has less to read and write. Give State.create "
            f"precision='bf16', or leave {name} out"
        )
        return state

    traits = frozenset({Trait.REQUIRED_ON_LOAD, Trait.FUSES_LAYERNORM, Trait.SKIPS_FROZEN_PARTS})
    return Algorithm(name, on(Event.INIT), apply, traits=traits)
