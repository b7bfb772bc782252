"""The static part of a state: its context, which is constant in a run, the layout of batches, and the host's counters.

Equality compares structure and configuration and ignores the counters, so that states of different times and seeds
can be mapped, stacked and subtracted. Descriptions of a state, in words and as HTML, are here, too; no value is read.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field as attribute
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.messages import columns, fragment, note
from purecompose._support.objects import fingerprint, in_words
from purecompose._support.specs import check_whole, shown
from purecompose.batch import Splitter
from purecompose.batch.examples import is_list, is_rows
from purecompose.core.clock import Clock, scalars_of
from purecompose.losses import ModelLoss
from purecompose.losses.evaluation import without_weights
from purecompose.nn.model import Model
from purecompose.schedule import Scalar, Schedule
from purecompose.time import Timestamp


@dataclass(frozen=True)
class Layout:
    """The arrangement of the examples in a batch.

    Args:
        field: Field of the input, for batches whose tensors disagree; see `batch.num_examples`.
        dim: The dimension of the examples in the batch's tensors.
        splitter: Functions used instead of `field` and `dim`.
        token_counter: `batch -> int`, the number of tokens; by default the size of `input_ids`.
        target_field: Field of the target, for the same batches as `field`.
    """

    field: batches.Field | None = None
    dim: int = 0
    splitter: Splitter | None = None
    token_counter: Callable[[Any], int] | None = None
    target_field: batches.Field | None = None
    _kinds: dict[str, bool] = attribute(default_factory=dict, init=False, repr=False, compare=False)
    """Whether the tensors of batches that were cut have rows of examples, by path."""
    _seen: set[tuple[bool, ...]] = attribute(default_factory=set, init=False, repr=False, compare=False)
    """The results of `are_rows` that have been compared."""

    def __post_init__(self) -> None:
        check_whole(self.dim, "batch_dim", 0, hint="1 for sequences (T, N, ...)")
        if self.splitter is not None and not isinstance(self.splitter, Splitter):
            raise TypeError(f"splitter: expected a purecompose.batch.Splitter, got {shown(self.splitter)}")
        if self.splitter is not None and self.dim:
            raise TypeError("expected a splitter or a batch_dim, got both")
        if self.token_counter is not None and not callable(self.token_counter):
            raise TypeError(f"num_tokens: expected a function (batch) -> int, got {shown(self.token_counter)}")

    def has_rows(self, batch: Any) -> bool:
        """Return whether the examples are the rows of the batch's tensors."""
        return self.dim == 0 and self.splitter is None and batches.reported_size(batch) is None

    def can_cut(self, batch: Any) -> bool:
        return batches.reported_size(batch) is None if self.splitter is None else self.splitter.part is not None

    def describe(self, batch: Any) -> str:
        """Return what is special about a batch that has no rows or cannot be cut, for messages."""
        if self.splitter is not None:
            return repr(self.splitter)
        return f"batch_dim={self.dim}" if self.dim else "a batch of graphs or packed sequences"

    def num_examples(self, batch: Any) -> int:
        if self.splitter is None:
            return batches.num_examples(batch, self.field, self.dim, self.target_field)
        return check_whole(self.splitter.num_examples(batch), "Splitter.num_examples(batch)", 0)

    def num_tokens(self, batch: Any) -> int:
        """Return the number of tokens in a batch, for the timestamp."""
        if self.token_counter is None:
            return batches.num_tokens(batch)
        return check_whole(self.token_counter(batch), "num_tokens(batch)", 0)

    def are_rows(self, batch: Any) -> list[bool]:
        """Return which of the batch's tensors have a row for each example, the others being shared by all examples."""
        num = self.num_examples(batch)
        found = [is_rows(leaf, num, self.dim) for leaf in batches.tensors(batch)]
        kinds = (*found, *(is_rows(leaf, num, self.dim) for leaf in tree.leaves(batch, is_list)))
        if num > 1 and kinds not in self._seen:
            for path, leaf in tree.leaves_with_paths(batch, into_objects=True, is_leaf=is_list).items():
                is_row = is_rows(leaf, num, self.dim)
                shape = (len(leaf),) if is_list(leaf) else tuple(getattr(leaf, "shape", ()))
                if shape and not is_rows(leaf, 1, self.dim) and self._kinds.setdefault(path, is_row) != is_row:
                    here, there = ("cut with", "shared by") if is_row else ("shared by", "cut with")
                    raise ValueError(
                        f"batch{path} {shape} would be {here} the {num} examples of this batch, but was {there} those "
                        "of another: give what all examples share a leading dimension of 1 (a list: a named tuple), "
                        "and other batches a State.create(splitter=batch.Splitter(num_examples, part))"
                    )
            self._seen.add(kinds)
        return found

    def take(self, batch: Any, indices: Tensor) -> Any:
        """Return the chosen examples; see `batch.take`."""
        self.are_rows(batch)
        return batches.take(batch, indices, self.num_examples(batch))

    def split(self, batch: Any, num_parts: int) -> list[Any]:
        """Split the batch into consecutive parts of nearly equal size, larger ones first."""
        if num_parts == 1:  # the same tensors, so that it is known which of them have been cut
            return [batch]
        if self.splitter is None:
            self.are_rows(batch)
            return batches.split(batch, num_parts, self.num_examples(batch), self.dim)
        if self.splitter.part is None:
            raise ValueError(
                f"the batch cannot be cut into {num_parts} parts: {self.splitter!r} has no part; give it part=, a "
                "function (batch, start, stop) -> batch"
            )
        bounds = batches.bounds(self.num_examples(batch), num_parts)
        parts = []
        for start, stop in itertools.pairwise(bounds):
            part = self.splitter.part(batch, start, stop)
            if self.num_examples(part) != stop - start:
                raise ValueError(
                    f"{self.splitter!r}: part(batch, {start}, {stop}) has {self.num_examples(part)} examples, "
                    f"expected {stop - start}"
                )
            parts.append(part)
        return parts


class Cut(NamedTuple):
    """The number of slices of a batch: fixed, or as few as possible with at most `microbatch_size` examples each."""

    microbatches: int | None = None
    microbatch_size: int | None = None

    @classmethod
    def checked(cls, microbatches: Any, microbatch_size: Any, where: str) -> "Cut":
        """Return the cut described by two arguments of a function named `where`."""
        if microbatches is not None and microbatch_size is not None:
            raise ValueError(
                f"{where}: expected microbatches (how many slices) or microbatch_size (at most so many examples in "
                f"each), got both: microbatches={microbatches!r}, microbatch_size={microbatch_size!r}"
            )
        if microbatches is not None:
            microbatches = check_whole(microbatches, f"{where}: microbatches", 1)
        if microbatch_size is not None:
            hint = "it is the most examples in a slice"
            microbatch_size = check_whole(microbatch_size, f"{where}: microbatch_size", 1, hint=hint)
        return cls(microbatches, microbatch_size)

    @property
    def may_slice(self) -> bool:
        """True if there may be several slices."""
        return self.microbatch_size is not None or (self.microbatches or 1) > 1

    def num_slices(self, num_examples: int) -> int:
        """Return the number of slices for a batch of this many examples, at most one for each example."""
        if self.microbatch_size is not None:
            return max(1, -(-num_examples // self.microbatch_size))
        return min(self.microbatches or 1, num_examples)


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
    settings: Mapping[str, str] = attribute(default_factory=dict)
    """Descriptions of the buffers whose initial values are settings of the user's code, not weights: those that are not
    in the network's `state_dict()`, and those of the loss."""
    replaced: Mapping[str, tuple[str, ...]] = attribute(default_factory=dict)
    """The names of the modules that each surgery has replaced, by its name, which is that of its method."""
    loss_scalars: dict[str, Scalar] = attribute(init=False)
    """Schedules and named scalars among the attributes of the loss, by name."""
    trainable: tuple[str, ...] = attribute(init=False)
    """The parameters that have a gradient."""
    layout: Layout = attribute(init=False)
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
        return () if self.loss_model is None else self.loss_model.param_names

    @property
    def loss_buffer_names(self) -> tuple[str, ...]:
        return () if self.loss_model is None else self.loss_model.buffer_names

    def with_settings(self, buffers: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> "Context":
        """Return the context with descriptions of the settings among new buffers; the same tensor keeps its own."""
        names = [name for name in (*self.model.settings, *self.loss_buffer_names) if name in buffers]
        kept = {name: words for name, words in self.settings.items() if buffers.get(name) is before.get(name)}
        return self.replace(settings={name: kept.get(name) or in_words(buffers[name]) for name in names})

    def replace(self, **changes: Any) -> "Context":
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
        self._now, self._later = now, later

    def opened(self, *, later: bool) -> Timestamp:
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
    timestamp: Timestamp | SealedTime = attribute(compare=False)

    def opened(self, *, later: bool) -> Timestamp:
        """Return the time before or after the running step, for code that runs on the host."""
        assert isinstance(self.timestamp, SealedTime)
        return self.timestamp.opened(later=later)


_HEAD = ("field", "tensors", "numbers", "dtype", "shapes")
_MOST_SHAPES = 4


def state_as_html(title: str, fields: Iterable[tuple[str, Any]]) -> str:
    """Return a title above a table with a row for each field that has tensors."""
    rows = []
    for name, value in fields:
        leaves = tree.leaves_with_paths(value, into_objects=True)
        if tensors := {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}:
            rows.append(_row(name, tensors))
    return fragment(note(title), *([columns(_HEAD, rows)] if rows else []))


def describe_moment(timestamp: Any) -> str:
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
    # A key path such as ['momentum']['0.weight'] is shown as momentum.0.weight.
    dotted = [[part.strip(".") for part in re.split(r"\['|'\]|[\[\]]", path)] for path in tensors]
    names = [".".join(filter(None, parts)) for parts in dotted]
    shown = [f"{name} {tuple(tensor.shape)}".strip() for name, tensor in zip(names, tensors.values(), strict=True)]
    if len(shown) > _MOST_SHAPES:
        shown[_MOST_SHAPES - 1 :] = [f"and {len(shown) - _MOST_SHAPES + 1:,} more"]
    return name, f"{len(tensors):,}", f"{count:,}", ", ".join(dtypes), ", ".join(shown)
