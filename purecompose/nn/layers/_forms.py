"""Shared parts of layers that replace others: tests for modules that compute as their class does, and wrapping."""

from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.nn.utils import parametrize

from purecompose._support.checks import check_number, shown


M = TypeVar("M", bound=nn.Module)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module computes just what `kind` does with its settings, without side effects.

    This excludes modules whose class or instance has its own forward, and those with hooks or parametrized tensors.
    """
    is_inherited = isinstance(module, kind) and type(module).forward is kind.forward
    return is_inherited and not has_hooks(module) and not parametrize.is_parametrized(module)


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module's forward is that of the class `kind`; hooks are allowed, for changes that keep them."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call runs more than the class's forward: hooks, or a forward set on the instance."""
    return "forward" in vars(module) or any(getattr(module, table) for table in _HOOKS)


def is_tied(module: nn.Module, root: nn.Module) -> bool:
    """Return whether the module's weight is also a parameter of another module in the network."""
    weight = module._parameters["weight"]
    others = (other for other in root.modules() if other is not module)
    return any(param is weight for other in others for param in other._parameters.values())


def recast(module: nn.Module, kind: type[M]) -> M:
    """Return a module of class `kind` with the same attributes, parameters and submodules, in copied dictionaries."""
    new = kind.__new__(kind)
    new.__dict__.update(
        {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}
    )
    return new


class Wrapping(nn.Module):
    """A module around another one, whose public attributes can be read here, such as its weight."""

    _held: ClassVar[str]
    """Name of the attribute that holds the other module."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module or of the wrapped one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):  # special methods, as for copying or printing, must not be forwarded
                raise
            return getattr(super().__getattr__(self._held), name)


def check_latent(latent: Any, where: str) -> float:
    """Return a width as given in a setting: an integer of at least 1, or below 1 a fraction.

    Example:
        >>> check_latent(0.25, "mine: width"), check_latent(64.0, "mine: width")
        (0.25, 64.0)
    """
    given = check_number(latent, where, 0, above=True)
    if given > 1 and given != int(given):
        raise ValueError(f"{where}: expected a whole number, or a share below 1, got {shown(latent)}")
    return latent


def latent_size(latent: float, full: int) -> int:
    """Return a width given as a number, or below 1 as a fraction of the full one, rounded down; at least 1.

    Example:
        >>> latent_size(8, 100), latent_size(0.29, 100), latent_size(0.1, 4)
        (8, 29, 1)
    """
    # The small number corrects rounding: 0.29 * 100 is 28.999999999999996.
    return max(1, int(latent if latent >= 1 else latent * full + 1e-9))
