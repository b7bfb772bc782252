"""The loop as data: events, core stages and the scopes around them.

A program is a tuple of events, stages and scopes; a training step is the fold over it. A stage is a pure function
`State -> State`, so a plain function of that kind is a stage too. `Grad` differentiates the part of the program
that it holds, `Microbatches` runs its part on slices of the batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from purecompose import losses
from purecompose.event import Event
from purecompose.gradient import Op
from purecompose.state import State


__all__ = [
    "Grad",
    "Microbatches",
    "Op",
    "Program",
    "Stage",
    "Update",
    "advance",
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
        k: The number of slices; by default the step's `microbatches`. A batch of fewer examples is cut into
            single ones.
    """

    body: "Program"
    k: int | None

    def __init__(self, *body: "Node", k: int | None = None) -> None:
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise ValueError(f"Microbatches(k={k!r}): expected a positive number of microbatches")
        super().__init__(*body, k=k)


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
