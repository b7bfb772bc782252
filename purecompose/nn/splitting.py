"""How a network splits into architecture and tensors: the places of its tensors, those that share memory, and what
cannot be split.

A place is an entry of a container that holds a tensor: a module's parameters and buffers, and lists and dictionaries
among its attributes. The checks are made when a state is created.
"""

import copy
import functools
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from purecompose._support.contexts import memory_of, storage_of
from purecompose._support.device import is_shard, local
from purecompose._support.messages import warn
from purecompose._support.objects import read_by


OWN = frozenset(vars(nn.Module()))
"""Names of torch's own entries in every module's `__dict__`."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


CACHES = ("_flat_weights", "_flat_weight_refs")
"""Attributes that torch's recurrent layers compute again at every call."""


class Place(NamedTuple):
    """Place of a tensor: `container[key]` is `tensor`; `kind` is the attribute of the module that leads there."""

    tensor: Tensor
    container: Any
    key: Any
    name: str
    kind: str


def places(module: nn.Module) -> Iterator[Place]:
    """Yield every place of a tensor, registered ones first; a tied tensor has several."""
    modules = list(module.named_modules())
    for kind in ("_parameters", "_buffers", "__dict__"):
        for prefix, child in modules:
            container = getattr(child, kind)
            for key in list(container):
                if kind != "__dict__" or key not in OWN:
                    yield from _inside(container, key, f"{prefix}.{key}".lstrip("."), kind)


def _inside(container: Any, key: Any, name: str, kind: str) -> Iterator[Place]:
    value = container[key]
    if isinstance(value, Tensor):
        yield Place(value, container, key, name, kind)
    elif isinstance(value, (list, dict)):
        for inner in range(len(value)) if isinstance(value, list) else list(value):
            yield from _inside(value, inner, f"{name}.{inner}", kind)


class Member(NamedTuple):
    """A parameter or buffer under its first name."""

    name: str
    tensor: Tensor
    is_param: bool


class Sharing:
    """Registry that finds tied tensors of a network among different objects.

    Two parameters, or two buffers, with the same memory, shape, strides, dtype and `requires_grad` are tied:
    `a.weight.data = b.weight.data` ties them just as `a.weight = b.weight` does.
    """

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._by_memory: dict[tuple[object, ...], Member] = {}

    def add(self, member: Member) -> Member:
        """Register a tensor; return the member that it is tied to, or itself."""
        tensor = local(member.tensor)
        if tensor.layout is not torch.strided or not tensor.numel():
            return member
        tie = self._by_memory.setdefault((*memory_of(tensor), member.is_param, tensor.requires_grad), member)
        if tie is member:
            self._members.append(member._replace(tensor=tensor))
        return tie

    def check(self) -> None:
        """Look for tensors that share memory without being tied; a state holds each of them separately."""
        for first, second in self._overlaps():
            what = f"{first.name!r} and {second.name!r} share memory, but are separate tensors in a state"
            if first.is_param or second.is_param:
                raise ValueError(
                    f"{what}: training one would no longer change the other. Keep one parameter and compute the other "
                    "tensor from it in forward, or tie them (same shape, strides and requires_grad)"
                )
            warn(f"{what}: a write to one in forward will not change the other")

    def _overlaps(self) -> Iterator[tuple[Member, Member]]:
        by_storage: dict[int, list[Member]] = {}
        for member in self._members:
            by_storage.setdefault(storage_of(member.tensor), []).append(member)
        for members in by_storage.values():
            members.sort(key=lambda member: _span(member.tensor)[0])
            for index, first in enumerate(members):
                end = _span(first.tensor)[1]
                for second in members[index + 1 :]:
                    if _span(second.tensor)[0] >= end:
                        break
                    if _overlap(first.tensor, second.tensor):
                        yield first, second


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets of a tensor's first byte in its storage and of the byte after its last."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * tensor.element_size()


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors whose spans intersect overlap; columns of one matrix, for example, do not."""
    if first.dtype is not second.dtype or (first.is_contiguous() and second.is_contiguous()):
        return True
    numbers = torch.arange(first.untyped_storage().nbytes() // first.element_size())
    places = (numbers.as_strided(one.shape, one.stride(), one.storage_offset()) for one in (first, second))
    return bool(torch.isin(*places).any())


def check_modules(module: nn.Module) -> None:
    """Reject modules whose weights cannot be exchanged."""
    for name, child in module.named_modules():
        where, kind = f"{name!r}" if name else "the network", type(child).__name__
        if isinstance(child, torch.jit.ScriptModule):
            raise TypeError(
                f"{where} is a {kind}, scripted or traced by torch.jit, which cannot compute with other weights: pass "
                "the module as it was before torch.jit.script or torch.jit.trace"
            )
        if any(hasattr(value, "_torchdynamo_orig_callable") for value in _attributes(child).values()):
            raise TypeError(
                f"{where} was compiled by torch.compile: pass the plain network (net._orig_mod, or the module before "
                "torch.compile) and compile the whole step, pc.compile(step)"
            )
        if kind in _WRAPPERS and type(child).__module__.startswith("torch."):
            raise TypeError(
                f"{where} is a {kind}: pass the network inside it (net.module); pc.data_parallel(step) trains on "
                "several devices"
            )


_EXACT = frozenset({type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size})


def is_alike(first: Any, other: Any, seen: dict[int, int] | None = None) -> bool:
    """Return whether two modules, or two values in them, differ in the numbers of tensors only.

    Other objects than modules, tensors, containers and plain values count as different, even if they are the same.
    """
    kind = type(first)
    if kind is not type(other):
        return False
    if kind in _EXACT:
        return first == other
    if kind in (float, complex):
        return repr(first) == repr(other)  # 0.0 == -0.0
    if kind in (types.FunctionType, types.BuiltinFunctionType):
        return first is other and (first.__module__ or "torch").startswith("torch")
    seen = {} if seen is None else seen
    if id(first) in seen:
        return seen[id(first)] == id(other)
    seen[id(first)] = id(other)
    if isinstance(first, Tensor):
        forms = [(x.layout, x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in (first, other)]
        return first.layout is torch.strided and forms[0] == forms[1] and not vars(first) and not vars(other)
    if isinstance(first, nn.Module):
        first, other = ({key: x for key, x in vars(one).items() if key not in CACHES} for one in (first, other))
    elif kind is set:
        return first == other and all(type(one) is str for one in first)
    elif kind not in (dict, OrderedDict, list, tuple):
        return False
    if len(first) != len(other):
        return False
    if isinstance(first, dict):
        if list(first) != list(other) or not all(type(key) in (str, int) for key in first):
            return False
        first, other = first.values(), other.values()
    for one, another in zip(first, other, strict=True):  # a loop, since a generator would cost more than the rest
        if not is_alike(one, another, seen):
            return False
    return True


def sparse_tables(module: nn.Module) -> list[str]:
    """Return the names of the weights of embeddings with `sparse=True`."""
    return [
        f"{name}.weight".lstrip(".")
        for name, child in module.named_modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    ]


_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module owns, and that its copy owns as well."""
    return {key: value for key, value in vars(module).items() if key not in _NOT_COPIED}


_NOT_COPIED = (OWN - set(HOOKS)) | {"_compiled_call_impl"}
"""Names of torch's own attributes, and of the one that it does not copy."""


def check_tensor(tensor: Tensor, name: str, others: Container[str]) -> None:
    """Raise if a state could not hold a tensor, or would lose something attached to it."""
    if is_lazy(tensor):
        raise ValueError(f"{name} has no shape yet (a lazy module): run the module once on a batch first")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: give it values first (to_empty, load)")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name} is sparse ({tensor.layout}), and a state holds dense tensors: register its indices and values as "
            "buffers, and make the sparse tensor in forward, torch.sparse_coo_tensor(self.indices, self.values, size)"
        )
    # The older spectral_norm keeps a plain copy, which is not computed before the first forward pass.
    is_copy = not isinstance(tensor, nn.Parameter) and f"{name}_orig" in others and f"{name}_u" in others
    if tensor.grad_fn is not None or is_copy:
        raise ValueError(
            f"{name} is computed from other tensors, as torch.nn.utils.weight_norm, spectral_norm and prune leave it: "
            "use torch.nn.utils.parametrizations, or make it permanent (prune.remove)"
        )
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"{name} has hooks, which a state would lose, since its tensors are new ones in each step: remove them, "
            "and edit state.grads in an algorithm at Event.AFTER_TRAIN_BATCH"
        )
    if not is_shard(tensor) and _has_own_operations(type(tensor)):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, a subclass of Tensor with its own operations, which transforms "
            "and compiled steps would drop: keep a plain tensor, and put the operations into a module or a "
            "parametrization (torch.nn.utils.parametrize)"
        )


def _has_own_operations(kind: type) -> bool:
    """Return whether a class outside of torch overrides operations on its tensors."""
    names = ("__torch_function__", "__torch_dispatch__")
    owners = [cls for name in names for cls in kind.__mro__ if name in vars(cls)]
    return any(cls.__module__.partition(".")[0] != "torch" for cls in owners)


def check_hidden(module: nn.Module, memo: Mapping[int, Any], twins: Mapping[int, Tensor]) -> None:
    """Raise a `ValueError` for tensors that were copied because they have no twin: weights outside of the state."""
    hidden = {key: value for key, value in memo.items() if isinstance(value, Tensor) and key not in twins}
    if hidden:
        found = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in list(hidden.values())[:3])
        where = ", ".join(_attributes_with(hidden, module, twins)) or "its attributes"
        raise ValueError(
            f"{type(module).__name__} holds {len(hidden)} tensors in tuples or objects, where no state can "
            f"reach them: {found}, in {where}. Keep them in lists or dictionaries, or register them as buffers"
        )


def _attributes_with(hidden: Container[int], module: nn.Module, twins: Mapping[int, Tensor]) -> Iterator[str]:
    """Yield the names of the attributes in which a deep copy finds tensors with these ids."""
    for name, child in module.named_modules():
        for key, value in _attributes(child).items():
            memo: dict[int, Any] = dict(twins)
            copy.deepcopy(value, memo)
            if any(one in hidden for one in memo):
                yield f"{name}.{key}".lstrip(".")


def check_registered(skeleton: nn.Module, memo: Mapping[int, Any], names: Mapping[int, str]) -> None:
    """Raise a `ValueError` for unregistered modules with the network's tensors, which a state could not replace."""
    registered = set(skeleton.modules())
    for value in memo.values():
        if isinstance(value, nn.Module) and value not in registered:
            shared = [names[id(place.tensor)] for place in places(value) if id(place.tensor) in names]
            if shared:
                raise ValueError(
                    f"{type(skeleton).__name__} holds a {type(value).__name__}, which contains {shared[0]!r} of the "
                    "network, in a list, tuple or object: register it as a submodule, by an attribute or in an "
                    "nn.ModuleList"
                )


def check_functions(module: nn.Module, names: Mapping[int, str]) -> None:
    """Raise a `ValueError` for functions and weak references that a copy of the network would share with it.

    They would continue to use the original's weights.
    """
    parts = {id(child): f"the module {name or 'itself'!r}" for name, child in module.named_modules()}
    parts |= {key: f"the tensor {name!r}" for key, name in names.items()}
    for prefix, child in module.named_modules():
        for key, value in _attributes(child).items():
            for held, how in _kept(value, set()) if key not in CACHES else ():
                if id(held) in parts:
                    where = f"{prefix}.{key}".lstrip(".")
                    raise ValueError(
                        f"{where} has a {how} that keeps {parts[id(held)]}: it would continue to use the original "
                        f"network. {_REMEDIES[how]}"
                    )


_REMEDIES = {
    "function": "Make it a method, or let a hook use the module it is given",
    "weak reference": "Keep the module itself in a list or tuple, such as self.parent = [module]",
}


def _kept(value: Any, seen: set[int], how: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the modules and tensors that functions and weak references in a value keep, with the kind of the keeper.

    Functions keep them in closures, defaults and global names.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (nn.Module, Tensor)):
        if how:
            yield value, how
        return
    inside: list[Any] = []
    if isinstance(value, types.FunctionType):
        # Functions among the globals are not followed, since they would lead through whole libraries.
        found = read_by(value, (nn.Module, Tensor, list, tuple, dict))
        how, inside = "function", [place.value for place in found]
    elif isinstance(value, weakref.ReferenceType):
        how, inside = "weak reference", [value()]
    elif isinstance(value, types.MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        inside = [value.func, value.args, value.keywords]
    elif isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif is_users_object(value):
        inside = list(vars(value).values())
    for member in inside:
        yield from _kept(member, seen, how)


def is_users_object(value: Any) -> bool:
    """Return whether this is an instance of a user's class, of which a skeleton has its own copy."""
    kind = type(value)
    root = (kind.__module__ or "").partition(".")[0]
    is_others = root in sys.stdlib_module_names and root != "types"
    if is_others or root in ("torch", "numpy", "purecompose") or isinstance(value, type):
        return False
    return hasattr(value, "__dict__") and not hasattr(kind, "__deepcopy__")
