"""Shared parts of layers that replace others: which modules compute as their class does, and what they expose."""

from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.nn.utils import parametrize


__all__ = ["Wrapping", "has_hooks", "is_plain", "is_tied", "recast"]

M = TypeVar("M", bound=nn.Module)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module computes what `kind` does with its settings, and nothing else happens meanwhile.

    Not so with a forward of its own, of its class or of itself, with hooks, and with parametrized tensors.
    """
    is_inherited = isinstance(module, kind) and type(module).forward is kind.forward
    return is_inherited and not has_hooks(module) and not parametrize.is_parametrized(module)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call runs more than the class's forward: hooks, or a forward set on the instance."""
    return "forward" in vars(module) or any(getattr(module, table) for table in _HOOKS)


def is_tied(module: nn.Module, root: nn.Module) -> bool:
    """Return whether the module's weight is a parameter of another one in the network, too."""
    weight = module._parameters["weight"]
    others = (other for other in root.modules() if other is not module)
    return any(param is weight for other in others for param in other._parameters.values())


def recast(module: nn.Module, kind: type[M]) -> M:
    """Return the same attributes, parameters and submodules in a module of a class; the tables of them are its own."""
    new = kind.__new__(kind)
    new.__dict__.update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}
    )
    return new


class Wrapping(nn.Module):
    """A module around another one, whose public attributes can be read here: a weight, a number of channels."""

    _held: ClassVar[str]
    """The name of the other one."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, or of the one that it holds."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):  # how it is copied, or printed, is a matter of its own
                raise
            return getattr(super().__getattr__(self._held), name)
