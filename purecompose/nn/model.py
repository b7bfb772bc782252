"""A network as a skeleton and its tensors.

`Model` is a deep copy of an `nn.Module` in which every tensor is replaced by a twin on `meta`: it has the architecture
and no weights. The weights are in plain dictionaries by qualified name. To run the network they are put into the
skeleton for the duration of a `with` block, so a user's module is never touched, and states share skeletons.
"""

import copy
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from purecompose._support.messages import warn
from purecompose._support.objects import check_hidden, fingerprint
from purecompose._support.specs import shown
from purecompose.nn import splitting
from purecompose.nn.skeleton import Skeleton
from purecompose.nn.splitting import Member, Sharing, places


STATISTICS = ("*running_mean", "*running_var")
"""Patterns of the names of normalization layers' running statistics. A mean of these, over steps or processes, is a
valid value, which is not known of other buffers: the mean of unit vectors is not a unit vector."""


class Parts(NamedTuple):
    """Architecture and tensors of a module."""

    model: "Model"
    params: dict[str, Tensor]
    """Copies of the parameters by qualified name; a tied one appears once, under its first name."""
    buffers: dict[str, Tensor]
    """Copies of the buffers, and of tensor attributes that were neither parameters nor buffers."""
    frozen: frozenset[str]
    """Names of the parameters that had `requires_grad=False`."""


class Split(NamedTuple):
    """A module, already split."""

    module: nn.Module
    parts: Parts


class Model:
    """An architecture without weights; equal to any other with the same structure and configuration."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], param_names: tuple[str, ...]) -> None:
        """Take ownership of a module, in the mode for training, whose tensors are on `meta` and have `names` by `id`.

        Raises:
            ValueError: A tensor of the module has no name: computing with an uncovered `meta` tensor would
                return uninitialised memory without an error.
        """
        self.param_names = param_names
        self._initially_frozen = frozenset(name for name, param in module.named_parameters() if not param.requires_grad)
        known = set(param_names)
        self.buffer_names: tuple[str, ...] = tuple(name for name in names.values() if name not in known)
        saved = {
            id(buffer)
            for child in module.modules()
            for key, buffer in child._buffers.items()
            if key not in child._non_persistent_buffers_set
        }
        self.settings: tuple[str, ...] = tuple(n for key, n in names.items() if n not in known and key not in saved)
        """The buffers that are not in `state_dict()`: not persistent, or plain attributes."""
        # The memo makes the copy share the meta tensors, so that one table of names serves both skeletons.
        evaluation = copy.deepcopy(module, {id(place.tensor): place.tensor for place in places(module)}).eval()
        warned: set[str] = set()
        self._skeletons = {
            True: Skeleton(module, names, known, warned),
            False: Skeleton(evaluation, names, known, warned),
        }
        # Computed while the twins are in place, because the tensors that a step puts there have other flags. The names
        # of the slots distinguish a tied network from an untied one.
        self._fingerprint = fingerprint(module), self._skeletons[True].slot_names()

    def skeleton(self, train: bool) -> "Skeleton":
        """Return the copy whose modules are in training or in evaluation mode."""
        return self._skeletons[train]

    @property
    def module(self) -> nn.Module:
        """The training skeleton's module, only for reading its structure, never for computing or editing."""
        return self._skeletons[True].module

    @property
    def evaluated_parts(self) -> tuple[str, ...]:
        """The names of the outermost modules that train in evaluation mode with all that they contain."""
        return tuple(_outermost(self.module, lambda module: not any(part.training for part in module.modules())))

    def frozen_parts(self, frozen: Collection[str] | None = None) -> tuple[str, ...]:
        """Return the names of the outermost modules with parameters of which none trains; none if nothing trains.

        Args:
            frozen: The names of frozen parameters; by default those that had `requires_grad=False`.
        """
        frozen = self._initially_frozen if frozen is None else frozen
        trains = {id(param) for name, param in self.module.named_parameters() if name not in frozen}

        def is_idle(module: nn.Module) -> bool:
            own = [id(param) for param in module.parameters()]
            return bool(own) and trains.isdisjoint(own)

        return tuple(_outermost(self.module, is_idle)) if trains else ()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Model) and self._fingerprint == other._fingerprint

    def __hash__(self) -> int:
        return hash(self.param_names)  # equal models share them; the fingerprint's hash traverses the whole network

    def __deepcopy__(self, memo: Any) -> "Model":
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the training skeleton, modules whose tensors have shapes and no values."""
        return of_skeleton, (self._skeletons[True].blank_copy(),)

    def __repr__(self) -> str:
        return f"Model({type(self.module).__name__}, {len(self.param_names)} parameters)"


def of_skeleton(root: nn.Module) -> Model:
    """Return the architecture of a module on `meta`; each tensor has the name of its first place."""
    names: dict[int, str] = {}
    param_names: list[str] = []
    for place in places(root):
        if id(place.tensor) not in names:
            names[id(place.tensor)] = place.name
            if place.kind == "_parameters":
                param_names.append(place.name)
    return Model(root, names, tuple(param_names))


def from_module(
    module: nn.Module, *, is_shared: bool = False, eval_mode: Sequence[str] = (), train_mode: Sequence[str] = ()
) -> Parts:
    """Split a module into architecture and tensors; the module itself is not modified.

    The skeleton trains in the mode that the module is in, or in training mode if all modules are in evaluation mode.
    Then the modules that match `eval_mode` and `train_mode` are put into these modes. The tensors are copies, or with
    `is_shared` new tensors on the same memory.

    Parameters that are one object, or have the same memory, shape, strides and `requires_grad`, are tied, and so are
    buffers. With `is_shared`, only tensors that are one object are tied.

    Warns:
        UserWarning: A tensor becomes a buffer, or buffers share part of their memory.
    """
    if not isinstance(module, nn.Module):
        called = f"; call it: {module.__name__}(...)" if isinstance(module, type) else ""
        raise TypeError(f"expected an nn.Module, got {shown(module)}{called}")
    splitting.check_modules(module)
    for name, child in module.named_modules():
        place = f"the module {name!r}" if name else "the network"
        check_hidden(child, f"{place} ({type(child).__name__})", (nn.Module,))
    names, params, buffers, frozen = _tensors_of(module, is_shared=is_shared)
    splitting.check_functions(module, names)
    by_name: dict[str, Tensor] = {}
    twins = {id(one.tensor): one.tensor for one in places(module)}
    for key, tensor in twins.items():
        twins[key] = by_name.setdefault(names[key], _meta_twin(tensor))
    memo: dict[int, Any] = dict(twins)
    try:
        skeleton = copy.deepcopy(module, memo)
        for child in skeleton.modules():
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
                child.sparse = False  # `purecompose.optim.lists` says how tables are updated instead
    except Exception as error:
        raise TypeError(f"{type(module).__name__} cannot be deep-copied: {error}") from error
    splitting.check_hidden(module, memo, twins)
    names_of_twins = {id(twins[key]): name for key, name in names.items()}
    splitting.check_registered(skeleton, memo, names_of_twins)
    if not any(child.training for child in skeleton.modules()):
        skeleton.train()
    set_modes(skeleton, eval_mode, train_mode)
    return Parts(Model(skeleton, names_of_twins, tuple(params)), params, buffers, frozen)


def from_modules(
    modules: Iterable[nn.Module], *, eval_mode: Sequence[str] = (), train_mode: Sequence[str] = ()
) -> Iterator[Parts]:
    """Split modules as `from_module` does; those that differ in numbers only share one architecture."""
    known: list[tuple[nn.Module, Model]] = []
    for module in modules:
        model = next((model for one, model in known if splitting.is_alike(one, module)), None)
        found = None if model is None else _tensors_of(module)
        if model is not None and found is not None and found.slot_names(module) == model.skeleton(True).slot_names():
            yield Parts(model, found.params, found.buffers, found.frozen)
            continue
        parts = from_module(module, eval_mode=eval_mode, train_mode=train_mode)
        if model is None and len(known) < _MOST_FORMS:
            known.append((module, parts.model))
        yield parts


_MOST_FORMS = 32
"""Number of architectures that networks are compared with."""


class _Tensors(NamedTuple):
    """The tensors of a module: their names by `id`, and what `Parts` has."""

    names: dict[int, str]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    frozen: frozenset[str]

    def slot_names(self, module: nn.Module) -> tuple[str, ...]:
        """Return the name of each place's tensor, as `Skeleton.slot_names`."""
        of_places = [self.names[id(place.tensor)] for place in places(module)]
        return tuple(sorted(of_places, key=lambda name: name not in self.params))


def _tensors_of(module: nn.Module, *, is_shared: bool = False) -> _Tensors:
    """Return the tensors of a module, checked."""
    names: dict[int, str] = {}
    parts: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
    known = ChainMap(parts[True], parts[False])
    frozen = set()
    sharing = Sharing()
    for tensor, _, _, name, kind in places(module):
        if id(tensor) in names:
            continue
        is_param = kind == "_parameters"
        splitting.check_tensor(tensor, name, known)
        if not is_shared:
            tie = sharing.add(Member(name, tensor, is_param))
            if tie.tensor is not tensor:
                names[id(tensor)] = tie.name
                continue
            if kind == "__dict__":
                warn(f"{name} is a tensor but neither parameter nor buffer: it becomes a buffer")
        names[id(tensor)] = name
        parts[is_param][name] = tensor.detach() if is_shared else tensor.detach().clone()
        if is_param and not tensor.requires_grad:
            frozen.add(name)
    sharing.check()
    return _Tensors(names, parts[True], parts[False], frozenset(frozen))


def to_module(model: Model, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """Return a plain `nn.Module` in training mode with copies of these tensors; tied tensors remain tied."""
    module = model.skeleton(train=True).filled_copy(params, buffers)
    for one in module.modules():
        if parametrize.is_parametrized(one):
            # torch removes a parametrization from the class, which copies share: those in states would lose it, too.
            shared = type(one)
            own: Any = type(shared.__name__, shared.__bases__, dict(vars(shared)))
            one.__class__ = own
    return module


def _outermost(module: nn.Module, is_found: Callable[[nn.Module], bool], name: str = "") -> Iterator[str]:
    """Yield the names of the modules that a function is true for, without what they contain."""
    if is_found(module):
        yield name
    else:
        for key, child in module.named_children():
            yield from _outermost(child, is_found, f"{name}.{key}".lstrip("."))


def _meta_twin(tensor: Tensor) -> Tensor:
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


# Training and evaluation mode of a network's parts during training


def set_modes(root: nn.Module, eval_mode: Sequence[str], train_mode: Sequence[str]) -> None:
    """Put modules of a network into a mode, with all that they contain; of two patterns, the inner one's decides."""
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


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
