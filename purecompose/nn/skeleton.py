"""Skeletons: architectures without weights, into which tensors are put for the duration of a `with` block.

Changes that a forward pass makes in its modules, apart from parameters and buffers, are undone.
"""

import copy
import operator
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from purecompose.nn.differentiable import OwnDerivatives
from purecompose.nn.splitting import CACHES, HOOKS, OWN, is_users_object, places


class Skeleton:
    """One copy of the architecture, and the places of its tensors."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], param_names: set[str], warned: set[str]) -> None:
        """Find the places; `warned` is the set of attributes already named in a warning."""
        self.module = module
        self._param_slots: list[_Slot] = []
        self._buffer_slots: list[_Slot] = []
        for place in places(module):
            if id(place.tensor) not in names:
                raise ValueError(f"{place.name} is a tensor on meta that no parameter or buffer covers")
            name = names[id(place.tensor)]
            slots = self._param_slots if name in param_names else self._buffer_slots
            slots.append(_Slot(name, place.container, place.key))
        self._param_names = [slot.name for slot in self._param_slots]
        self._buffer_names = [slot.name for slot in self._buffer_slots]
        self.buffer_names: frozenset[str] = frozenset(self._buffer_names)
        self._slots = self._param_slots + self._buffer_slots
        self._at_rest = [(container, key, container[key]) for _, container, key in self._slots]
        self._lock = threading.RLock()
        self._depth = 0
        self._held: list[_Bound] | None = None
        self._guards = Guards(module, warned)
        self._is_watched = False
        self.is_fixed: bool = all(map(is_plain, module.modules()))
        """True if all modules are torch's own, so that their draws and writes depend only on their settings."""
        self.has_group_norms: bool = any(isinstance(child, nn.GroupNorm) for child in module.modules())
        norms = [child for child in module.modules() if isinstance(child, _BatchNorm)]
        self.has_batch_norms: bool = bool(norms)
        self.has_cumulative_norms: bool = any(norm.momentum is None for norm in norms)
        self.may_attend: bool = not self.is_fixed or any(isinstance(m, nn.MultiheadAttention) for m in module.modules())
        """True if a forward pass may call scaled dot product attention: code of the user, or a layer of torch."""
        self.draws: bool | None = None
        """True if a forward pass draws random numbers; None until one has been watched."""
        self.own_derivatives: OwnDerivatives | None = None
        """The derivatives that a forward pass takes, for which it needs a graph in evaluation too; None if unknown."""

    def bound(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, is_watched: bool = False
    ) -> "_Bound":
        """Return a context in which the module has these tensors; afterwards the previous ones are restored."""
        return _Bound(self, params, buffers, is_watched=is_watched)

    def rebound(self, params: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the currently bound parameters that forward has replaced by something else."""
        return [name for name, container, key in self._param_slots if _content(container, key) is not params[name]]

    def slot_names(self) -> tuple[str, ...]:
        """Return the name of each place's tensor; the name of a tied tensor occurs several times."""
        return (*self._param_names, *self._buffer_names)

    def current_buffers(self) -> dict[str, Tensor]:
        """Return the buffers' current values, including those that a forward pass rebound."""
        found: dict[str, Tensor] = {}
        for name, container, key in self._buffer_slots:
            try:
                found[name] = container[key]
            except LookupError:
                raise RuntimeError(f"forward removed the buffer {name!r}, which the state holds") from None
        return found

    def filled_copy(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, is_shared: bool = False
    ) -> nn.Module:
        """Return a new module with copies of these tensors, or with `is_shared` with tensors on their memory."""
        memo: dict[int, Any] = {}
        with self._lock:
            for name, container, key in self._param_slots:
                twin = container[key]
                if id(twin) not in memo:
                    value = params[name].detach() if is_shared else params[name].detach().clone()
                    memo[id(twin)] = nn.Parameter(value, requires_grad=twin.requires_grad)
            for name, container, key in self._buffer_slots:
                memo[id(container[key])] = buffers[name].detach() if is_shared else buffers[name].detach().clone()
            return copy.deepcopy(self.module, memo)

    def blank_copy(self) -> nn.Module:
        with self._lock:
            return copy.deepcopy(self.module, {id(place.tensor): place.tensor for place in places(self.module)})

    def held(self) -> "_Held":
        """Return a scope that keeps all bindings made in it until its end, since activation checkpointing recomputes
        forward passes in it.
        """
        return _Held(self)


class _Held:
    """Context that holds bindings; a class, since a generator costs twice as much and every step uses it."""

    __slots__ = ("is_outermost", "skeleton")

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton: Skeleton = skeleton

    def __enter__(self) -> None:
        skeleton = self.skeleton
        skeleton._lock.acquire()
        self.is_outermost: bool = skeleton._held is None
        if self.is_outermost:
            skeleton._held = []

    def __exit__(self, kind: Any, *error: object) -> None:
        skeleton = self.skeleton
        try:
            if self.is_outermost:
                self._release(is_failed=kind is not None)
        finally:
            skeleton._lock.release()

    def _release(self, *, is_failed: bool) -> None:
        scope, self.skeleton._held = self.skeleton._held, None
        assert scope is not None
        bindings = scope.copy()
        scope.clear()  # breaks the cycle with the bindings, which would keep their tensors alive for a while
        if len(bindings) == 1:  # avoids the stack, which costs as much as the release
            bindings[0].release()
        else:
            with ExitStack() as stack:
                for binding in bindings:
                    stack.callback(binding.release)
        for binding in () if is_failed else bindings:
            if binding.notes:
                binding.check_untouched()


class _Slot(NamedTuple):
    """A place without its tensor: the tensor called `name` belongs in `container[key]`."""

    name: str
    container: Any
    key: Any


_CURRENT: ContextVar["_Bound | None"] = ContextVar("binding", default=None)


def replay() -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that restores, for a recomputation, the current tensors of the innermost bound module.

    Returns:
        A function that returns a context in which the module has the current parameters and copies of the current
        buffers, or a context that does nothing if no module is bound. The function may be called in another thread,
        and more than once.
    """
    binding = _CURRENT.get()
    if binding is None:
        return nullcontext
    buffers = binding.snapshot()

    def again() -> _Bound:
        return _Bound(binding.skeleton, binding.params, {n: _copied(b) for n, b in buffers.items()}, binding)

    return again


class _Bound:
    """Context that swaps tensors in and out; a class, since a generator costs twice as much and every step uses it."""

    __slots__ = (
        "buffers",
        "first",
        "is_watched",
        "locks",
        "notes",
        "params",
        "saved",
        "scope",
        "skeleton",
        "start",
        "token",
    )

    def __init__(
        self,
        skeleton: Skeleton,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        first: "_Bound | None" = None,
        *,
        is_watched: bool = False,
    ) -> None:
        """Prepare the swap; `first` is the binding that this one repeats, for a recomputation."""
        self.is_watched: bool = is_watched
        self.skeleton: Skeleton = skeleton
        self.params: Mapping[str, Tensor] = params
        self.buffers: Mapping[str, Tensor] = buffers
        self.first: _Bound | None = first
        self.scope: list[_Bound] | None = None
        self.notes: dict[str, tuple[Tensor, int | None, Tensor | None]] = {}

    def __enter__(self) -> nn.Module:
        skeleton, params, buffers = self.skeleton, self.params, self.buffers
        try:
            new = list(map(params.__getitem__, skeleton._param_names))
            if not skeleton.is_fixed:
                _mark_parameters(new)
            new += map(buffers.__getitem__, skeleton._buffer_names)
        except KeyError as error:
            raise KeyError(
                f"the model's tensor {error.args[0]!r} is missing from the given params and buffers"
            ) from None
        # In a held scope the recomputation may run in one of autograd's threads, while the thread with the lock waits.
        self.scope = None if self.first is None else self.first.scope
        self.locks: bool = self.scope is None or self.scope is not skeleton._held
        if self.locks:
            skeleton._lock.acquire()
            self.scope = skeleton._held
        self.start: int = 0 if self.scope is None else len(self.scope)
        skeleton._depth += 1
        skeleton._is_watched |= self.is_watched
        slots = skeleton._slots
        if skeleton._depth == 1:
            self.saved = skeleton._at_rest
        else:
            self.saved: list[tuple[Any, Any, Any]] = [(container, key, container[key]) for _, container, key in slots]
        for (_, container, key), tensor in zip(slots, new, strict=True):
            container[key] = tensor
        self.token: Token[_Bound | None] = _CURRENT.set(self)
        return skeleton.module

    def __exit__(self, kind: Any, *error: object) -> None:
        _CURRENT.reset(self.token)
        if self.scope is None or self.first is not None:
            self.release()
        elif kind is None:
            self.notes = self._buffers_now() if self.buffers else self.notes
            self.scope.append(self)
        else:  # a failed forward is not recomputed
            while len(self.scope) > self.start:
                self.scope.pop().release()
            self.release()

    def release(self) -> None:
        skeleton = self.skeleton
        try:
            for container, key, tensor in self.saved:
                # If a forward pass has shortened a list, the list's guard puts the tensor back.
                if not isinstance(container, list) or key < len(container):
                    container[key] = tensor
            skeleton._depth -= 1
            if not skeleton._depth:
                is_watched, skeleton._is_watched = skeleton._is_watched, False
                skeleton._guards.restore(with_layers=is_watched)
        finally:
            if self.locks:
                skeleton._lock.release()

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of the current buffers; those unchanged since the last call are not copied again."""
        copies: dict[str, Tensor] = {}
        for name, tensor in self.skeleton.current_buffers().items():
            known, version, copied = self.notes.get(name, (None, None, None))
            if known is not tensor or copied is None or version is None or version != _version(tensor):
                copied = _copied(tensor)
                self.notes[name] = (tensor, _version(tensor), copied)
            copies[name] = copied
        return copies

    def check_untouched(self) -> None:
        """Check, after a held scope, that no recomputation wrote into the buffers that the pass returned."""
        for name, (tensor, version, _) in self.notes.items():
            if version != _version(tensor):
                raise RuntimeError(
                    f"backward ran forward again and wrote into the buffer {name!r} a second time, as "
                    "torch.utils.checkpoint does: use purecompose.nn.layers.checkpoint(fn, *args) in its place"
                )

    def _buffers_now(self) -> dict[str, tuple[Tensor, int | None, Tensor | None]]:
        slots = self.skeleton._buffer_slots
        found = {name: box[key] for name, box, key in slots if isinstance(box, dict) and key in box}
        return {name: (tensor, _version(tensor), None) for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _content(container: Any, key: Any) -> Any:
    """Return the tensor in a place; `None` if the place is gone."""
    try:
        return container[key]
    except LookupError:
        return None


def _mark_parameters(tensors: list[Tensor]) -> None:
    """Mark tensors that require a gradient, so that isinstance(tensor, nn.Parameter) is true for them.

    A ParameterList that is sliced, or into which an item is put, would otherwise wrap the tensor in a new parameter,
    detached from the graph.
    """
    for tensor in tensors:
        if tensor.requires_grad:
            tensor._is_param = True  # pyright: ignore[reportAttributeAccessIssue]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _copied(tensor: Tensor) -> Tensor:
    # `requires_grad` is kept, because autograd saves other tensors if a gradient is required.
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


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

        With `with_layers` this includes torch's own layers; one that has changed is compared in every later call, too.
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
