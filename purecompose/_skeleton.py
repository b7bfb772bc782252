"""A network's architecture without weights, and the places where its tensors go.

The places are the containers that hold a tensor: a module's parameters and buffers, lists and dictionaries among
its attributes. Tensors are put there for as long as a `with` block lasts; what a forward pass leaves in other
places is put back.
"""

import copy
import operator
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


__all__ = ["Skeleton", "places"]

# What torch keeps for itself in every module's __dict__.
_OWN = frozenset(vars(nn.Module()))


class Skeleton:
    """One copy of the architecture, and the places where its tensors go."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], param_names: set[str], warned: set[str]) -> None:
        """Finds the places; `warned` holds the attributes already named in a warning."""
        self.module = module
        self._param_slots: list[_Slot] = []
        self._buffer_slots: list[_Slot] = []
        for place in places(module):
            if id(place.tensor) not in names:
                raise ValueError(f"{place.name} is a tensor on meta that no parameter or buffer covers")
            name = names[id(place.tensor)]
            slots = self._param_slots if name in param_names else self._buffer_slots
            slots.append(_Slot(name, place.container, place.key))
        self._lock = threading.RLock()
        self._depth = 0
        self._held: list[_Bound] | None = None
        self._guards = [guard for name, m in module.named_modules() for guard in _guards(name, m)]
        self._empty = [guard.container for guard in self._guards if not guard.before]
        self._dicts = [guard.container for guard in self._guards if guard.before and guard.is_attributes]
        self._values = [list(container.values()) for container in self._dicts]
        self._others = [guard for guard in self._guards if guard.before and not guard.is_attributes]
        self._warned = warned
        self.draws: bool | None = None
        """Whether a forward pass draws random numbers; None until one has been watched."""

    def bound(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> "_Bound":
        """A context in which the module holds these tensors; afterwards it holds what it held before.

        Raises:
            KeyError: A tensor of the architecture is missing.
        """
        return _Bound(self, params, buffers)

    def slot_names(self) -> tuple[str, ...]:
        """Which tensor goes to each place: a tied one comes several times."""
        return tuple(slot.name for slot in self._param_slots + self._buffer_slots)

    def current_buffers(self) -> dict[str, Tensor]:
        """What the buffers' places hold now, those that a forward pass rebound included.

        Raises:
            RuntimeError: A forward pass removed a buffer.
        """
        found: dict[str, Tensor] = {}
        for name, container, key in self._buffer_slots:
            try:
                found[name] = container[key]
            except LookupError:
                raise RuntimeError(f"forward removed the buffer {name!r}, which the state holds") from None
        return found

    def filled_copy(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
        """A module of its own with copies of these tensors.

        Raises:
            KeyError: A tensor of the architecture is missing.
        """
        memo: dict[int, Any] = {}
        with self._lock:
            for name, container, key in self._param_slots:
                twin = container[key]
                if id(twin) not in memo:
                    value = params[name].detach().clone()
                    memo[id(twin)] = nn.Parameter(value, requires_grad=twin.requires_grad)
            for name, container, key in self._buffer_slots:
                memo[id(container[key])] = buffers[name].detach().clone()
            return copy.deepcopy(self.module, memo)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A scope to whose end all bindings made in it last: activation checkpointing recomputes in it."""
        with self._lock:
            if self._held is not None:
                yield
                return
            self._held = []
            try:
                yield
            finally:
                bindings, self._held = self._held, None
                with ExitStack() as stack:
                    for binding in bindings:
                        stack.callback(binding.release)

    def restore_attributes(self) -> None:
        """Undoes what a forward pass wrote into the modules' dictionaries, and names it once in a warning."""
        try:
            # Comparing lists takes a third of the time that comparing members by `is` does (they are tried
            # for identity first), and this is on every step. What is equal and not identical does no harm.
            is_same = [list(container.values()) for container in self._dicts] == self._values
        except Exception:  # tensors and arrays that differ have no truth value
            is_same = False
        if is_same and not any(self._empty) and not any(map(_is_changed, self._others)):
            return
        changed = [name for guard in self._guards if _is_changed(guard) for name in _restored(guard)]
        self._warn(changed)  # last, since a warning may be an error

    def _warn(self, names: list[str]) -> None:
        fresh = [name for name in dict.fromkeys(names) if name not in self._warned]
        if fresh:
            self._warned.update(fresh)
            warnings.warn(
                f"forward changed {', '.join(fresh)}, which is neither a parameter nor a buffer: it was put "
                "back, because a state keeps nothing outside its tensors. Register what must survive as a buffer.",
                stacklevel=2,
            )


def places(module: nn.Module) -> Iterator["_Place"]:
    """Every place of a tensor, registered ones first; a tied tensor has several."""
    modules = list(module.named_modules())
    for kind in ("_parameters", "_buffers", "__dict__"):
        for prefix, child in modules:
            container = getattr(child, kind)
            for key in list(container):
                if kind != "__dict__" or key not in _OWN:
                    yield from _inside(container, key, f"{prefix}.{key}".lstrip("."), kind)


class _Place(NamedTuple):
    """`container[key]` is `tensor`; `kind` is the attribute of the module that leads there."""

    tensor: Tensor
    container: Any
    key: Any
    name: str
    kind: str


def _inside(container: Any, key: Any, name: str, kind: str) -> Iterator[_Place]:
    value = container[key]
    if isinstance(value, Tensor):
        yield _Place(value, container, key, name, kind)
    elif isinstance(value, (list, dict)):
        for inner in range(len(value)) if isinstance(value, list) else list(value):
            yield from _inside(value, inner, f"{name}.{inner}", kind)


class _Slot(NamedTuple):
    """A place without its tensor: the tensor called `name` goes to `container[key]`."""

    name: str
    container: Any
    key: Any


class _Bound:
    """Swaps tensors in and out; a class, since a generator costs twice as much and this is on every step."""

    __slots__ = ("skeleton", "params", "buffers", "saved")

    def __init__(self, skeleton: Skeleton, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self.skeleton, self.params, self.buffers = skeleton, params, buffers
        self.saved: list[tuple[Any, Any, Any]] = []

    def __enter__(self) -> nn.Module:
        skeleton, params, buffers = self.skeleton, self.params, self.buffers
        try:
            new = [params[slot.name] for slot in skeleton._param_slots]
            new += [buffers[slot.name] for slot in skeleton._buffer_slots]
        except KeyError as error:
            raise KeyError(
                f"the model's tensor {error.args[0]!r} is missing from the given params and buffers"
            ) from None
        skeleton._lock.acquire()
        skeleton._depth += 1
        slots = skeleton._param_slots + skeleton._buffer_slots
        self.saved = [(container, key, container[key]) for _, container, key in slots]
        for (_, container, key), tensor in zip(slots, new, strict=True):
            container[key] = tensor
        return skeleton.module

    def __exit__(self, *error: object) -> None:
        if self.skeleton._held is not None:
            self.skeleton._held.append(self)
        else:
            self.release()

    def release(self) -> None:
        skeleton = self.skeleton
        try:
            for container, key, tensor in self.saved:
                # A forward pass may have shortened a list: then its guard puts the tensor back.
                if not isinstance(container, list) or key < len(container):
                    container[key] = tensor
            skeleton._depth -= 1
            if not skeleton._depth:
                skeleton.restore_attributes()
        finally:
            skeleton._lock.release()


class _Guard(NamedTuple):
    """A container in a module that a forward pass might write to, and what was in it."""

    name: str
    container: Any
    before: Any
    is_attributes: bool
    """Whether its keys are attributes; otherwise it is one attribute's value."""
    is_silent: bool
    """Whether a change needs no warning."""


def _guards(name: str, module: nn.Module) -> Iterator[_Guard]:
    if type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, nn.RNNBase):
        return  # they write into nothing but buffers, and looking costs 3 us a step in a small network
    # The recurrent ones rebuild their caches at every call: nothing is lost.
    is_torchs = type(module).__module__.startswith("torch.nn.")
    attributes = vars(module)
    for container in (attributes, module._parameters, module._buffers, module._modules):
        yield _Guard(name, container, dict(container), True, is_torchs)
    for key, value in attributes.items():
        if key not in _OWN and isinstance(value, (list, dict, set)):
            yield _Guard(f"{name}.{key}".lstrip("."), value, copy.copy(value), False, is_torchs)


def _is_changed(guard: _Guard) -> bool:
    now, before = _items(guard.container), _items(guard.before)
    return len(now) != len(before) or not all(map(operator.is_, now, before))


def _restored(guard: _Guard) -> list[str]:
    """Puts back what the container held, and says what had changed."""
    container, before, absent = guard.container, guard.before, object()
    names = [guard.name]
    if guard.is_attributes:
        keys = [k for k in {**before, **container} if container.get(k, absent) is not before.get(k, absent)]
        names = [f"{guard.name}.{key}".lstrip(".") for key in keys]
    container.clear()
    container.extend(before) if isinstance(container, list) else container.update(before)
    return [] if guard.is_silent else names


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return list(container)
