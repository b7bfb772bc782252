"""The loop as data: events, core stages and the scopes around them.

A program is a tuple of events, stages and scopes; a training step is the fold over it. A stage is a pure function
`State -> State`, so a plain function of that kind is a stage too. `Grad` differentiates the part of the program
that it holds, `Microbatches` runs its part on slices of the batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from purecompose import losses
from purecompose.core.gradient import Op
from purecompose.core.state import State
from purecompose.time.event import Event


__all__ = [
    "Cut",
    "Grad",
    "Microbatches",
    "Op",
    "Program",
    "Stage",
    "Update",
    "advance",
    "check_one_cut",
    "eval_events",
    "eval_forward",
    "events_in",
    "forward",
    "loop_events",
    "loss",
    "predict_events",
    "update",
    "walk",
]


@dataclass(frozen=True)
class Stage:
    """A named core part of a program: a pure function of the state."""

    name: str
    fn: Op

    def __call__(self, state: State) -> State:
        return self.fn(state)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # The stages of this module are recognised by identity, so they are pickled by name.
        return self.name if globals().get(self.name) is self else (Stage, (self.name, self.fn))

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Update:
    """The stage that moves the parameters by the optimizer; `update(wrt=pattern)` moves those that match alone."""

    wrt: str | None = None

    def __call__(self, *, wrt: str) -> "Update":
        return Update(wrt)

    def __repr__(self) -> str:
        return "update" if self.wrt is None else f"update(wrt={self.wrt!r})"


class _Scope:
    """The shared part of scopes: a body of events, stages and further scopes."""

    body: "Program"

    def __init__(self, *body: "Node", **settings: Any) -> None:
        object.__setattr__(self, "body", tuple(body))
        for name, value in settings.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, init=False)
class Grad(_Scope):
    """Differentiates the loss that its body ends with, in the trainable parameters.

    Args:
        body: Events and stages, one of which sets `state.loss`.
        wrt: A pattern (as in `fnmatch`) of parameter names; by default all that are trainable.

    Changes of parameters and of the batch inside the body stay inside.
    """

    body: "Program"
    wrt: str | None

    def __init__(self, *body: "Node", wrt: str | None = None) -> None:
        super().__init__(*body, wrt=wrt)


@dataclass(frozen=True, init=False)
class Microbatches(_Scope):
    """Runs its body on slices of the batch, so that k slices give the gradient of the whole.

    Loss, gradients and metrics that are single numbers (0-d, floating) become means over the slices, weighted by the
    terms in each slice's loss. `outputs` and other metrics stay those of the last slice; buffers and slots pass from
    slice to slice.

    Args:
        body: Events, stages and a `Grad`.
        k: The number of slices. A batch of fewer examples is cut into single ones.
        size: The most examples in a slice, in place of their number: each batch is cut into as few slices of (nearly)
            equal size as that takes, a short batch into fewer. Without either the step's `microbatches` or
            `microbatch_size` holds.

    Raises:
        ValueError: One that is no positive number, or both.
    """

    body: "Program"
    k: int | None
    size: int | None

    def __init__(self, *body: "Node", k: int | None = None, size: int | None = None) -> None:
        for name, value, what in (("k", k, "microbatches"), ("size", size, "examples in a microbatch")):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"Microbatches({name}={value!r}): expected a positive number of {what}")
        check_one_cut(k, size, "Microbatches", ("k", "size"))
        super().__init__(*body, k=k, size=size)

    @property
    def cut(self) -> "Cut | None":
        """Its own cut; `None` where the step's holds."""
        return None if self.k is None and self.size is None else Cut(self.k, self.size)


class Cut(NamedTuple):
    """How a batch is cut: into a number of slices, or into as few as hold at most `size` examples each."""

    k: int | None = None
    size: int | None = None

    @property
    def may_slice(self) -> bool:
        """Whether there may be several slices."""
        return self.size is not None or (self.k or 1) > 1

    def num_slices(self, num_examples: int) -> int:
        """Into how many slices a batch of so many examples is cut: never more than there are examples."""
        if self.size is not None:
            return max(1, -(-num_examples // self.size))
        return min(self.k or 1, num_examples)


def check_one_cut(k: int | None, size: int | None, where: str, names: tuple[str, str]) -> None:
    """Raises a `ValueError` where a number of slices and their size are both given; `names` says what they are called.

    A batch of another size would fit one of them alone.
    """
    if k is not None and size is not None:
        raise ValueError(
            f"{where}: expected {names[0]} (how many slices) or {names[1]} (at most so many examples in each), got "
            f"both: {names[0]}={k!r}, {names[1]}={size!r}"
        )


Node: TypeAlias = Event | Stage | Update | Grad | Microbatches | Op
Program: TypeAlias = tuple[Node, ...]


def _forward(state: State) -> State:
    outputs, buffers = state.run_model(state.inputs, train=True)
    return state.replace(outputs=outputs, buffers=buffers)


def _eval_forward(state: State) -> State:
    outputs, _ = state.run_model(state.inputs, train=False)
    return state.replace(outputs=outputs)


def _loss(state: State) -> State:
    loss_fn = state.context.loss
    targets = None if isinstance(loss_fn, losses.ModelLoss) else state.targets
    return state.replace(loss=losses.evaluate_loss(loss_fn, state.outputs, targets))


def _advance(state: State) -> State:
    return state.replace(clock=state.clock.advanced()) if state.clock is not None else state


forward = Stage("forward", _forward)
"""Runs the network in training mode on the batch's input; sets `outputs` and `buffers`."""

eval_forward = Stage("eval_forward", _eval_forward)
"""Runs the network in evaluation mode on the batch's input; sets `outputs`."""

loss = Stage("loss", _loss)
"""Sets `loss`, 0-d, from `outputs` and the batch's target; mixtures are resolved here."""

update = Update()
"""Moves the parameters by the optimizer."""

advance = Stage("advance", _advance)
"""Moves the time by one batch: what follows sees the new time."""

loop_events: Program = (
    Event.AFTER_DATALOADER,
    Event.BATCH_START,
    Event.BEFORE_TRAIN_BATCH,
    Microbatches(
        Grad(
            Event.BEFORE_FORWARD,
            forward,
            Event.AFTER_FORWARD,
            Event.BEFORE_LOSS,
            loss,
            Event.AFTER_LOSS,
            Event.BEFORE_BACKWARD,
        ),
        Event.AFTER_BACKWARD,
    ),
    Event.AFTER_TRAIN_BATCH,
    update,
    advance,
    Event.BATCH_END,
)
"""One training step."""

eval_events: Program = (
    Event.EVAL_BATCH_START,
    Event.EVAL_BEFORE_FORWARD,
    eval_forward,
    Event.EVAL_AFTER_FORWARD,
    Event.EVAL_BATCH_END,
)
"""One batch of an evaluation."""

predict_events: Program = (
    Event.PREDICT_BATCH_START,
    Event.PREDICT_BEFORE_FORWARD,
    eval_forward,
    Event.PREDICT_AFTER_FORWARD,
    Event.PREDICT_BATCH_END,
)
"""One batch of a prediction."""


def walk(program: Iterable[Node]) -> Iterator[Node]:
    """Every node of a program in order, those inside scopes included."""
    for node in program:
        yield node
        if isinstance(node, _Scope):
            yield from walk(node.body)


def events_in(program: Iterable[Node]) -> tuple[Event, ...]:
    """The events of a program in order, those inside scopes included, each once.

    Example:
        >>> [event.name for event in events_in(predict_events)[-2:]]
        ['PREDICT_AFTER_FORWARD', 'PREDICT_BATCH_END']
    """
    return tuple(dict.fromkeys(node for node in walk(program) if isinstance(node, Event)))
