"""What methods on the model share: surgery at INIT, by rules for types of modules."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.warnings import warn
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


__all__ = ["on_drawn_module", "on_module", "surgery_method", "warn_of_nothing"]

_P = ParamSpec("_P")


def surgery_method(
    name: str,
    rules: surgery.Rules,
    settings: Mapping[str, Any],
    *,
    is_neutral: bool = False,
    traits: frozenset[Trait] = frozenset({Trait.REQUIRED_ON_LOAD, Trait.REPLACES_LAYERS}),
) -> Algorithm:
    """Return a method that puts other modules into the network at INIT, and does nothing afterwards.

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


def on_module(name: str, rules_of: Callable[_P, surgery.Rules]) -> Callable[Concatenate[nn.Module, _P], nn.Module]:
    """Return the method as a function of a plain network, `(net, *settings) -> net`, which shares its rules.

    Args:
        name: Name of the algorithm.
        rules_of: Gives its rules by its settings.
    """

    def apply(net: nn.Module, *args: _P.args, **kwargs: _P.kwargs) -> nn.Module:
        return surgery.operate(net, rules_of(*args, **kwargs), name=name)[0]

    return _documented(apply, name, rules_of, ["net"])


def on_drawn_module(
    name: str, rules_of: Callable[_P, surgery.Rules]
) -> Callable[Concatenate[int | Tensor, nn.Module, _P], nn.Module]:
    """As `on_module`, for a method that makes parameters: `(key, net, *settings) -> net`."""

    def apply(key: int | Tensor, net: nn.Module, *args: _P.args, **kwargs: _P.kwargs) -> nn.Module:
        return surgery.operate(net, rules_of(*args, **kwargs), name=name, key=key)[0]

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
    key = "the seed, or the key, of new parameters, and " if "key" in leading else ""
    apply.__doc__ = f"""Return a copy of a network with what `{name}` puts in; the network itself is not touched.

    Takes {key}the network, then the settings of `{rules_of.__name__}`. The copy has weights of its own, and is in the
    mode (train or eval) that the network was in. Make the optimizer afterwards.
    """
    return apply


def warn_of_nothing(name: str, wanted: str, module: nn.Module, advice: str) -> None:
    """Warn that a method has found nothing of what it looks for in a network.

    Args:
        name: Name of the algorithm.
        wanted: What it looks for.
        module: The network.
        advice: What to do.
    """
    there = ", ".join(sorted({type(child).__name__ for child in module.modules()}))
    warn(f"{name} has no effect: it looked for {wanted} and found none in a network of {there}. {advice}")
