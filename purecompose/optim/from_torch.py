"""Any optimizer class of `torch.optim`, or subclass of `torch.optim.Optimizer`, as a pair of pure functions.

A torch optimizer holds parameters and state and writes into both. Here it works on copies: each update creates an
instance, puts the memory in, runs `step()`, and takes the new parameters and memory out again. Python numbers that
`step` changes, such as counters, are kept as 0-d tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from purecompose import tree
from purecompose._support.internals import is_fake, is_transforming, plainly
from purecompose._support.specs import frozen, shown
from purecompose.optim.base import ByGroup, Groups, checked_groups
from purecompose.optim.lists import Moved, Slots
from purecompose.optim.protocol import OptState, Value
from purecompose.schedule import Hparam, Product, Schedule, number
from purecompose.schedule.scalar import known_part


def from_torch(
    optimizer: type[torch.optim.Optimizer], *, groups: Mapping[str, Mapping[str, Any]] | Groups = (), **settings: Any
) -> FromTorch:
    """Return an optimizer class of torch as a pure optimizer, for those that `purecompose.optim` does not have.

    It computes the same results as the class, bit for bit, but slower than an optimizer of this library: every update
    copies parameters, gradients and memory, and on a GPU reads back counters that the class keeps on the host.

    The class cannot be traced: neither `compile` nor `population` nor a gradient through the update works.

    Args:
        optimizer: A subclass of `torch.optim.Optimizer` that moves each parameter by itself. It keeps its memory in
            `state[param]`, as tensors, numbers, bools or None that exist from the first step on.
        groups: Settings for parameters by a pattern of their names, as for `sgd`.
        settings: The arguments of the class, by name. In place of a number, also inside a tuple, an hparam, a schedule
            or a product of them is allowed.

    Returns:
        A frozen, hashable optimizer. Its state is `{slot: {parameter name: tensor}}`, with the names, shapes and
        dtypes of the class; numbers are 0-d tensors. `"started"`, 0-d bool, is true for parameters that have been
        updated before; until then the class initializes its own memory, and the slots are not read.

    Raises:
        TypeError: The argument is not an optimizer class, or it does not take the settings, or one is a tensor; or the
            class needs a closure (LBFGS) or sparse gradients (SparseAdam).
        ValueError: The class rejects a setting or, in `init`, a parameter, or keeps memory outside of `state[param]`.
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
    param_form: Any = None
    """Shape, dtype and device of the parameters that this rule moves, which determine what the class remembers."""

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
            if isinstance(setting, Tensor):
                raise TypeError(
                    f"{self.called}: {name}: expected a number, got {shown(setting)}; an optimizer holds no tensors: "
                    "use hparam('lr', 0.1), whose tensor is kept in state.hparams"
                )
        object.__setattr__(self, "settings", settings)
        try:
            self.optimizer([nn.Parameter(torch.ones(2, 2))], **_read(settings, known_part))
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"{self.called}: {error}") from error
        object.__setattr__(self, "groups", checked_groups(self, self.groups))

    @property
    def settings_by_name(self) -> dict[str, Any]:
        parameters = list(inspect.signature(self.optimizer).parameters.values())[1:]
        defaults = {one.name: None if one.default is one.empty else one.default for one in parameters}
        return {**defaults, **dict(self.settings)}

    def overridden(self, options: Mapping[str, Any]) -> FromTorch:
        return FromTorch(self.optimizer, tuple({**dict(self.settings), **options}.items()))

    def form(self, param: Tensor) -> Any:
        return param.shape, param.dtype, torch.device("cpu") if param.is_meta else param.device

    def formed(self, form: Any) -> FromTorch:
        return dataclasses.replace(self, param_form=form)

    @property
    def memory(self) -> dict[str, Any]:
        """What the class remembers of a parameter of this form after its first step, by name."""
        if self.param_form is None:
            return {}
        shape, dtype, device = self.param_form
        try:
            return _memory_of(self.optimizer, self.settings, shape, dtype, device)
        except Exception as error:
            raise ValueError(
                f"{self.called}: cannot move a parameter of shape {tuple(shape)} and {dtype}: {error}"
            ) from error

    @property
    def slots(self) -> tuple[str, ...]:
        kept = tuple(name for name, value in self.memory.items() if value is not None)
        return (STARTED, *kept) if self.memory else ()

    def fresh(self, slot: str, param: Tensor) -> Tensor:
        """Return zeros, which the class does not read before its first step."""
        if slot == STARTED:
            return torch.zeros((), dtype=torch.bool, device=param.device)
        return torch.zeros_like(_tensor(self.memory[slot]), device=param.device)

    def update(
        self,
        grads: Mapping[str, Tensor],
        opt_state: Mapping[str, Mapping[str, Tensor]],
        params: Mapping[str, Tensor],
        value: Value = number,
    ) -> tuple[dict[str, Tensor], OptState]:
        """Move every parameter that has a gradient, by one `step` of the class; see `Optimizer.update`."""
        slots = (tensor for tensors in opt_state.values() for tensor in tensors.values())
        self._check_untraced([*grads.values(), *params.values(), *slots])

        def number_of(scalar: Any) -> float:
            found = value(scalar)
            self._check_untraced([found] if isinstance(found, Tensor) else [])
            return float(found)

        return super().update(grads, opt_state, params, number_of)

    def move(self, grads: list[Tensor], params: list[Tensor], slots: Slots, value: Value) -> Moved:
        memory, settings = self.memory, _read(self.settings, value)
        with torch.no_grad():
            copies = [nn.Parameter(param.detach().clone()) for param in params]
            for copy, grad in zip(copies, grads, strict=True):
                copy.grad = grad.detach().clone()
            made = self.optimizer(copies, **settings)
            for i, has_started in enumerate(slots.get(STARTED, ())):
                if has_started:
                    made.state[copies[i]] = {
                        name: None if kept is None else _as_kept(kept, slots[name][i]) for name, kept in memory.items()
                    }
            try:
                _run(made)
                states = [_checked(made.state.get(copy, {}), memory) for copy in copies]
            except _MemoryError as error:
                raise RuntimeError(f"{self.called}: {error}") from error
        device = params[0].device
        new = {name: [state[name].to(device) for state in states] for name in slots if name != STARTED}
        if slots:
            new = {STARTED: [torch.ones_like(flag) for flag in slots[STARTED]], **new}
        return [copy.detach() for copy in copies], new

    def _check_untraced(self, tensors: Sequence[Tensor]) -> None:
        """Raise if the update is transformed, traced or differentiated; its result would be missing or wrong there."""
        is_traced = torch.compiler.is_compiling() or get_proxy_mode() is not None or any(map(is_fake, tensors))
        is_differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if is_transforming() or is_traced or is_differentiated:
            raise RuntimeError(
                f"{self.called}: a torch optimizer writes into its memory, so its update can be neither traced (by "
                "compile: a FakeTensor has no values), mapped (as in a population) nor differentiated: leave the step "
                "uncompiled, call it within torch.no_grad(), or use an optimizer of purecompose.optim, such as adamw"
            )


# The class, its settings and its memory.

STARTED = "started"
"""Name of the slot that is true for a parameter that has been updated before, 0-d bool."""

_DONE_ONCE = ("_warned", "_need_device_dtype_check")
"""Beginnings of the names of attributes by which torch notes that it has warned, or has checked devices."""

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}

Settings: TypeAlias = tuple[tuple[str, Any], ...]


class _MemoryError(TypeError):
    """Error for memory that no slot can hold."""


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
            f"from_torch({_name(optimizer)}): it evaluates the loss several times in a step, by a closure: use "
            "optim.lbfgs, which is equal to LBFGS"
        )
    if issubclass(optimizer, torch.optim.SparseAdam):
        raise TypeError(
            f"from_torch({_name(optimizer)}): it takes sparse gradients, but here they are dense; use "
            "optim.sparse_adam, which is equal to it"
        )


def _read(settings: Settings, value: Value) -> dict[str, Any]:
    """Return settings as the class takes them, with schedules and hparams as floats."""

    def plain(setting: Any) -> Any:
        if isinstance(setting, tuple):
            return tuple(map(plain, setting))
        return float(value(setting)) if isinstance(setting, Hparam | Product | Schedule) else setting

    return {name: plain(setting) for name, setting in settings}


@functools.lru_cache(maxsize=1024)
def _memory_of(
    optimizer: type[torch.optim.Optimizer],
    settings: Settings,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Return what a class remembers of a parameter of this form, found by a step on ones."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return {}  # Parameters of these dtypes are not trained.
    with plainly():
        param = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))
        param.grad = torch.ones_like(param)
        made = optimizer([param], **_read(settings, known_part))
        _run(made)
        memory = dict(made.state.get(param, {}))
        small = tuple(min(size, 4) for size in shape)
        if not _moves_alone(optimizer, _read(settings, known_part), small, dtype, device):
            raise _MemoryError(
                "it moves a parameter by the gradients of others, such as by the norm of all, and here parameters are "
                "moved in groups; clip gradients by a method, such as gradient_clipping"
            )
    if STARTED in memory:
        raise _MemoryError(
            f"its memory uses the name {STARTED!r}, which is reserved here for the flag of first updates"
        )
    for value in memory.values():
        if value is not None:
            _tensor(value)
    return memory


def _moves_alone(
    optimizer: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Return whether a parameter of a small shape moves as it does beside another one with much larger gradients."""

    def moved(num: int) -> Tensor:
        params = [nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for _ in range(num)]
        for place, param in enumerate(params):
            param.grad = torch.full_like(param, 0.5 * 1000.0**place)
        optimizer(params, **settings).step()
        return params[0].detach()

    return torch.equal(moved(1), moved(2))


def _run(optimizer: torch.optim.Optimizer) -> None:
    """Run a step, and raise a `_MemoryError` if it changes anything outside of the parameters' memory."""
    before = _elsewhere(optimizer)
    optimizer.step()
    params = {param for group in optimizer.param_groups for param in group["params"]}
    if _elsewhere(optimizer) != before or not params.issuperset(optimizer.state):
        raise _MemoryError(
            "it keeps memory in its groups or attributes, or in `state` outside of state[param]; only what is in "
            "state[param] can be held"
        )


def _elsewhere(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's data outside of `state`, in a comparable form: its groups' settings and its attributes."""
    groups = [{name: held for name, held in group.items() if name != "params"} for group in optimizer.param_groups]
    plain = (bool, int, float, Tensor, list, tuple)
    own = {
        name: held
        for name, held in vars(optimizer).items()
        if isinstance(held, plain) and name != "param_groups" and not name.startswith(_DONE_ONCE)
    }
    return repr(tree.map(lambda leaf: (id(leaf), leaf._version) if isinstance(leaf, Tensor) else leaf, (groups, own)))


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) not in _DTYPES:
        raise _MemoryError(f"it keeps {shown(value)} of a parameter; a slot holds a tensor, a number or a bool")
    return torch.tensor(value, dtype=_DTYPES[type(value)])


def _as_kept(kept: Any, slot: Tensor) -> Any:
    """Return a copy of a slot's value in the form and on the device in which the class keeps it."""
    return slot.detach().clone().to(kept.device) if isinstance(kept, Tensor) else slot.item()


def _checked(state: Mapping[str, Any], memory: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what an optimizer remembers of a parameter now, in the form in which it did after its first step."""
    now, first = (
        {name: _tensor(value) for name, value in values.items() if value is not None} for values in (state, memory)
    )
    forms = [{name: (value.shape, value.dtype) for name, value in values.items()} for values in (now, first)]
    if forms[0] != forms[1]:
        found, expected = (
            ", ".join(f"{name} {tuple(size)} {kind}" for name, (size, kind) in one.items()) for one in forms
        )
        raise _MemoryError(f"it remembers {found or 'nothing'} now, but {expected or 'nothing'} after its first step")
    return now
