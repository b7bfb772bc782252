"""The values of a training run: the fields of a state, what each of them is, and how they are read and replaced.

The properties of a field are declared once, in `FieldInfo`. Fields of a state that a compiled step returned are read
from its buffers by a `BufferLease` (`purecompose.transforms.signature`).
"""

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from purecompose import batch as batches, tree
from purecompose._support import instead
from purecompose._support.specs import shown
from purecompose.core.clock import Clock
from purecompose.core.context import Context, Static
from purecompose.core.ranks import Ranks, Sharing
from purecompose.nn.model import Model
from purecompose.optim.base import matched_or_raise
from purecompose.optim.protocol import carried
from purecompose.schedule import Scalar, Schedule, collect, resolve
from purecompose.time import Timestamp


@dataclass(frozen=True)
class FieldInfo:
    """The properties of one field of `State`, declared only here."""

    persists: bool = False
    """True if the field is part of the state between steps and of checkpoints; otherwise it is `None` there."""
    keeps_form: bool = False
    """True if no step changes its structure, shapes or dtypes, so that compiled steps may write into its memory."""
    leaves_grad: bool = False
    """True if a value set in the body of a `Grad` is kept; otherwise the earlier value is restored after the scope."""
    holds_values: bool = True
    """True if algorithms read and write its value, which is compared when they are traced and tested."""


def _field(info: FieldInfo, default_factory: Callable[[], Any] | None = None) -> Any:
    """Return a dataclass field with its properties as metadata; a default is given by a function.

    A default factory leaves no attribute on the class, so that absent fields are looked up by `Values.__getattr__`.
    """
    default: dict[str, Any] = {} if default_factory is None else {"default_factory": default_factory}
    return field(metadata={"info": info}, **default)


def _none() -> None:
    return None


DONATED = FieldInfo(persists=True, keeps_form=True, leaves_grad=True)
REPORT = FieldInfo(persists=True, leaves_grad=True)
TEMPORARY = FieldInfo()
HIDDEN = FieldInfo(holds_values=False)


class Regrad(Protocol):
    """The part of the running step that computes the gradient; see `State.gradient`."""

    ranks: Ranks | None
    """The processes that share its batch, if there are several."""

    def __call__(self, params: dict[str, Tensor], sharing: Sharing = "all", /) -> tuple[dict[str, Tensor], Tensor]: ...

    def gradients(
        self, of: Sequence[Callable[..., Tensor]], params: dict[str, Tensor], sharing: Sharing
    ) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return the gradients and the loss of each of these losses, in place of the state's own."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Values:
    """The fields of a state; see `State`. Absent fields of the instance are read through its lease."""

    static: Static
    """Everything that is not a tensor: model, loss, optimizer, settings, and the time on the host."""
    params: dict[str, Tensor] = _field(FieldInfo(persists=True, keeps_form=True))
    """Parameters by qualified name."""
    buffers: dict[str, Tensor] = _field(DONATED)
    """Buffers by qualified name."""
    opt_state: Any = _field(DONATED)
    """The optimizer's state, any pytree."""
    slots: dict[str, Any] = _field(DONATED)
    """The memory of each algorithm, by its name."""
    hparams: dict[str, Tensor] = _field(DONATED)
    """Named scalars, 0-d float32."""
    key: Tensor = _field(REPORT)
    """The run's root key, int64 of shape (2,)."""
    loss: Tensor | None = _field(REPORT, _none)
    """The last step's loss, 0-d, NaN before the first; reading its value waits for the device."""
    metrics: dict[str, Tensor] = _field(REPORT, dict)
    """Values that algorithms report about the last step; nothing reads them back."""
    batch: Any = _field(TEMPORARY, _none)
    """Inside a step: the batch, or the microbatch between BEFORE_FORWARD and AFTER_BACKWARD."""
    outputs: Any = _field(FieldInfo(leaves_grad=True), _none)
    """Inside a step: the model's outputs; after several slices of a batch, or on several processes, they are sealed."""
    grads: dict[str, Tensor] | None = _field(TEMPORARY, _none)
    """Inside a step: the gradients of the trainable parameters that the loss reaches; the others are absent."""
    clock: Clock | None = _field(HIDDEN, _none)
    """Inside a step: the time: 0-d tensors `batch`, `epoch`, `batch_in_epoch`, `sample`, `token` and `elapsed`."""
    first_example: Any = _field(HIDDEN, _none)
    """Inside a step: the index in the whole batch of the microbatch's first example; `None` for 0."""
    whole_loss: Any = _field(HIDDEN, _none)
    """Inside a slice, for a loss that couples examples: the loss of all slices, its gradients with respect to the
    slice's outputs, and these outputs; see `purecompose.core.means`."""
    denominators: Any = _field(HIDDEN, _none)
    """For a loss or stage with `denominators`: the numbers it divides by; in a slice, its share of them."""
    regrad: Regrad | None = _field(HIDDEN, _none)
    """Inside a step, after its gradients: a pytree node that runs them again; see `gradient`."""

    @property
    def context(self) -> Context:
        """The static part without the time."""
        return self.static.context

    @property
    def model(self) -> Model:
        """The architecture."""
        return self.static.context.model

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self.static.context.optimizer

    @property
    def timestamp(self) -> Timestamp:
        """The host's counters; sealed inside a step, where `clock` holds the time."""
        return self.static.timestamp  # pyright: ignore[reportReturnType]

    @property
    def device(self) -> torch.device:
        """The device of the state's tensors."""
        return self.key.device

    @property
    def inputs(self) -> Any:
        """The batch's input, by the state's `input_field`."""
        return batches.get(self.batch, self.context.input_field)

    @property
    def targets(self) -> Any:
        """The batch's target, by the state's `target_field`; `None` if that is `None`."""
        return batches.get(self.batch, self.context.target_field)

    @property
    def num_examples(self) -> int:
        """The number of examples in the batch."""
        return self.context.layout.num_examples(self.batch)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with new values in these fields; everything else is shared.

        Besides the fields, `inputs` and `targets` replace members of the batch, `timestamp` the time, and
        `model`, `optimizer`, `frozen` and other names of `Context` the static part. Numbers among `hparams`
        become 0-d float32 tensors. `frozen` lists all parameters to be frozen, by names and patterns (`fnmatch`, on the
        whole name): an empty list makes all trainable. The optimizer gets fresh memory for parameters that had none;
        frozen ones keep theirs, unless there was no step yet.

        Raises:
            TypeError: No field has that name, or an hparam is neither a number nor a tensor of shape (), or (n,) in
                the stacked states of n members.
            ValueError: A name or pattern in `frozen` matches no parameter, `frozen` leaves out a parameter that is not
                floating point, or `params` has other names than the model's.

        Example:
            >>> from purecompose import State, losses, optim
            >>> state = State.create(nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1))
            >>> state.replace(frozen=["b*"]).context.trainable
            ('weight',)
        """
        if not _FIELDS.issuperset(changes):
            changes = _translated(self, changes)
        params = changes.get("params")
        if params is not None and (type(params) is not dict or params.keys() != self.params.keys()):
            _check_params(params, self.params, is_other_model="static" in changes)
        if "hparams" in changes:
            changes["hparams"] = as_hparams(changes["hparams"], changes.get("key", self.key), self.device)
        # This is called ten times a step: `|=` copies faster than `update` or the constructor.
        successor = object.__new__(type(self))
        values = successor.__dict__
        values |= self.__dict__
        values |= changes
        return successor

    def scalar(self, scalar: Scalar) -> float | Tensor:
        """Return the current value of a setting: a number unchanged, an hparam or a schedule as a 0-d tensor.

        Raises:
            KeyError: The state lacks the hparam, or the step does not evaluate the schedule.
            RuntimeError: A schedule is read outside a step.
        """
        if isinstance(scalar, (int, float)):
            return scalar
        return resolve(scalar, hparams=self.hparams, scheduled=self._scheduled)

    def _scheduled(self, schedule: Schedule) -> Tensor:
        if self.clock is None:
            raise RuntimeError(f"{schedule!r} has a value inside a step only; call schedule(timestamp) to look at it")
        return self.clock.scheduled(schedule)

    @property
    def lease(self) -> Any:
        # What reads the fields from a compiled step's buffers, or `None`: a comment, since the reference lists
        # properties with docstrings among the fields of a state.
        return self.__dict__.get("_lease")

    def unleased(self) -> Self:
        """Return the same with all fields read from the buffers of a compiled step."""
        successor = object.__new__(type(self))
        successor.__dict__.update(self.__getstate__())
        return successor

    def __getattr__(self, name: str) -> Any:
        lease, fields = self.lease, self.__dataclass_fields__
        if lease is None or name not in fields:
            raise AttributeError(f"a state has no attribute {name!r}; {_hint(name, fields)}")
        value = self.__dict__[name] = lease.read(name)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields themselves, without a lease, for `copy` and `pickle`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)


_FIELDS = frozenset(field.name for field in dataclasses.fields(Values))
_INFO: dict[str, FieldInfo] = {
    field.name: field.metadata["info"] for field in dataclasses.fields(Values) if "info" in field.metadata
}
TENSOR_FIELDS = tuple(_INFO)
"""The fields that hold tensors, in their order as children of a state, which is a pytree node."""


def fields_where(**properties: bool) -> tuple[str, ...]:
    """Return the names of the fields with these properties (see `FieldInfo`), in the order of `State`."""
    wanted = properties.items()
    return tuple(name for name, info in _INFO.items() if all(getattr(info, key) is value for key, value in wanted))


NO_TEMPORARY: dict[str, None] = dict.fromkeys(fields_where(persists=False))
"""Values of the temporary fields between steps."""


def _hint(name: str, fields: dict[str, Any]) -> str:
    if name in Timestamp.__dataclass_fields__:
        return f"its time is state.timestamp.{name}"
    if hasattr(nn.Module, name):
        return "it is not a module: to_module(state) returns one, and state.to(device) moves the state"
    if text := instead(name):
        return text.lstrip()
    infos = {known: fields[known].metadata.get("info", HIDDEN) for known in fields}
    return f"its fields are {', '.join(known for known, info in infos.items() if info.holds_values)}"


_CONTEXT_FIELDS = frozenset(field.name for field in dataclasses.fields(Context) if field.init)


def _translated(state: Values, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Translate changes by convenient names (of `Context`, `inputs`, `targets`, `timestamp`) to changes of fields."""
    found = {name: value for name, value in changes.items() if name in _FIELDS}
    new_batch, new_static = found.get("batch", state.batch), found.get("static", state.static)
    context = new_static.context
    # The model comes first, because names of parameters refer to the new model.
    for name, value in sorted(changes.items(), key=lambda change: change[0] != "model"):
        if name in _FIELDS:
            continue
        if name in ("inputs", "targets"):
            new_batch = batches.put(new_batch, context.input_field if name == "inputs" else context.target_field, value)
        elif name == "timestamp":
            new_static = Static(new_static.context, value)
        elif name in _CONTEXT_FIELDS:
            new_static = Static(_with(new_static.context, name, value), new_static.timestamp)
        else:
            known = sorted({*_FIELDS, *_CONTEXT_FIELDS, "inputs", "targets", "timestamp"})
            raise TypeError(f"a state has no field {name!r}; it has {', '.join(known)}")
    if "model" in changes:
        buffers = found.get("buffers", state.buffers)
        before = buffers if "settings" in changes else state.buffers
        new_static = Static(new_static.context.with_settings(buffers, before), new_static.timestamp)
    if new_batch is not state.batch:
        found["batch"] = new_batch
    if new_static is not state.static:
        found["static"] = new_static
    if "frozen" in changes:
        context, params = new_static.context, found.get("params", state.params)
        _check_trainable(context.trainable, params)
        if "opt_state" not in found:
            is_new = state.clock is None and state.timestamp.batch == 0
            found["opt_state"] = memory_for(context, params, state.opt_state, is_new=is_new, key=state.key)
    return found


def as_hparams(values: Mapping[str, Any], key: Tensor, device: torch.device) -> Mapping[str, Any]:
    """Return named scalars as tensors on a device: numbers become 0-d float32."""
    num_dims = key.ndim - 1  # a population has a key for each member
    if all(_is_scalar(value, num_dims) and value.device == device for value in values.values()):
        return values
    return {name: _scalar(name, value, num_dims, device) for name, value in values.items()}


def memory_for(
    context: Context, params: Mapping[str, Tensor], opt_state: Any, *, is_new: bool, key: Tensor | None = None
) -> Any:
    """Return the optimizer's state after other parameters have been frozen, with memory for all that train now.

    If `is_new`, because there was no step yet, frozen ones need not keep theirs. The key tells whether it is a
    population's.
    """
    if key is not None and key.ndim > 1:
        members = [tree.map(lambda leaf, i=i: leaf[i], (dict(params), opt_state)) for i in range(len(key))]
        return tree.map(
            lambda *leaves: torch.stack(leaves), *[memory_for(context, *member, is_new=is_new) for member in members]
        )
    kept = {name: name for name in params if not (is_new and name in context.frozen)}
    return carried(context.optimizer, opt_state, params, kept, context.frozen)


def _check_params(given: Any, own: Mapping[str, Tensor], *, is_other_model: bool) -> None:
    """Raise if parameters are not a mapping, or have other names than the model's."""
    if not isinstance(given, Mapping):
        raise TypeError(f"replace(params=...): expected tensors by name, got {shown(given)}")
    if is_other_model or given.keys() == own.keys():
        return
    lacks, strange = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    parts = [f"missing {', '.join(lacks)}"] * bool(lacks) + [f"unknown {', '.join(strange)}"] * bool(strange)
    raise ValueError(
        f"replace(params=...): {' and '.join(parts)}. Pass all parameters, params={{**state.params, name: value}}; to "
        "change which there are, replace the model too, replace(model=..., params=...)"
    )


def _check_trainable(names: Iterable[str], params: Mapping[str, Tensor]) -> None:
    """Raise a `ValueError` if a parameter that is not floating point is not frozen."""
    whole = [name for name in names if not (params[name].is_floating_point() or params[name].is_complex())]
    if whole:
        raise ValueError(
            f"replace(frozen=...) leaves out {', '.join(whole)}, of {params[whole[0]].dtype}: only floating numbers "
            "have a gradient, so freeze it too"
        )


def _is_scalar(value: Any, num_dims: int) -> bool:
    return isinstance(value, Tensor) and value.ndim <= num_dims


def _scalar(name: str, value: Any, num_dims: int, device: torch.device) -> Tensor:
    if _is_scalar(value, num_dims):
        return value.to(device)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return torch.full((), float(value), dtype=torch.float32, device=device)
    raise TypeError(
        f"hparams[{name!r}]: expected a number or a 0-d tensor, got {shown(value)}; a population's has a row for each "
        "member, torch.tensor([0.1, 0.2]). For one of each parameter, name several in the optimizer's groups"
    )


def _with(context: Context, name: str, value: Any) -> Context:
    if name in ("frozen", "paused"):
        value = _parameter_names(name, value, context.param_names)
    context = context.replace(**{name: value})
    if name != "optimizer":
        return context
    return context.replace(schedules=tuple(dict.fromkeys([*context.schedules, *collect(value, Schedule)])))


def _parameter_names(which: str, given: Any, known: tuple[str, ...]) -> frozenset[str]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{which}: expected a collection of names or patterns, as in ['0.*'], got {shown(given)}")
    given = frozenset(given)
    patterns = given.difference(known)
    return given - patterns | matched_or_raise(patterns, known, which)
