"""The static part of a state: its context, which is constant in a run, the host's counters, and an overview of both.

Equality compares structure and configuration and ignores the counters, so that states of different times and seeds
can be mapped, stacked and subtracted.
"""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.objects import fingerprint, in_words
from purecompose._support.tables import columns, fragment, note
from purecompose.core.clock import Clock
from purecompose.core.layout import Layout
from purecompose.core.loss import scalars_of
from purecompose.losses import ModelLoss
from purecompose.losses.evaluation import without_weights
from purecompose.nn.model import Model
from purecompose.schedule import Scalar, Schedule
from purecompose.time import Timestamp


@dataclass(frozen=True, eq=False)
class Context:
    """The part of a state that is constant in a run; contexts are compared by structure and configuration."""

    model: Model
    loss: Callable[..., Tensor]
    optimizer: Any
    frozen: frozenset[str] = frozenset()
    """Parameters without gradient and update."""
    precision: str = "fp32"
    """"fp32", "tf32" (float32 with rounded products on a GPU), or "bf16" or "fp16", a forward pass under autocast."""
    input_field: batches.Field = 0
    target_field: batches.Field | None = 1
    """`None` if batches have no target."""
    batch_dim: int = 0
    """The dimension of the examples in the batch's tensors."""
    splitter: batches.Splitter | None = None
    """Functions that count and cut batches whose examples do not lie along a dimension."""
    num_tokens: Callable[[Any], int] | None = None
    """Function that counts the tokens of a batch; by default the size of `input_ids`."""
    initialised: tuple[str, ...] = ()
    """The algorithms whose INIT event is over."""
    required: tuple[str, ...] = ()
    """The initialised algorithms without which a checkpoint cannot be loaded."""
    schedules: tuple[Schedule, ...] = ()
    """The schedules that the clock evaluates."""
    paused: frozenset[str] = frozenset()
    """Parameters without gradient and update in the running step only; empty between steps."""
    loss_model: Model | None = None
    """Architecture of a loss whose parameters and buffers are in the state; `loss` is its module, without them."""
    loss_dtype: torch.dtype = torch.float32
    """float64 for a network that is created in double precision, else float32."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Descriptions of the buffers whose initial values are settings of the user's code, not weights: those that are not
    in the network's `state_dict()`, and those of the loss."""
    replaced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of the modules that each surgery has replaced, by its name, which is that of its method."""
    loss_scalars: dict[str, Scalar] = field(init=False)
    """Schedules and named scalars among the attributes of the loss, by name."""
    trainable: tuple[str, ...] = field(init=False)
    """The parameters that have a gradient."""
    layout: Layout = field(init=False)
    """The arrangement of the examples in a batch."""

    def __post_init__(self) -> None:
        idle = self.frozen | self.paused
        object.__setattr__(self, "trainable", tuple(name for name in self.param_names if name not in idle))
        object.__setattr__(self, "loss_scalars", scalars_of(self.loss))
        batches.check_field(self.input_field, "input_field")
        if self.target_field is not None:
            batches.check_field(self.target_field, "target_field")
        field = without_weights(self.target_field)
        target = (self.loss.labels or "labels") if isinstance(self.loss, ModelLoss) else field
        layout = Layout(self.input_field, self.batch_dim, self.splitter, self.num_tokens, target)
        object.__setattr__(self, "layout", layout)

    @property
    def param_names(self) -> tuple[str, ...]:
        """The names of all parameters, those of the loss last."""
        return self.model.param_names + self.loss_param_names

    @property
    def loss_param_names(self) -> tuple[str, ...]:
        """The names of the loss's parameters."""
        return () if self.loss_model is None else self.loss_model.param_names

    @property
    def loss_buffer_names(self) -> tuple[str, ...]:
        """The names of the loss's buffers."""
        return () if self.loss_model is None else self.loss_model.buffer_names

    def with_settings(self, buffers: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> "Context":
        """Return the context with descriptions of the settings among new buffers; the same tensor keeps its own."""
        names = [name for name in (*self.model.settings, *self.loss_buffer_names) if name in buffers]
        kept = {name: words for name, words in self.settings.items() if buffers.get(name) is before.get(name)}
        return self.replace(settings={name: kept.get(name) or in_words(buffers[name]) for name in names})

    def replace(self, **changes: Any) -> "Context":
        """Return a context with these changes."""
        new = dataclasses.replace(self, **changes)
        if new.layout == self.layout:  # it knows earlier batches
            object.__setattr__(new, "layout", self.layout)
        return new

    def rested(self) -> "Context":
        """Return the context as it is between steps."""
        return self.replace(paused=frozenset()) if self.paused else self

    # `==` leaves out `required` and `schedules`, which follow from the settings of the optimizer and the algorithms.
    # Code that depends on the order of the schedules compares them separately.

    @property
    def _compared(self) -> tuple[Hashable, ...]:
        return self.model, self.optimizer, self.frozen, self.paused, self.precision, self.initialised

    @property
    def _compared_by_fingerprint(self) -> tuple[Any, ...]:
        layout = self.layout
        return self.loss, layout.field, layout.dim, layout.splitter, layout.token_counter, self.target_field

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Context) or self._compared != other._compared:
            return False
        pairs = zip(self._compared_by_fingerprint, other._compared_by_fingerprint, strict=True)
        return all(mine is theirs or fingerprint(mine) == fingerprint(theirs) for mine, theirs in pairs)

    def __hash__(self) -> int:
        return hash((self.model, self.optimizer, self.frozen, self.paused, self.initialised))


class SealedTimeError(RuntimeError):
    """The timestamp was read inside a step."""


class SealedTime:
    """A placeholder for the timestamp inside a step, where a number read from it would be baked into compiled code."""

    __slots__ = ("_now", "_later")

    def __init__(self, now: Timestamp, later: Timestamp) -> None:
        """Keep the time before and after the step for the host's own use."""
        self._now, self._later = now, later

    def opened(self, *, later: bool) -> Timestamp:
        """Return the time before or after the step, for code that runs on the host."""
        return self._later if later else self._now

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for special methods
            raise AttributeError(name)
        raise SealedTimeError(
            f"timestamp.{name} was read inside a step, where it would be compiled in as a constant: read "
            f"state.clock.{name if hasattr(Clock, name) else 'elapsed'} (a tensor), decide by time in `match`, or make "
            "the algorithm a host one (host=True)"
        )

    def __repr__(self) -> str:
        return "SealedTime()"


@dataclass(frozen=True, slots=True)
class Static:
    """The static part of a state; equality ignores the timestamp."""

    context: Context
    timestamp: Timestamp | SealedTime = field(compare=False)

    def opened(self, *, later: bool) -> Timestamp:
        """Return the time before or after the running step, for code that runs on the host."""
        assert isinstance(self.timestamp, SealedTime)
        return self.timestamp.opened(later=later)


_HEAD = ("field", "tensors", "numbers", "dtype", "shapes")
_MOST_SHAPES = 4


def state_as_html(title: str, fields: Iterable[tuple[str, Any]]) -> str:
    """Return a title above a table with a row for each field that has tensors.

    Args:
        title: A line about the whole.
        fields: The names of the fields, with their values.
    """
    rows = []
    for name, value in fields:
        leaves = tree.leaves_with_paths(value, into_objects=True)
        if tensors := {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}:
            rows.append(_row(name, tensors))
    return fragment(note(title), *([columns(_HEAD, rows)] if rows else []))


def describe_moment(timestamp: Any) -> str:
    """Return the time in words, for reasons."""
    elapsed = timestamp.elapsed()
    share = "" if elapsed is None else f" ({elapsed:.1%} of the run)"
    return f"at batch {timestamp.batch}{share}"


def describe_replaced(replaced: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the modules that each method has replaced in words, by its name; see `Context.replaced`."""
    words = {name: listed([one or "the whole network" for one in found]) for name, found in replaced.items()}
    return {name: f"modules replaced: {len(replaced[name])} ({words[name]})" for name in words}


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _row(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    count = sum(tensor.numel() for tensor in tensors.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    shown = [f"{_dotted(path)} {tuple(tensor.shape)}".strip() for path, tensor in tensors.items()]
    if len(shown) > _MOST_SHAPES:
        shown[_MOST_SHAPES - 1 :] = [f"and {len(shown) - _MOST_SHAPES + 1:,} more"]
    return name, f"{len(tensors):,}", f"{count:,}", ", ".join(dtypes), ", ".join(shown)


def _dotted(path: str) -> str:
    """Return a key path such as `['momentum']['0.weight']` as `momentum.0.weight`."""
    return ".".join(filter(None, (part.strip(".") for part in re.split(r"\['|'\]|[\[\]]", path))))
