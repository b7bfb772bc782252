"""The memory of a torch optimizer: detected, restored, and extracted as slots."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from purecompose._support.checks import shown
from purecompose._support.functorch import plainly
from purecompose.optim.base import Value
from purecompose.optim.checks import known_part
from purecompose.schedule import Hparam, Product, Schedule


STARTED = "started"
"""Name of the slot that is true for a parameter that has been updated before, 0-d bool."""

_DONE_ONCE = ("_warned", "_need_device_dtype_check")

Settings: TypeAlias = tuple[tuple[str, Any], ...]


class Slot(NamedTuple):
    """One value that an optimizer class remembers of a parameter."""

    name: str
    kind: type
    """Tensor, or the type of a Python value: bool, int or float."""
    shape: torch.Size
    dtype: torch.dtype
    is_on_host: bool
    """True if the class keeps it on the CPU, whatever the parameter's device."""


class Memory(NamedTuple):
    """All that an optimizer class remembers of a parameter."""

    slots: tuple[Slot, ...] = ()
    """Slots that are kept, without `STARTED`."""
    absent: tuple[str, ...] = ()
    """Names of entries that are None after the first step and later."""

    @property
    def kept(self) -> tuple[Slot, ...]:
        """Slots that are kept, including `STARTED`; empty if the class remembers nothing."""
        return (Slot(STARTED, bool, torch.Size(), torch.bool, True), *self.slots) if any(self) else ()


class Refused(TypeError):
    """Error for memory that no slot can hold."""


def read(settings: Settings, value: Value) -> dict[str, Any]:
    """Return settings as the class takes them, with schedules and hparams as floats."""

    def plain(setting: Any) -> Any:
        if isinstance(setting, tuple):
            return tuple(map(plain, setting))
        return float(value(setting)) if isinstance(setting, Hparam | Product | Schedule) else setting

    return {name: plain(setting) for name, setting in settings}


def instance(
    optimizer: type[torch.optim.Optimizer], groups: Sequence[tuple[list[nn.Parameter], dict[str, Any]]]
) -> torch.optim.Optimizer:
    """Return an optimizer for groups of parameters, at least one, with their settings."""
    return optimizer([{"params": params, **settings} for params, settings in groups], **groups[0][1])


@functools.lru_cache(maxsize=1024)
def memory_of(
    optimizer: type[torch.optim.Optimizer],
    settings: Settings,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> Memory:
    """Return what a class remembers of a parameter of this form, found by a step on ones.

    Raises:
        Refused: The class remembers something that no slot can hold.
        Exception: Whatever the class raises for such a parameter.
    """
    if not dtype.is_floating_point and not dtype.is_complex:
        return Memory()  # Parameters of these dtypes are not trained.
    with plainly():
        param = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
        param.grad = torch.ones_like(param)
        probe = instance(optimizer, [([param], read(settings, known_part))])
        before = elsewhere(probe)
        probe.step()
        check_elsewhere(probe, before, [param])
        kept = dict(probe.state.get(param, {}))
    if STARTED in kept:
        raise Refused(f"its memory uses the name {STARTED!r}, which is reserved here for the flag of first updates")
    slots = tuple(_slot(name, value, device) for name, value in kept.items() if value is not None)
    return Memory(slots, tuple(name for name, value in kept.items() if value is None))


def _slot(name: Any, value: Any, device: torch.device) -> Slot:
    if not isinstance(name, str):
        raise Refused(f"it keeps memory under {shown(name)}; names of slots are strings")
    if isinstance(value, Tensor):
        return Slot(name, Tensor, value.shape, value.dtype, value.device.type != device.type)
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64}
    if type(value) not in dtypes:
        raise Refused(f"it keeps {name}={shown(value)} of a parameter; a slot holds a tensor, a number or a bool")
    return Slot(name, type(value), torch.Size(), dtypes[type(value)], True)


def elsewhere(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's data outside of `state`, in a comparable form: its groups' settings and its attributes."""

    def described(held: Any) -> Any:
        if isinstance(held, Tensor):
            return "tensor", id(held), held._version
        return tuple(map(described, held)) if isinstance(held, list | tuple) else held

    groups = {
        f"param_groups[{i}][{name!r}]": described(held)
        for i, group in enumerate(optimizer.param_groups)
        for name, held in group.items()
        if name != "params"
    }
    plain = (bool, int, float, Tensor, list, tuple)
    # The attributes by which torch notes that it has warned, or has checked devices, do not count as memory.
    own = {
        name: described(held)
        for name, held in vars(optimizer).items()
        if isinstance(held, plain) and name != "param_groups" and not name.startswith(_DONE_ONCE)
    }
    return {**groups, **own}


def check_elsewhere(optimizer: torch.optim.Optimizer, before: Mapping[str, Any], params: Iterable[Tensor]) -> None:
    """Raise `Refused` if a step has changed anything outside of the given parameters' memory."""
    after = elsewhere(optimizer)
    changed = [name for name in after if name not in before or after[name] != before[name]]
    if changed:
        raise Refused(f"it keeps memory in {changed[0]}; only what is in state[param] can be held")
    own = {id(param) for param in params}
    if any(id(key) not in own for key in optimizer.state):
        raise Refused("it keeps memory in `state` outside of state[param]; only what is in state[param] can be held")


def put_in(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, nn.Parameter],
    memories: Mapping[str, Memory],
    opt_state: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Put copies of the memory of each parameter that has been updated before into an optimizer."""
    places = [(name, slot.name) for name, memory in memories.items() for slot in memory.kept if slot.is_on_host]
    on_host = dict(zip(places, _on_host([opt_state[slot][name] for name, slot in places]), strict=True))
    for name, memory in memories.items():
        if not memory.kept or not on_host[name, STARTED].item():
            continue
        state: dict[str, Any] = dict.fromkeys(memory.absent)
        for slot in memory.slots:
            copy = on_host[name, slot.name] if slot.is_on_host else opt_state[slot.name][name].detach().clone()
            state[slot.name] = copy if slot.kind is Tensor else copy.item()
        optimizer.state[params[name]] = state


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies on the CPU; tensors of one form are copied together, to wait for the device once per form."""
    copies = [tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach() for tensor in tensors]
    forms: dict[Any, list[int]] = {}
    for i, tensor in enumerate(copies):
        if tensor.device.type != "cpu":
            forms.setdefault((tensor.device, tensor.dtype, tensor.shape), []).append(i)
    for members in forms.values():
        arrived = torch.stack([copies[i] for i in members]).cpu()
        for i, tensor in zip(members, arrived.unbind(), strict=True):
            copies[i] = tensor.clone()
    return copies


def taken_out(state: Mapping[str, Any], memory: Memory, device: torch.device) -> dict[str, Tensor]:
    """Return what an optimizer remembers of a parameter now, as slots on the parameter's device.

    Raises:
        Refused: The memory has another form than after the first step.
    """
    now = [name for name, value in state.items() if value is not None]
    if set(now) != {slot.name for slot in memory.slots}:
        first = ", ".join(slot.name for slot in memory.slots) or "nothing"
        raise Refused(f"it remembers {', '.join(now) or 'nothing'} now, but {first} after its first step")
    slots = {STARTED: torch.ones((), dtype=torch.bool, device=device)} if memory.kept else {}
    for slot in memory.slots:
        value = state[slot.name]
        form = _slot(slot.name, value, device)
        if (form.kind, form.shape, form.dtype) != (slot.kind, slot.shape, slot.dtype):
            raise Refused(
                f"its memory {slot.name!r} is {shown(value)} now, but was a {slot.kind.__name__} of {slot.dtype} and "
                f"shape {tuple(slot.shape)} after its first step"
            )
        if slot.kind is Tensor:
            slots[slot.name] = value.detach().to(device)
        else:
            slots[slot.name] = torch.tensor(value, dtype=slot.dtype, device=device)
    return slots
