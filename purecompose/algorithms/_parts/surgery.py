"""Shared parts of methods on the model: surgery at INIT by rules, the same for a plain network, and foreign layers."""

import copy
import functools
from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor, nn

from purecompose import losses, optim, surgery
from purecompose._support.checks import suggests_keywords
from purecompose._support.messages import warn
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.compose import compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
from purecompose.surgery.weights import to_module
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


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
        rules: See `surgery.operate`. The types of the new modules have the rule `None`: a network that contains them
            has been changed already.
        where: The `where` of the method: patterns of the modules to change, with all that they contain; by default the
            parts of the network with trainable parameters.
    """

    patterns = None if where is None else tuple(where)

    def apply(event: Event, state: State) -> State:
        del event
        changed, _ = surgery.operate(state, rules, name=name, where=patterns, skips_frozen=patterns is None)
        return changed

    if patterns is None:
        traits = traits | {Trait.SKIPS_FROZEN_PARTS}
    return Algorithm(name, NEVER if is_neutral else on(Event.INIT), apply, traits=traits)


@suggests_keywords
def apply_surgery(net: nn.Module, method: Algorithm, *, key: int | Tensor = 0) -> nn.Module:
    """Return a copy of a network as a method on the model changes it at INIT; the network is not modified.

    The copy has separate weights, and is in the same mode (train or eval). Create the optimizer from the copy. What the
    method does at other events, such as changing a rate, is left out.

    Args:
        net: The network.
        method: A method that replaces modules, such as `algorithms.blurpool()`.
        key: The seed or key with which new parameters are drawn.

    Raises:
        ValueError: The method does not replace modules.

    Example:
        >>> from purecompose.algorithms import squeeze_excite
        >>> apply_surgery(nn.Conv2d(128, 128, 3), squeeze_excite(0.125)).se.squeeze
        Linear(in_features=128, out_features=16, bias=False)
    """
    if Trait.REQUIRED_ON_LOAD not in method.traits:
        raise ValueError(f"apply_surgery: expected a method that replaces modules, got {method!r}")
    # Half precision, since methods may act only there.
    state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.0), key=key, precision="bf16")
    changed_net = to_module(compose(loop_events, [method]).init(state))
    return changed_net if any(module.training for module in net.modules()) else changed_net.eval()


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
