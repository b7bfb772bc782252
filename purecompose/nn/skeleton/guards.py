"""Guards: detect and undo changes that a forward pass makes in its modules, apart from parameters and buffers."""

import copy
import operator
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from purecompose.nn.skeleton.places import HOOKS, OWN


class Guards:
    """All containers in a module that a forward pass might write to, and their contents between passes."""

    def __init__(self, module: nn.Module, warned: set[str]) -> None:
        """Record the containers; `warned` is the set of attributes already named in a warning."""
        found = [guard for name, m in module.named_modules() for guard in _guards(name, m)]
        self._warned = warned
        self._rare = [guard for guard in found if guard.is_rare]
        self._watch([guard for guard in found if not guard.is_rare])

    def _watch(self, guards: list["_Guard"]) -> None:
        """Set the containers that are compared after every pass."""
        self._guards = guards
        self._empty = [guard.container for guard in guards if not guard.before]
        full = [guard for guard in guards if guard.before]
        self._expected = [(guard.container, _items(guard.before)) for guard in full]

    def restore(self, *, with_layers: bool = False) -> None:
        """Undo what a forward pass wrote into the modules' containers, and name it once in a warning.

        Args:
            with_layers: Also compare the containers of torch's own layers; one that has changed is compared in every
                later call, too.
        """
        if with_layers and (changed := [guard for guard in self._rare if _is_changed(guard)]):
            self._rare = [guard for guard in self._rare if guard not in changed]
            self._watch([*self._guards, *changed])
        # Compared by identity: `==` would compare the elements of arrays, and would be traced for tensors.
        if not any(self._empty) and not any(_differs(container, items) for container, items in self._expected):
            return
        changed = [name for guard in self._guards if _is_changed(guard) for name in _restored(guard)]
        self._warn(changed)  # last, since a warning may be an error

    def _warn(self, names: list[str]) -> None:
        fresh = [name for name in dict.fromkeys(names) if name not in self._warned]
        if fresh:
            self._warned.update(fresh)
            warnings.warn(
                f"forward changed {', '.join(fresh)}, which is neither a parameter nor a buffer: it was restored, "
                "because a state keeps nothing outside its tensors. Register what must survive as a buffer.",
                stacklevel=2,
            )


def is_plain(module: nn.Module) -> bool:
    """Return whether no user code runs in the module: its class is torch's, and it has no hooks or other functions."""
    if not type(module).__module__.startswith("torch.nn.modules."):
        return False
    if any(vars(module).get(hooks) for hooks in HOOKS):
        return False
    functions = (value for key, value in vars(module).items() if key not in OWN and callable(value))
    return all((getattr(function, "__module__", None) or "torch").startswith("torch") for function in functions)


class _Guard(NamedTuple):
    """A container in a module that a forward pass might write to, and its contents before."""

    name: str
    container: Any
    before: Any
    is_attributes: bool
    """True if its keys are names of attributes; otherwise it is the value of one attribute."""
    is_silent: bool
    """True if a change needs no warning."""
    is_rare: bool
    """True if it is compared only after watched passes."""


def _guards(name: str, module: nn.Module) -> Iterator[_Guard]:
    # torch's layers write only into buffers, but a user's forward may write into the layers. Comparing them all costs
    # 3 us a step in a small network. Recurrent layers are always compared; they rebuild their caches in each call.
    is_rare = is_plain(module) and not isinstance(module, nn.RNNBase)
    is_silent = type(module).__module__.startswith("torch.nn.utils.")
    attributes = vars(module)
    for container in (attributes, module._parameters, module._buffers, module._modules):
        yield _Guard(name, container, dict(container), True, is_silent, is_rare)
    for key in HOOKS:
        yield _Guard(f"{name}.{key}".lstrip("."), attributes[key], copy.copy(attributes[key]), False, is_silent, True)
    seen = {id(attributes)}
    for key, value in attributes.items():
        if key not in OWN:
            for guard in _guards_inside(f"{name}.{key}".lstrip("."), value, is_silent or key in CACHES, seen):
                yield guard._replace(is_rare=is_rare)


CACHES = ("_flat_weights", "_flat_weight_refs")
"""Attributes that torch's recurrent layers compute again at every call."""


def _guards_inside(name: str, value: Any, is_silent: bool, seen: set[int]) -> Iterator[_Guard]:
    """Yield guards for the containers in a value; `seen` has the `id`s of those that already have one."""
    if id(value) in seen or isinstance(value, (Tensor, nn.Module)):
        return
    if isinstance(value, (list, dict, set, deque)):
        container: Any = value
    elif isinstance(value, tuple) or is_users_object(value):
        container = None if isinstance(value, tuple) else vars(value)
    else:
        return
    seen.add(id(value))
    if container is not None:
        is_attributes = container is not value
        before = dict(container) if is_attributes else copy.copy(container)
        yield _Guard(name, container, before, is_attributes, is_silent, False)
    members = value if container is None else container
    for key, member in members.items() if isinstance(members, dict) else enumerate(members):
        yield from _guards_inside(f"{name}.{key}", member, is_silent, seen)


def is_users_object(value: Any) -> bool:
    """Return whether this is an instance of a user's class, of which a skeleton has its own copy."""
    kind = type(value)
    root = (kind.__module__ or "").partition(".")[0]
    is_others = root in sys.stdlib_module_names and root != "types"
    if is_others or root in ("torch", "numpy", "purecompose") or isinstance(value, type):
        return False
    return hasattr(value, "__dict__") and not hasattr(kind, "__deepcopy__")


def _differs(container: Any, items: list[Any]) -> bool:
    now = _items(container)
    return len(now) != len(items) or not all(map(operator.is_, now, items))


def _is_changed(guard: _Guard) -> bool:
    return _differs(guard.container, _items(guard.before))


def _restored(guard: _Guard) -> list[str]:
    """Restore the container's contents, and return the names of what had changed."""
    container, before, absent = guard.container, guard.before, object()
    names = [guard.name]
    if guard.is_attributes:
        keys = [k for k in {**before, **container} if container.get(k, absent) is not before.get(k, absent)]
        names = [f"{guard.name}.{key}".lstrip(".") for key in keys if key not in CACHES]
    container.clear()
    container.extend(before) if isinstance(container, (list, deque)) else container.update(before)
    return [] if guard.is_silent else names


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return sorted(container, key=id) if isinstance(container, set) else list(container)
