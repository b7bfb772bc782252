"""What methods on the model share: surgery at INIT, by rules for types of modules."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from purecompose import surgery
from purecompose._warnings import warn
from purecompose.algorithm import Algorithm, Trait
from purecompose.event import Event
from purecompose.predicate import NEVER, on
from purecompose.state import State


__all__ = ["surgery_method", "warn_of_nothing"]


def surgery_method(
    name: str,
    rules: surgery.Rules,
    settings: Mapping[str, Any],
    *,
    is_neutral: bool = False,
    traits: frozenset[Trait] = frozenset({Trait.REQUIRED_ON_LOAD, Trait.REPLACES_LAYERS}),
) -> Algorithm:
    """A method that puts other modules into the network at INIT, and does nothing afterwards.

    Args:
        name: The algorithm's; it names its draws.
        rules: See `surgery.replace`. What the method puts in stands among them with `None`: found in a network, it has
            been applied.
        settings: Printed, those that are `None` aside.
        is_neutral: Whether the settings change nothing.
        traits: What passes should know.
    """

    def apply(event: Event, state: State) -> State:
        del event
        changed, _ = surgery.operate(state, rules, name=name)
        return changed

    config = {setting: value for setting, value in settings.items() if value is not None}
    return Algorithm(name, NEVER if is_neutral else on(Event.INIT), apply, traits=traits, config=config)


def warn_of_nothing(name: str, wanted: str, module: nn.Module, advice: str) -> None:
    """Warns that a method has found nothing of what it looks for in a network.

    Args:
        name: The algorithm's.
        wanted: What it looks for.
        module: The network.
        advice: What to do.
    """
    there = ", ".join(sorted({type(child).__name__ for child in module.modules()}))
    warn(f"{name} has no effect: it looked for {wanted} and found none in a network of {there}. {advice}")
