"""Shared part of methods on the model: surgery at INIT, by rules for types of modules."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.messages import warn
from purecompose.algorithms._parts.checks import checked_where
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


_P = ParamSpec("_P")


def surgery_method(
    name: str,
    rules: surgery.Rules,
    settings: Mapping[str, Any],
    *,
    where: str | Sequence[str] | None = None,
    is_neutral: bool = False,
    traits: frozenset[Trait] = frozenset({Trait.REQUIRED_ON_LOAD, Trait.REPLACES_LAYERS}),
) -> Algorithm:
    """Return a method that replaces modules of the network at INIT, and does nothing afterwards.

    Args:
        name: Name of the algorithm and of its draws.
        rules: See `surgery.replace`. The types of the new modules have the rule `None`: a network that contains them
            has been changed already.
        settings: The settings; those that are not `None` are shown in the algorithm's repr.
        where: The `where` of the method: patterns of the modules to change, with all that they contain; by default the
            parts of the network with trainable parameters.
        is_neutral: True if the settings change nothing.
        traits: The traits by which passes order the algorithm.
    """

    patterns = checked_where(where, f"{name}: where")

    def apply(event: Event, state: State) -> State:
        del event
        changed, _ = surgery.operate(state, rules, name=name, where=patterns, skips_frozen=patterns is None)
        return changed

    if patterns is None:
        traits = traits | {Trait.SKIPS_FROZEN_PARTS}
    config = {setting: value for setting, value in {**settings, "where": patterns}.items() if value is not None}
    return Algorithm(name, NEVER if is_neutral else on(Event.INIT), apply, traits=traits, config=config)


def on_module(name: str, rules_of: Callable[_P, surgery.Rules]) -> Callable[Concatenate[nn.Module, _P], nn.Module]:
    """Return the method as a function of a plain network, `(net, *settings) -> net`, which shares its rules."""

    def apply(net: nn.Module, *args: _P.args, **kwargs: _P.kwargs) -> nn.Module:
        return surgery.operate(net, rules_of(*args, **kwargs), name=name, skips_frozen=True)[0]

    return _documented(apply, name, rules_of, ["net"])


def on_drawn_module(
    name: str, rules_of: Callable[_P, surgery.Rules]
) -> Callable[Concatenate[int | Tensor, nn.Module, _P], nn.Module]:
    """Do what `on_module` does, for a method that creates parameters: `(key, net, *settings) -> net`."""

    def apply(key: int | Tensor, net: nn.Module, *args: _P.args, **kwargs: _P.kwargs) -> nn.Module:
        return surgery.operate(net, rules_of(*args, **kwargs), name=name, key=key, skips_frozen=True)[0]

    return _documented(apply, name, rules_of, ["key", "net"])


def _documented(apply: Any, name: str, rules_of: Callable[..., Any], leading: list[str]) -> Any:
    kinds = {"net": nn.Module, "key": int | Tensor}
    before = [
        inspect.Parameter(role, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kinds[role]) for role in leading
    ]
    signature = inspect.signature(rules_of)
    apply.__signature__ = signature.replace(
        parameters=[*before, *signature.parameters.values()], return_annotation=nn.Module
    )
    apply.__name__ = apply.__qualname__ = f"apply_{name}"
    apply.__module__ = rules_of.__module__
    key = "a seed or key for new parameters, " if "key" in leading else ""
    apply.__doc__ = f"""Return a copy of a network with the modules that `{name}` inserts; the network is not modified.

    The arguments are {key}the network, and the settings of `{rules_of.__name__}`. The copy has separate weights and
    the same mode (train or eval). Create the optimizer from the copy. Parts without trainable parameters are left
    alone, unless nothing trains.
    """
    return apply


def warn_of_nothing(name: str, wanted: str, module: nn.Module, advice: str) -> None:
    """Warn that a method has found nothing to change in a network."""
    there = ", ".join(sorted({type(child).__name__ for child in module.modules()}))
    warn(f"{name} has no effect: it looked for {wanted} and found none in a network of {there}. {advice}")
