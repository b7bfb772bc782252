"""A network as a skeleton and its tensors.

`Model` is a deep copy of an `nn.Module` in which every tensor is a `meta` twin: it has the architecture and
no weights. The weights live in plain dictionaries by qualified name. To run the network they are put into
their *places* (the containers that hold them) for as long as a `with` block lasts, so a user's module is
never touched, and states share skeletons.
"""

import copy
import operator
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from purecompose._fingerprint import fingerprint


__all__ = ["Model", "Parts", "from_module", "to_module"]

# What torch keeps for itself in every module's __dict__.
_OWN = frozenset(vars(nn.Module()))


class Parts(NamedTuple):
    """What a module consists of."""

    model: "Model"
    params: dict[str, Tensor]
    """Copies of the parameters by qualified name; a tied one appears once, under its first name."""
    buffers: dict[str, Tensor]
    """Copies of the buffers, and of tensor attributes that were neither parameter nor buffer."""
    frozen: frozenset[str]
    """The parameters that came with `requires_grad=False`."""


class Model:
    """An architecture without weights; equal to another of the same structure and configuration."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], param_names: tuple[str, ...]) -> None:
        """Takes ownership of a module whose tensors are all on `meta`.

        Args:
            module: The module, in the mode (train or eval flags) that training is to use.
            names: The qualified name of each tensor, by its `id`.
            param_names: Which of them are parameters; the others are buffers.

        Raises:
            ValueError: A tensor of the module has no name: computing with an uncovered `meta` tensor would
                return uninitialised memory without an error.
        """
        self.param_names = param_names
        known = set(param_names)
        self.buffer_names = tuple(name for name in names.values() if name not in known)
        # The memo keeps the meta tensors themselves, so that one table of names serves both skeletons.
        evaluation = copy.deepcopy(module, {id(place.tensor): place.tensor for place in _places(module)}).eval()
        warned: set[str] = set()
        self._skeletons = {
            True: Skeleton(module, names, known, warned),
            False: Skeleton(evaluation, names, known, warned),
        }
        # Taken now, while the twins are in their places: what a step puts there has other flags. The names of
        # the slots tell a tied network from an untied one.
        self._fingerprint = fingerprint(module), self._skeletons[True].slot_names()

    def skeleton(self, train: bool) -> "Skeleton":
        """The copy whose modules are in training or in evaluation mode."""
        return self._skeletons[train]

    @property
    def module(self) -> nn.Module:
        """The training skeleton's module: for reading its structure, never for computing or editing."""
        return self._skeletons[True].module

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Model) and self._fingerprint == other._fingerprint

    def __hash__(self) -> int:
        return hash(self._fingerprint)

    def __deepcopy__(self, memo: Any) -> "Model":
        return self  # immutable

    def __repr__(self) -> str:
        return f"Model({type(self.module).__name__}, {len(self.param_names)} parameters)"


class Skeleton:
    """One copy of the architecture, and the places where its tensors go."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], param_names: set[str], warned: set[str]) -> None:
        """Finds the places; `warned` holds the attributes already named in a warning."""
        self.module = module
        self._param_slots: list[_Slot] = []
        self._buffer_slots: list[_Slot] = []
        for place in _places(module):
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


class _Place(NamedTuple):
    """`container[key]` is `tensor`; `kind` is the attribute of the module that leads there."""

    tensor: Tensor
    container: Any
    key: Any
    name: str
    kind: str


class _Slot(NamedTuple):
    """A place without its tensor: the tensor called `name` goes to `container[key]`."""

    name: str
    container: Any
    key: Any


class _Guard(NamedTuple):
    """A container in a module that a forward pass might write to, and what was in it."""

    name: str
    container: Any
    before: Any
    is_attributes: bool
    """Whether its keys are attributes; otherwise it is one attribute's value."""
    is_silent: bool
    """Whether a change needs no warning."""


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


def from_module(module: nn.Module) -> Parts:
    """Takes a module apart into architecture and tensors; the module itself stays as it was.

    The skeleton trains in the mode the module is in: single modules put to `eval()` stay so. A module that is
    in evaluation mode as a whole, with all its parts (as pretrained ones come), is taken to train in training
    mode.

    Raises:
        TypeError: `module` is not a plain `nn.Module`, or cannot be copied.
        ValueError: It has uninitialised (lazy or meta) tensors, a tensor computed from others, as the old
            `torch.nn.utils.weight_norm` leaves, or tensors hidden in tuples or objects.

    Example:
        >>> parts = from_module(nn.Linear(2, 1))
        >>> sorted(parts.params), parts.model.module.weight.device.type
        (['bias', 'weight'], 'meta')
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"expected an nn.Module (not a scripted one), got {type(module).__name__}")
    names: dict[int, str] = {}
    twins: dict[int, Tensor] = {}
    parts: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
    frozen = set()
    for tensor, _, _, name, kind in _places(module):
        if id(tensor) in names:
            continue
        _check_tensor(tensor, name)
        if kind == "__dict__":
            warnings.warn(f"{name} is a tensor but neither parameter nor buffer: it becomes a buffer", stacklevel=3)
        names[id(tensor)] = name
        twins[id(tensor)] = _meta_twin(tensor)
        parts[kind == "_parameters"][name] = tensor.detach().clone()
        if kind == "_parameters" and not tensor.requires_grad:
            frozen.add(name)
    memo: dict[int, Any] = dict(twins)
    try:
        skeleton = copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(f"{type(module).__name__} cannot be deep-copied: {error}") from error
    _check_hidden(module, memo, twins)
    if not any(child.training for child in skeleton.modules()):
        skeleton.train()
    names_of_twins = {id(twins[key]): name for key, name in names.items()}
    model = Model(skeleton, names_of_twins, tuple(parts[True]))
    return Parts(model, parts[True], parts[False], frozenset(frozen))


def to_module(model: Model, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """A plain `nn.Module` in training mode with copies of these tensors; ties stay ties.

    Raises:
        KeyError: A tensor of the architecture is missing.
    """
    skeleton = model.skeleton(train=True)
    memo: dict[int, Any] = {}
    with skeleton._lock:
        for slot in skeleton._param_slots:
            twin = slot.container[slot.key]
            if id(twin) not in memo:
                value = params[slot.name].detach().clone()
                memo[id(twin)] = nn.Parameter(value, requires_grad=twin.requires_grad)
        for slot in skeleton._buffer_slots:
            memo[id(slot.container[slot.key])] = buffers[slot.name].detach().clone()
        return copy.deepcopy(skeleton.module, memo)


def _places(module: nn.Module) -> Iterator[_Place]:
    """Every place of a tensor, registered ones first; a tied tensor has several."""
    modules = list(module.named_modules())
    for kind in ("_parameters", "_buffers", "__dict__"):
        for prefix, child in modules:
            container = getattr(child, kind)
            for key in list(container):
                if kind != "__dict__" or key not in _OWN:
                    yield from _inside(container, key, f"{prefix}.{key}".lstrip("."), kind)


def _inside(container: Any, key: Any, name: str, kind: str) -> Iterator[_Place]:
    value = container[key]
    if isinstance(value, Tensor):
        yield _Place(value, container, key, name, kind)
    elif isinstance(value, (list, dict)):
        for inner in range(len(value)) if isinstance(value, list) else list(value):
            yield from _inside(value, inner, f"{name}.{inner}", kind)


def _check_tensor(tensor: Tensor, name: str) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{name} has no shape yet (a lazy module): run the module once on a batch first")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: give it values first (to_empty, load)")
    if tensor.grad_fn is not None:
        raise ValueError(
            f"{name} is computed from other tensors, as torch.nn.utils.weight_norm and spectral_norm leave "
            "it: use the ones in torch.nn.utils.parametrizations"
        )


def _check_hidden(module: nn.Module, memo: Mapping[int, Any], twins: Mapping[int, Tensor]) -> None:
    """Refuses tensors that were copied for want of a twin: they would be weights outside of the state."""
    hidden = [value for key, value in memo.items() if isinstance(value, Tensor) and key not in twins]
    if hidden:
        found = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in hidden[:3])
        raise ValueError(
            f"{type(module).__name__} holds {len(hidden)} tensors in tuples or objects, where no state can "
            f"reach them: {found}. Keep them in lists or dictionaries, or register them as buffers"
        )


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


def _meta_twin(tensor: Tensor) -> Tensor:
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return list(container)
