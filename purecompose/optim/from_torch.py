"""Any optimizer class of `torch.optim`, or subclass of `torch.optim.Optimizer`, as a pair of pure functions.

A torch optimizer holds parameters and state and writes into both. Here it works on copies: each update creates an
instance, puts the memory in, runs `step()`, and takes the new parameters and memory out again. Python numbers that
`step` changes, such as counters, are kept as 0-d tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from purecompose._support.checks import frozen, shown
from purecompose._support.functorch import is_fake, is_transforming, plainly
from purecompose.optim.base import ByGroup, OptState, Value, cells
from purecompose.optim.checks import Groups, checked_groups, match_or_raise
from purecompose.schedule import Hparam, Product, Schedule, number
from purecompose.schedule.scalar import known_part


def from_torch(
    optimizer: type[torch.optim.Optimizer], *, groups: Mapping[str, Mapping[str, Any]] | Groups = (), **settings: Any
) -> FromTorch:
    """Return an optimizer class of torch as a pure optimizer, for those that `purecompose.optim` does not have.

    It computes the same results as the class, bit for bit, and an interrupted run resumes with the same bits, because
    the optimizer's state contains everything that the class keeps. It is slower than an optimizer of this library,
    since every update copies parameters, gradients and memory, and on a GPU a counter that the class keeps on the host
    is read back once a step.

    The class cannot be traced: a step with it runs as composed, and neither `compile` nor `population` nor a gradient
    through the update works. Each of them raises an error that explains this.

    Args:
        optimizer: A subclass of `torch.optim.Optimizer`. It keeps its memory in `state[param]`, as tensors, numbers,
            bools or None that exist from the first step on.
        groups: Options for parameters by a pattern of their names (`fnmatch`, first match wins), in place of the
            settings: `{"*.bias": {"weight_decay": 0.0}}`.
        settings: The arguments of the class, by name. In place of a number, also inside a tuple, an hparam, a schedule
            or a product of them is allowed; the class receives its value as a float.

    Returns:
        A frozen, hashable optimizer. Its state is `{slot: {parameter name: tensor}}`, with the names, shapes and
        dtypes of the class; numbers are 0-d tensors. `"started"`, 0-d bool, is true for parameters that have been
        updated before; until then the class initializes its own memory, and the slots are not read.

    Raises:
        TypeError: The argument is not an optimizer class, or it does not take the settings, or one is a tensor; or the
            class needs a closure (LBFGS) or sparse gradients (SparseAdam), or keeps memory outside of `state[param]`.
        ValueError: The class rejects a setting or, in `init`, a parameter.
        RuntimeError: From `update`, if it is traced, mapped or differentiated.

    Example:
        >>> optimizer = from_torch(torch.optim.Adamax, lr=0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, opt_state = optimizer.update({"w": torch.tensor([3.0, -0.5])}, optimizer.init(params), params)
        >>> params["w"], list(opt_state)
        (tensor([0.5000, 2.5000]), ['started', 'step', 'exp_avg', 'exp_inf'])
    """
    # The class converts groups to tuples when it checks them.
    return FromTorch(optimizer, tuple(settings.items()), groups)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, repr=False)
class FromTorch(ByGroup):
    """Optimizer returned by `from_torch`; see there."""

    optimizer: type[torch.optim.Optimizer]
    settings: Settings = ()
    groups: Groups = ()

    def __repr__(self) -> str:
        settings = {name: repr(setting) for name, setting in self.settings}
        if self.groups:
            settings["groups"] = repr({pattern: dict(options) for pattern, options in self.groups})
        listed = [_name(self.optimizer), *(f"{name}={text}" for name, text in settings.items())]
        return f"from_torch({', '.join(listed)})"

    @property
    def called(self) -> str:
        return f"from_torch({_name(self.optimizer)})"

    def __post_init__(self) -> None:
        _check_class(self.optimizer)
        settings = tuple((name, frozen(setting)) for name, setting in sorted(dict(self.settings).items()))
        for name, setting in settings:
            _check_setting(setting, f"{self.called}: {name}")
        if dict(settings).get("differentiable"):
            raise ValueError(
                f"{self.called}: differentiable=True is not supported: the update works on copies and passes no "
                "gradient on. To differentiate through steps use an optimizer of purecompose.optim, such as adamw"
            )
        object.__setattr__(self, "settings", settings)
        self._try_out()
        object.__setattr__(self, "groups", checked_groups(self, self.groups))

    def _try_out(self) -> None:
        """Run one step on a small matrix, which finds most mistakes when the optimizer is built."""
        try:
            instance(self.optimizer, [([nn.Parameter(torch.ones(2, 2))], read(self.settings, known_part))])
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"{self.called}: {error}") from error
        try:
            memory_of(self.optimizer, self.settings, torch.Size((2, 2)), torch.float32, torch.device("cpu"))
        except Refused as error:
            raise TypeError(f"{self.called}: {error}") from error
        except Exception:  # noqa: BLE001
            return  # The settings may need a GPU, or parameters of another form: `init` tries the real ones.

    @property
    def settings_by_name(self) -> dict[str, Any]:
        parameters = list(inspect.signature(self.optimizer).parameters.values())[1:]
        defaults = {one.name: None if one.default is one.empty else one.default for one in parameters}
        return {**defaults, **dict(self.settings)}

    def overridden(self, options: Mapping[str, Any]) -> FromTorch:
        return FromTorch(self.optimizer, tuple({**dict(self.settings), **options}.items()))

    @property
    def slots(self) -> tuple[str, ...]:
        return ()  # Each parameter has its own.

    def init(self, params: Mapping[str, Tensor]) -> OptState:
        """Return zeros for all that the class will remember of every parameter; see `Optimizer.init`.

        Raises:
            ValueError: The class rejects a parameter, or a group's pattern matches nothing.
        """
        for pattern, _ in self.groups:
            match_or_raise(pattern, params, f"{self.called}: groups[{pattern!r}]")
        rules = {name: cell.rule for cell in cells(self, tuple(params)) for name in cell.names}
        opt_state: OptState = {}
        for name, param in params.items():
            for slot in self._memory_of(rules[name], name, param).kept:
                zeros = torch.zeros(slot.shape, dtype=slot.dtype, device=param.device)
                opt_state.setdefault(slot.name, {})[name] = zeros
        return opt_state

    def update(
        self,
        grads: Mapping[str, Tensor],
        opt_state: Mapping[str, Mapping[str, Tensor]],
        params: Mapping[str, Tensor],
        value: Value = number,
    ) -> tuple[dict[str, Tensor], OptState]:
        """Move every parameter that has a gradient, by one `step` of the class; see `Optimizer.update`.

        Raises:
            KeyError: A gradient has no parameter, or a parameter is missing in `opt_state`.
            RuntimeError: The update is traced, mapped or differentiated; or the form of the memory differs from that
                after the first step.
        """
        new_params = dict(params)
        new_opt_state = {slot: dict(leaves) for slot, leaves in opt_state.items()}
        if not grads:
            return new_params, new_opt_state
        found = cells(self, tuple(grads))
        rules = [cast(FromTorch, cell.rule) for cell in found]
        self._check_known(grads, params)
        self._check_untraced(
            [*grads.values(), *params.values(), *(t for ts in opt_state.values() for t in ts.values())]
        )
        memories = {
            name: self._memory_of(rule, name, params[name], opt_state)
            for rule, cell in zip(rules, found, strict=True)
            for name in cell.names
        }
        settings = [read(rule.settings, self._untraced(value)) for rule in rules]
        with torch.no_grad():
            copies = {name: nn.Parameter(params[name].detach().clone()) for name in grads}
            for name, copy in copies.items():
                copy.grad = grads[name].detach().to(copy.dtype, copy=True)
            members = [[copies[name] for name in cell.names] for cell in found]
            made = instance(self.optimizer, list(zip(members, settings, strict=True)))
            put_in(made, copies, memories, opt_state)
            before = elsewhere(made)
            made.step()
            try:
                check_elsewhere(made, before, copies.values())
                for name, copy in copies.items():
                    new_params[name] = copy.detach()
                    for slot, tensor in taken_out(made.state.get(copy, {}), memories[name], copy.device).items():
                        new_opt_state[slot][name] = tensor
            except Refused as error:
                raise RuntimeError(f"{self.called}: {error}") from error
        return new_params, new_opt_state

    def _memory_of(
        self, rule: Any, name: str, param: Tensor, opt_state: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> Memory:
        """Return the memory that the class keeps for a parameter; if a state is given, check that it contains all."""
        device = torch.device("cpu") if param.is_meta else param.device
        if device.type == "cpu" and dict(rule.settings).get("capturable"):
            raise ValueError(
                f"{self.called}: capturable=True keeps counters on a GPU, but the parameter {name!r} is on the CPU: "
                "leave it out, or move the network to the GPU before State.create"
            )
        try:
            memory = memory_of(self.optimizer, rule.settings, param.shape, param.dtype, device)
        except Exception as error:
            form = f"{name!r} of shape {tuple(param.shape)} and {param.dtype}"
            raise ValueError(f"{self.called}: cannot move the parameter {form}: {error}") from error
        for slot in memory.kept:
            if opt_state is not None and name not in opt_state.get(slot.name, {}):
                raise KeyError(
                    f"{self.called}: opt_state[{slot.name!r}] holds nothing for parameter {name!r}; "
                    "opt_state must come from this optimizer's init(params), of the same settings and names"
                )
        return memory

    def _check_known(self, grads: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
        for name in grads:
            if name not in params:
                raise KeyError(
                    f"{self.called}: got a gradient for {name!r}, which is not among the {len(params)} parameters"
                )

    def _untraced(self, value: Value) -> Value:
        """Return a reader of settings that returns floats and rejects traced tensors."""

        def number_of(scalar: Any) -> float:
            found = value(scalar)
            if isinstance(found, Tensor):
                self._check_untraced([found])
            return float(found)

        return number_of

    def _check_untraced(self, tensors: Sequence[Tensor]) -> None:
        """Raise if the update is transformed, traced or differentiated; its result would be missing or wrong there."""
        own = "use an optimizer of purecompose.optim, such as adamw"
        if is_transforming():
            raise RuntimeError(
                f"{self.called}: its update cannot run under vmap (as in a population), grad or another transform of "
                f"torch.func, since a torch optimizer writes into its state. Train members one by one, or {own}"
            )
        if torch.compiler.is_compiling() or get_proxy_mode() is not None or any(map(is_fake, tensors)):
            raise RuntimeError(
                f"{self.called}: its update cannot be traced (it got a FakeTensor or a proxy, which has no values). "
                f"Leave the step uncompiled, or {own}"
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                f"{self.called}: its update passes no gradient on, but a parameter, gradient, slot or setting requires "
                f"one. Call it within torch.no_grad() if none is wanted, or {own}"
            )


# The class and its settings.


def _name(optimizer: Any) -> str:
    """Return the class's name as it is written in code."""
    is_torchs = getattr(torch.optim, optimizer.__name__, None) is optimizer
    return f"torch.optim.{optimizer.__name__}" if is_torchs else f"{optimizer.__module__}.{optimizer.__qualname__}"


def _check_class(optimizer: Any) -> None:
    if not isinstance(optimizer, type) or not issubclass(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "from_torch: expected a class of torch's optimizers and its settings, as in "
            f"from_torch(torch.optim.NAdam, lr=0.002), got {shown(optimizer)}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"from_torch({_name(optimizer)}): it evaluates the loss several times in a step, by a closure, but "
            "here gradients are computed once, before the update; a method at Event.AFTER_TRAIN_BATCH can evaluate it "
            "by state.gradient(params)"
        )
    if issubclass(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            f"from_torch({_name(optimizer)}): it takes sparse gradients, but here they are dense; use adam, which "
            "also moves embeddings"
        )


def _check_setting(setting: Any, where: str) -> None:
    if isinstance(setting, Tensor):
        raise TypeError(
            f"{where}: expected a number, got {shown(setting)}; an optimizer holds no tensors: use hparam('lr', 0.1), "
            "whose tensor is kept in state.hparams"
        )
    try:
        hash(setting)
    except TypeError:
        raise TypeError(f"{where}: expected a hashable setting, got {shown(setting)}") from None


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
