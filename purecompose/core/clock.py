"""Values that Python holds and a step reads: the time, and what a loss reads besides outputs and targets.

Code is traced once and serves all steps, so no number that it contains may change. The time is therefore a small
tensor, the clock, which each step fills on the host with the counters of its timestamp and the values of all schedules.

What a loss refers to is found by following its references; see `purecompose._support.objects`. Parameters and buffers
of a module become part of the state. Schedules and named scalars among its attributes are replaced in each call by
tensors with their present values. All other numbers and tensors are constants, which must not change.
"""

import copy
import functools
import math
import types
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from purecompose import losses, tree
from purecompose._support.device import sent
from purecompose._support.objects import Place, attributes, check_hidden, fingerprint, reached
from purecompose._support.specs import shown
from purecompose.nn.keyed.draws import current_run
from purecompose.nn.model import Model, Parts, from_module
from purecompose.random.keys import fold_in
from purecompose.schedule import Hparam, Product, Scalar, Schedule
from purecompose.time import Timestamp


_FIELDS = ("batch", "epoch", "batch_in_epoch", "sample", "token", "elapsed", "draw")


class Clock:
    """Time inside a step. Its tensor is made when first read: a step that reads no time pays nothing.

    Attributes:
        schedules: The schedules whose values follow the counters.
        domain: Purpose of the draws: "" in a training step, otherwise the name of the program or event.
    """

    __slots__ = ("schedules", "domain", "_source", "_row", "_values")

    def __init__(self, source: "_Source", schedules: tuple[Schedule, ...], domain: str, row: int = 0) -> None:
        self._source = source
        self.schedules: tuple[Schedule, ...] = schedules
        self.domain: str = domain
        self._row = row
        self._values: Tensor | None = None

    @classmethod
    def of(
        cls,
        now: Timestamp,
        later: Timestamp,
        schedules: tuple[Schedule, ...],
        device: torch.device,
        *,
        domain: str = "",
        draw: int | None = None,
    ) -> "Clock":
        """Return the clock of a step from `now` to `later`; `draw`, by default the batch, identifies its draws."""
        draw = now.batch if draw is None else draw
        return cls(_Source(now, later, schedules, draw, device), schedules, domain)

    @property
    def table(self) -> Tensor:
        """float64 of shape (2, fields): the numbers before `advance` and after it; exact below 2**53."""
        return self._source.table

    @property
    def values(self) -> Tensor:
        """float64 of shape (fields,): the numbers now."""
        if self._values is None:
            self._values = self._source.table[self._row]
        return self._values

    @property
    def batch(self) -> Tensor:
        """The number of batches finished, 0-d int64."""
        return self.values[0].to(torch.int64)

    @property
    def epoch(self) -> Tensor:
        """The number of epochs finished, 0-d int64."""
        return self.values[1].to(torch.int64)

    @property
    def batch_in_epoch(self) -> Tensor:
        """The number of batches finished in this epoch, 0-d int64."""
        return self.values[2].to(torch.int64)

    @property
    def sample(self) -> Tensor:
        """The number of examples seen, 0-d int64."""
        return self.values[3].to(torch.int64)

    @property
    def token(self) -> Tensor:
        """The number of tokens seen, 0-d int64."""
        return self.values[4].to(torch.int64)

    @property
    def elapsed(self) -> Tensor:
        """The fraction of the run that is over, 0-d float64; NaN in a run without a duration."""
        return self.values[5]

    @property
    def draw(self) -> Tensor:
        """The number of this step's draws, 0-d int64: the same before and after `advance`, so that no draw repeats."""
        self._note_draw()
        return self.values[6].to(torch.int64)

    def key_of_draws(self, key: Tensor) -> Tensor:
        """Return `fold_in(key, draw)`, the key of this step's draws, derived once per step."""
        self._note_draw()
        known = self._source.folded
        if known is None or known[0] is not key:
            known = self._source.folded = key, fold_in(key, self._source.draw)
        return known[1]

    def _note_draw(self) -> None:
        run = current_run()
        if run is not None and run.watch is not None:
            run.watch.has_drawn = True

    def scheduled(self, schedule: Schedule) -> Tensor:
        """Return the schedule's multiplier now, 0-d float64."""
        if schedule not in self.schedules:
            raise KeyError(
                f"{schedule!r} is not evaluated in this step: schedules work in optimizers' settings and in "
                "those that an algorithm lists in its config"
            )
        value = self.values[len(_FIELDS) + self.schedules.index(schedule)]
        if self._row == 1 and (error := self._source.failed_later.get(schedule)) is not None:
            raise error
        return value

    def advanced(self) -> "Clock":
        """Return the clock after the step's `advance`."""
        return Clock(self._source, self.schedules, self.domain, 1)

    def without_zeros(self) -> "Clock":
        """Return the clock with 1 in place of schedules that are 0."""
        counters, values = self.table.split([len(_FIELDS), len(self.schedules)], dim=1)
        table = torch.cat([counters, torch.where(values == 0, 1.0, values)], dim=1)
        return Clock(_Source(table=table), self.schedules, self.domain, self._row)


class _Source:
    """The source of a clock's numbers: a table, or the host's counters from which the table is made when first read."""

    __slots__ = ("failed_later", "folded", "_counters", "_table")

    def __init__(self, *counters: Any, table: Tensor | None = None) -> None:
        self._counters, self._table = counters, table
        self.folded: tuple[Tensor, Tensor] | None = None  # a key, and the key of the step's draws
        # Errors are raised only when a value after `advance` is read, which is rare: a list of rates may end with the
        # run. Traced code sees NaN.
        self.failed_later: dict[Schedule, Exception] = {}

    @property
    def draw(self) -> int | Tensor:
        """The number of the step's draws; an int where the host knows it, which costs no operations."""
        return self._counters[3] if self._counters else self.table[0, 6].to(torch.int64)

    @property
    def table(self) -> Tensor:
        if self._table is None:
            now, later, schedules, draw, device = self._counters
            rows = [_read(now, draw, schedules), _read(later, draw, schedules, self.failed_later)]
            self._table = sent(rows, torch.float64, device)
        return self._table


def _read(
    timestamp: Timestamp, draw: int, schedules: tuple[Schedule, ...], failed: dict[Schedule, Exception] | None = None
) -> list[float]:
    """Return the numbers at a time.

    If `failed` is given, errors of schedules are recorded there, and their numbers are NaN.
    """
    elapsed = timestamp.elapsed()
    row = [
        timestamp.batch,
        timestamp.epoch,
        timestamp.batch_in_epoch,
        timestamp.sample,
        timestamp.token,
        math.nan if elapsed is None else elapsed,
        draw,
    ]
    for schedule in schedules:
        try:
            row.append(schedule(timestamp))
        except Exception as error:
            if failed is None:
                raise
            failed[schedule] = error
            row.append(math.nan)
    return row


def _flatten(clock: Clock) -> tuple[tuple[str, ...], tuple[Any, ...], Any]:
    return ("table",), (clock.table,), (clock.schedules, clock.domain, clock._row)


def _unflatten(names: tuple[str, ...], children: Iterable[Any], static: Any) -> Clock:
    del names
    (table,) = children
    return Clock(_Source(table=table), *static)


tree.register_node(Clock, _flatten, _unflatten)


PREFIX = "loss."
"""The names of a loss's parameters and buffers in a state begin with it."""
Constant: TypeAlias = tuple[Place, Hashable]
"""A value that a loss reads, and what changes when a tensor or array is written into; see `_version`."""


class _Holder(nn.Module):
    """A module around a loss, which gives the loss's tensors their prefix; it calls a function with the loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()  # in training mode, so that the loss keeps the modes of its modules, as in a plain loop
        self.loss = loss

    def forward(self, fn: Any) -> Any:
        return fn(self.loss)


def joined(parts: Parts, loss: Any, net: nn.Module) -> tuple[Parts, Any, Model | None]:
    """Return a network's parts with the tensors of its loss, the loss without them, and the architecture of the loss.

    The last is `None` unless the loss is a module with parameters or buffers.
    """
    losses.check_loss(loss)
    check_reads(loss, net)
    if isinstance(loss, losses.ModelLoss):
        return parts, loss.of_network(net), None
    if not isinstance(loss, nn.Module) or not any(isinstance(part, Tensor) for part in _parts(loss)):
        return parts, loss, None
    taken = [name for name, _ in (*net.named_parameters(), *net.named_buffers()) if name.startswith(PREFIX)]
    if taken:
        raise ValueError(
            f"the network has the tensor {taken[0]!r}, but names that begin with {PREFIX!r} are reserved for the "
            "parameters and buffers of the loss: rename the network's module"
        )
    own = from_module(_Holder(loss))
    params, buffers = {**parts.params, **own.params}, {**parts.buffers, **own.buffers}
    return Parts(parts.model, params, buffers, parts.frozen | own.frozen), own.model.module.loss, own.model


def check_reads(loss: Any, net: nn.Module | None = None) -> None:
    """Raise an error if a loss reads what is outside of the state, or cannot be filled in."""
    own = {id(part) for part in _parts(loss)} if isinstance(loss, nn.Module) else set()
    of_net = {id(part) for part in _parts(net)} if net is not None else set()
    filled_in = {id(scalar) for scalar in scalars_of(loss).values()}
    check_hidden(loss, f"the loss {shown(loss)}", _SCALARS)
    for where, value, _ in reached(loss, _SCALARS):
        what = f"{where or 'its object'}, a {type(value).__name__}"
        if id(value) in of_net:
            remedy = "return what it needs from the network's forward, or write an algorithm at Event.AFTER_LOSS"
            raise ValueError(_outside(loss, f"{what} of the network", remedy))
        if id(value) in own:
            continue
        if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
            raise ValueError(_outside(loss, f"the parameters of {what}"))
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(_outside(loss, f"{what} that requires a gradient"))
        if isinstance(value, _SCALARS) and id(value) not in filled_in:
            raise TypeError(
                f"the loss {shown(loss)} reads {where}, {value!r}, whose value cannot be filled in there: make it an "
                f"argument, as in functools.partial(loss, weight={value!r})"
            )


def scalars_of(loss: Any) -> dict[str, Scalar]:
    """Return the schedules and named scalars among a loss's attributes, and the keywords of a partial function."""
    if isinstance(loss, functools.partial):
        found = {**{_FUNC + name: value for name, value in scalars_of(loss.func).items()}, **loss.keywords}
    else:
        owner = loss.__self__ if isinstance(loss, types.MethodType) else loss
        found = {} if isinstance(owner, (types.FunctionType, type)) else attributes(owner)
    return {name: value for name, value in found.items() if isinstance(value, _SCALARS)}


def with_scalars(loss: Any, values: Mapping[str, Any]) -> Any:
    """Return the loss with other values for these attributes or keywords; the given one is not changed."""
    if isinstance(loss, functools.partial):
        inside = {name.removeprefix(_FUNC): value for name, value in values.items() if name.startswith(_FUNC)}
        keywords = {name: value for name, value in values.items() if not name.startswith(_FUNC)}
        function = with_scalars(loss.func, inside) if inside else loss.func
        return functools.partial(function, *loss.args, **{**loss.keywords, **keywords})
    if isinstance(loss, types.MethodType):
        return types.MethodType(loss.__func__, with_scalars(loss.__self__, values))
    changed = copy.copy(loss)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # also of a frozen dataclass
    return changed


def constants_of(fn: Any) -> tuple[Constant, ...]:
    """Return what a loss, or another function, reads from places that can change, except `None`, to be filled in."""

    def may_change(place: Place) -> bool:
        if isinstance(place.value, Tensor):
            return not place.value.is_meta  # as the twins of the loss's own tensors are
        return place.read is not None and place.value is not None

    return tuple((place, _version(place.value)) for place in reached(fn, _SCALARS) if may_change(place))


def changed_constant(constants: Iterable[Constant]) -> str | None:
    """Return a description of the first constant that has changed, such as "g[0], which was 0 and is 1 now"."""
    for (where, value, read), version in constants:
        try:
            now = value if read is None else read()
        except (AttributeError, LookupError, ValueError):
            now = None
        if now is value:
            is_same = version is None or _version(value) == version
        else:
            is_same = not isinstance(value, Tensor) and fingerprint(now) == fingerprint(value)
        if not is_same:
            changed = "has been written into" if now is value else f"was {value!r:.60} and is {now!r:.60} now"
            return f"{where}, which {changed}"
    return None


def check_constants(loss: Any, constants: tuple[Constant, ...]) -> None:
    """Raise a `ValueError` if a constant of a loss has changed."""
    if changed := changed_constant(constants):
        raise ValueError(
            f"the loss {shown(loss)} reads {changed}, but a loss must not change during a run: make it a schedule or a "
            "named scalar, as in functools.partial(loss, weight=hparam('weight', 1.0)), or a buffer of an nn.Module"
        )


_SCALARS = (Hparam, Schedule, Product)
_FUNC = "func."
"""The names of scalars of the function in a partial one begin with it."""


def _parts(module: nn.Module) -> list[Any]:
    return [*module.modules(), *module.parameters(), *module.buffers()]


_AS_MODULE = f"make it an nn.Module of its own, whose parameters and buffers are then in the state as {PREFIX}*"


def _outside(loss: Any, what: str, remedy: str = _AS_MODULE) -> str:
    place = "outside of the state, where nothing is trained, moved or saved"
    return f"the loss {shown(loss)} reads {what}, {place}: {remedy}"


def _version(value: Any) -> Hashable:
    """Return how often a tensor has been written into, or a description of a small array of NumPy; else `None`."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    is_array = hasattr(value, "tobytes") and hasattr(value, "dtype") and hasattr(value, "__setitem__")
    return fingerprint(value) if is_array and value.nbytes <= _MANY_BYTES else None


_MANY_BYTES = 4096
"""Larger arrays are not compared, because that would take more than a few microseconds in each step."""
