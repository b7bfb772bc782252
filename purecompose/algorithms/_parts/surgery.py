"""Shared parts of methods on the model: surgery at INIT by rules, the same for a plain network, and foreign layers."""

import copy
import functools
import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any, Concatenate, ParamSpec

from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.checks import suggests_keywords
from purecompose._support.messages import warn
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


_P = ParamSpec("_P")


def surgery_method(
    name: str,
    rules: surgery.Rules,
    where: str | Sequence[str] | None = None,
    *,
    is_neutral: bool = False,
    traits: frozenset[Trait] = frozenset({Trait.REQUIRED_ON_LOAD, Trait.REPLACES_LAYERS}),
) -> Algorithm:
    """Return a method that replaces modules of the network at INIT, and does nothing afterwards.

    Args:
        name: Name of the algorithm and of its draws.
        rules: See `surgery.replace`. The types of the new modules have the rule `None`: a network that contains them
            has been changed already.
        where: The `where` of the method: patterns of the modules to change, with all that they contain; by default the
            parts of the network with trainable parameters.
        is_neutral: True if the settings change nothing.
        traits: The traits by which passes order the algorithm.
    """

    patterns = None if where is None else tuple(where)

    def apply(event: Event, state: State) -> State:
        del event
        changed, _ = surgery.operate(state, rules, name=name, where=patterns, skips_frozen=patterns is None)
        return changed

    if patterns is None:
        traits = traits | {Trait.SKIPS_FROZEN_PARTS}
    return Algorithm(name, NEVER if is_neutral else on(Event.INIT), apply, traits=traits)


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
    return suggests_keywords()(apply)


def warn_of_nothing(name: str, wanted: str, module: nn.Module, advice: str) -> None:
    """Warn that a method has found nothing to change in a network."""
    there = ", ".join(sorted({type(child).__name__ for child in module.modules()}))
    warn(f"{name} has no effect: it looked for {wanted} and found none in a network of {there}. {advice}")


class _ByName(type):
    """Metaclass for classes whose instances are the objects with a class of a certain name in their MRO."""

    def __instancecheck__(cls, thing: Any) -> bool:
        wanted = cls.__dict__["of"]
        return any((kind.__module__, kind.__qualname__) == wanted for kind in type(thing).__mro__)


class _ByIdentity(type):
    """Metaclass for classes whose instances are the members of a container."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return thing in cls.__dict__["members"]


def one_of(members: Container[Any], shown: str) -> type[nn.Module]:
    """Return a class, for `isinstance` and the rules of a surgery, whose instances are certain modules.

    Example:
        >>> first = nn.Linear(2, 2)
        >>> isinstance(first, one_of([first], "first")), isinstance(nn.Linear(2, 2), one_of([first], "first"))
        (True, False)
    """
    return _ByIdentity(shown, (nn.Module,), {"members": members})


def stand_in(module: str, name: str) -> type[nn.Module]:
    """Return a class, for `isinstance` and the rules of a surgery, that stands in for a class given by name.

    Nothing is imported, now or later.

    Args:
        module: Name of the module in which the class is defined.
        name: Name of the class in this module.

    Example:
        >>> isinstance(nn.Linear(2, 2), stand_in("torch.nn.modules.linear", "Linear"))
        True
    """
    return _ByName(name, (nn.Module,), {"of": (module, name)})


class Derived(nn.Module):
    """Base of mixins that `changed` adds to a foreign class; their methods override those of the class."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is created at run time, so pickle cannot find it by its name.
        mixin, kind = type(self).__bases__
        return _blank, (mixin, kind), self.__dict__


def changed(module: nn.Module, mixin: type[Derived] | None = None, **children: nn.Module) -> nn.Module:
    """Return a copy of a module with some methods and children replaced, and the same parameters and attributes.

    Args:
        module: The module; it is not modified.
        mixin: A class whose methods override the module's.
        children: Modules that replace the children or attributes of these names.
    """
    twin = copy.copy(module)
    if mixin is not None:
        twin.__class__ = _derived(mixin, type(module))
    vars(twin)["_modules"] = {**module._modules, **children}
    for name in children:
        vars(twin).pop(name, None)  # a plain attribute, such as a function, would hide the child
    return twin


@functools.cache  # one class for each pair, because architectures are compared by their classes
def _derived(mixin: type[Derived], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {"__module__": __name__, "__doc__": mixin.__doc__})


def _blank(mixin: type[Derived], kind: type[nn.Module]) -> nn.Module:
    made = _derived(mixin, kind)
    return made.__new__(made)
