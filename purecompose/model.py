"""A network as a skeleton and its tensors.

`Model` is a deep copy of an `nn.Module` in which every tensor is a `meta` twin: it has the architecture and
no weights. The weights live in plain dictionaries by qualified name. To run the network they are put into the
skeleton for as long as a `with` block lasts, so a user's module is never touched, and states share skeletons.
"""

import copy
import dis
import functools
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from purecompose._fingerprint import fingerprint
from purecompose._skeleton import HOOKS, Skeleton, places


__all__ = ["Model", "Parts", "from_module", "to_module"]


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
        evaluation = copy.deepcopy(module, {id(place.tensor): place.tensor for place in places(module)}).eval()
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

    def with_modules(self, modules: Mapping[str, nn.Module]) -> "Model":
        """The architecture with other modules in some places; weights play no part in it.

        Args:
            modules: By the qualified names of those that they replace, wherever else these stand as well. They take
                over the mode (train or eval), and have their tensors on `meta`; parameters and buffers that come or
                go with them are the caller's to add and drop.

        Raises:
            AttributeError: There is no module of that name.
            ValueError: A tensor of a new module is not on `meta`.

        Example:
            >>> model = from_module(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).model
            >>> model.with_modules({"1": nn.Tanh()}).module[1], model.module[1]
            (Tanh(), ReLU())
        """
        root = self._skeletons[True].blank_copy()
        new = {id(root.get_submodule(name)): module for name, module in modules.items()}
        for name, module in modules.items():
            module.train(root.get_submodule(name).training)
        for parent in list(root.modules()):
            changed = {key: new[id(child)] for key, child in parent._modules.items() if id(child) in new}
            parent._modules.update(changed)
        root = new.get(id(root), root)
        names: dict[int, str] = {}
        param_names: list[str] = []
        for place in places(root):
            if not place.tensor.is_meta:
                raise ValueError(f"{place.name} has values, and is not on meta: build the module with device='meta'")
            if id(place.tensor) not in names:
                names[id(place.tensor)] = place.name
                if place.kind == "_parameters":
                    param_names.append(place.name)
        return Model(root, names, tuple(param_names))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Model) and self._fingerprint == other._fingerprint

    def __hash__(self) -> int:
        return hash(self.param_names)  # equal ones share them; a fingerprint's hash walks through the whole network

    def __deepcopy__(self, memo: Any) -> "Model":
        return self  # immutable

    def __repr__(self) -> str:
        return f"Model({type(self.module).__name__}, {len(self.param_names)} parameters)"


def from_module(module: nn.Module, *, is_shared: bool = False) -> Parts:
    """Takes a module apart into architecture and tensors; the module itself stays as it was.

    The skeleton trains in the mode the module is in: single modules put to `eval()` stay so. A module that is
    in evaluation mode as a whole, with all its parts (as pretrained ones come), is taken to train in training
    mode. The tensors are copies, or with `is_shared` others on the same memory.

    Raises:
        TypeError: `module` is not a plain `nn.Module`, or cannot be copied.
        ValueError: It has uninitialised (lazy or meta) tensors, a tensor computed from others, as the old
            `torch.nn.utils.weight_norm` leaves, or tensors hidden in tuples or objects; a module in a list that is
            not registered, with tensors of one that is; or a function among its
            attributes or hooks keeps one of its modules or tensors, which a copy would share with it.

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
    for tensor, _, _, name, kind in places(module):
        if id(tensor) in names:
            continue
        _check_tensor(tensor, name)
        if kind == "__dict__" and not is_shared:
            warnings.warn(f"{name} is a tensor but neither parameter nor buffer: it becomes a buffer", stacklevel=3)
        names[id(tensor)] = name
        twins[id(tensor)] = _meta_twin(tensor)
        parts[kind == "_parameters"][name] = tensor.detach() if is_shared else tensor.detach().clone()
        if kind == "_parameters" and not tensor.requires_grad:
            frozen.add(name)
    _check_functions(module, names)
    memo: dict[int, Any] = dict(twins)
    try:
        skeleton = copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(f"{type(module).__name__} cannot be deep-copied: {error}") from error
    _check_hidden(module, memo, twins)
    names_of_twins = {id(twins[key]): name for key, name in names.items()}
    _check_registered(skeleton, memo, names_of_twins)
    if not any(child.training for child in skeleton.modules()):
        skeleton.train()
    model = Model(skeleton, names_of_twins, tuple(parts[True]))
    return Parts(model, parts[True], parts[False], frozenset(frozen))


def to_module(model: Model, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """A plain `nn.Module` in training mode with copies of these tensors; ties stay ties.

    Raises:
        KeyError: A tensor of the architecture is missing.
    """
    return model.skeleton(train=True).filled_copy(params, buffers)


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


def _check_registered(skeleton: nn.Module, memo: Mapping[int, Any], names: Mapping[int, str]) -> None:
    """Refuses modules that are no part of the network and hold its tensors: no state could put any in there."""
    registered = set(skeleton.modules())
    for value in memo.values():
        if isinstance(value, nn.Module) and value not in registered:
            shared = [names[id(place.tensor)] for place in places(value) if id(place.tensor) in names]
            if shared:
                raise ValueError(
                    f"{type(skeleton).__name__} holds a {type(value).__name__} in a list, tuple or object, and not as "
                    f"a module of its own, with {shared[0]!r} of the network in it: register it, as an attribute or "
                    "in an nn.ModuleList"
                )


def _check_functions(module: nn.Module, names: Mapping[int, str]) -> None:
    """Refuses functions that keep parts of the network: copied, they would still compute with the original."""
    parts = {id(child): f"the module {name or 'itself'!r}" for name, child in module.named_modules()}
    parts |= {key: f"the tensor {name!r}" for key, name in names.items()}
    for prefix, child in module.named_modules():
        for key, value in vars(child).items():
            if key in HOOKS or key not in _MODULE_KEYS:
                for held in _kept(value, set()):
                    if id(held) in parts:
                        where = f"{prefix}.{key}".lstrip(".")
                        raise ValueError(
                            f"{where} has a function that keeps {parts[id(held)]}: it would go on computing with the "
                            "network that it was made for. Make it a method, or let a hook use the module it is given"
                        )


_MODULE_KEYS = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}  # which torch does not copy


def _kept(value: Any, seen: set[int], in_function: bool = False) -> Iterator[Any]:
    """The modules and tensors that functions in a value keep: in closures, defaults and global names."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        inside: list[Any] = [value.__defaults__, value.__kwdefaults__]
        inside += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        loads = (i.argval for i in dis.get_instructions(value) if i.opname == "LOAD_GLOBAL")
        # Of globals only what stands there itself: the functions among them lead through whole libraries.
        found = [value.__globals__.get(name) for name in set(loads)]
        inside += [thing for thing in found if isinstance(thing, (nn.Module, Tensor, list, tuple, dict))]
        in_function = True
    elif isinstance(value, (nn.Module, Tensor)):
        if in_function:
            yield value
        return
    elif isinstance(value, types.MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        inside = [value.func, value.args, value.keywords]
    elif isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    else:
        return
    for member in inside:
        yield from _kept(member, seen, in_function)


def _meta_twin(tensor: Tensor) -> Tensor:
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
