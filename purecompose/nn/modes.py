"""Training and evaluation mode of a network's parts during training."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from purecompose._support.checks import shown
from purecompose._support.messages import warn


def set_modes(root: nn.Module, eval_mode: Sequence[str], train_mode: Sequence[str]) -> None:
    """Put modules of a network into a mode, with all that they contain; of two patterns, that of the inner one decides.

    Args:
        root: The network, which is modified.
        eval_mode, train_mode: Patterns (`fnmatch`) of qualified names; "" is the network itself.
    """
    names = [name for name, _ in root.named_modules()]
    for role, patterns in (("eval_mode", eval_mode), ("train_mode", train_mode)):
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"{role}: expected names of modules or patterns, as in ['backbone'], got {shown(patterns)}")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                known = ", ".join(names[1:6]) + (", ..." if len(names) > 6 else "")
                raise ValueError(f"{role}: {pattern!r} matches no module; the names are {known}")
    for name, module in root.named_modules():
        evaluates, trains = _matches(name, eval_mode), _matches(name, train_mode)
        if evaluates and trains:
            raise ValueError(
                f"{name or 'the network'!r} matches both eval_mode={eval_mode} and train_mode={train_mode}"
            )
        if evaluates or trains:
            module.train(trains)


def warn_of_idle_parts(root: nn.Module, eval_mode: Sequence[str]) -> None:
    """Warn of parts in evaluation mode that would act differently in training mode."""
    found = _idle(root, "", eval_mode)
    if found:
        listed = ", ".join(name or "the network" for name in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        warn(
            f"the network is in training mode except for {listed}{more}: there, dropout is off and running statistics "
            f"stand still in training. State.create(train_mode={found[:3]}) puts such parts into training mode, "
            f"State.create(eval_mode={found[:3]}) keeps them as they are"
        )


def _idle(module: nn.Module, name: str, decided: Sequence[str]) -> list[str]:
    """Return the outermost modules in evaluation mode, from this one on, whose mode matters and is not decided."""
    if not module.training:
        if _matches(name, decided):
            return []
        if any(_has_modes(child) for child in module.modules() if not child.training):
            return [name]
    children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    return [one for name, child in children for one in _idle(child, name, decided)]


def _has_modes(module: nn.Module) -> bool:
    """Return whether a module itself drops values at random, or keeps running statistics."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    attributes: dict[str, Any] = vars(module)
    # Attention, recurrent layers and drop paths have a rate as an attribute.
    drops = any("drop" in key and isinstance(value, float) and value > 0 for key, value in attributes.items())
    return drops or any(module._buffers.get(key) is not None for key in ("running_mean", "running_var"))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
