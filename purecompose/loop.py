"""The loop as data: events, core stages and the scopes around them.

A program is a tuple of events, stages and scopes; a training step is the fold over it. A stage is a pure function
`State -> State`, so a plain function of that kind is a stage too. `Grad` differentiates the part of the program
that it holds, `Microbatches` runs its part on slices of the batch.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from purecompose import batch as batches, losses
from purecompose.event import Event
from purecompose.gradient import Op, averaged, averaged_by_name, differentiate
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
    "forward",
    "loop_events",
    "loss",
    "predict_events",
    "update",
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


At: TypeAlias = Callable[[Event], Op | None]


def build(program: Iterable[Node], at: At, microbatches: int) -> Op:
    """The program as one function, with what `at` gives to do at events, and so many slices where no k is given."""
    body = _build_body(program, at, microbatches, is_slice=False)
    return lambda state: body(state, set())


_Body: TypeAlias = Callable[[State, set[str]], State]
"""A part of a program. The set has the names of the gradients that an update has applied: none applies them again.

They stay in the state, for those who look, until the next Grad. A Grad makes new ones, and so may a stage; algorithms
at events edit them, and a used one that was edited is not new.
"""


def _build_body(program: Iterable[Node], at: At, microbatches: int, *, is_slice: bool) -> _Body:
    """`is_slice`: whether this is the part that runs on slices, whose gradient is not the step's."""
    ops = [op for node in program if (op := _build_node(node, at, microbatches, is_slice)) is not None]

    def run(state: State, used: set[str]) -> State:
        for op, is_body in ops:
            state = op(state, used) if is_body else op(state)
        return state

    return run


def _build_node(node: Node, at: At, microbatches: int, is_slice: bool) -> tuple[Callable[..., State], bool] | None:
    """What a node does, and whether it is told the gradients already used."""
    if isinstance(node, Event):
        op = at(node)
        return None if op is None else (op, False)
    if isinstance(node, Update):
        return (lambda state, used: _update(state, node, used)), True
    if isinstance(node, Grad):
        run = _grad(_build_body(node.body, at, microbatches, is_slice=is_slice), node.wrt)
        return (run if is_slice else _repeatable(run)), True
    if isinstance(node, Microbatches):
        body = _build_body(node.body, at, microbatches, is_slice=True)
        uses_loss = any(inner is loss for inner in walk(node.body))
        k = node.k or microbatches
        sliced = body if k == 1 else lambda state, used: _run_sliced(body, state, used, k, uses_loss)
        return _repeatable(_with_own_gradients(sliced)), True
    return _stage(_noted(node) if isinstance(node, Stage) else node), True  # or any function State -> State


def _grad(body: _Body, wrt: str | None) -> _Body:
    def run(state: State, used: set[str]) -> State:
        names = _matching(state.context.trainable, wrt)
        if used and state.grads is not None:
            state = state.replace(grads=_without(state.grads, used) or None)
        after = differentiate(lambda inner: body(inner, used), state, names)
        used.difference_update(names)
        return after

    return run


def _with_own_gradients(body: _Body) -> _Body:
    """Earlier gradients are no slice's: what a slice did with them would be done as often as there are slices."""

    def run(state: State, used: set[str]) -> State:
        if state.grads is None:
            return body(state, used)
        used_inside: set[str] = set()
        after = body(state.replace(grads=None), used_inside)
        if not after.grads:
            return after.replace(grads=state.grads)
        earlier = _without(state.grads, used)
        used.difference_update(after.grads)
        used.update(used_inside)
        return after.replace(grads={**earlier, **after.grads})

    return run


def _stage(op: Op) -> _Body:
    def run(state: State, used: set[str]) -> State:
        after = op(state)
        if used and after.grads:
            before = state.grads or {}
            used.difference_update(name for name, grad in after.grads.items() if grad is not before.get(name))
        return after

    return run


def _noted(stage: Stage) -> Op:
    """The stage; what it raises says what it was given."""
    fn = stage.fn

    def op(state: State) -> State:
        try:
            return fn(state)
        except Exception as error:
            given = {"batch": state.batch, "outputs": state.outputs}
            forms = [f"{name} {_form(value)}" for name, value in given.items() if value is not None]
            error.add_note(f"in the stage {stage.name}, with {', '.join(forms)}")
            raise

    return op


def _form(value: Any) -> str:
    tensors = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in batches.tensors(value))
    return f"{type(value).__name__}({', '.join(tensors)})"


def _repeatable(run_once: _Body) -> _Body:
    """The gradient's part of a step, which leaves the way to run it again: `state.gradient`."""

    def run(state: State, used: set[str]) -> State:
        used_before = used.copy()

        def regrad(params: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
            again = run_once(state.replace(params=params), used_before.copy())
            if again.grads is None or again.loss is None:
                raise RuntimeError("state.gradient(params): the program has no Grad with a loss")
            return again.grads, again.loss

        return run_once(state, used).replace(batch=state.batch, regrad=regrad)

    return run


def _run_sliced(body: _Body, state: State, used: set[str], k: int, uses_loss: bool) -> State:
    """Runs the body on k slices and averages loss, gradients and metrics, each slice weighted by its terms."""
    current, offset, total = state, 0, 0
    mean_loss: Tensor | None = None
    mean_grads: dict[str, Tensor] | None = None
    mean_metrics: dict[str, Tensor] = {}
    # A ragged last batch, or one that a method made smaller, may have fewer examples than slices.
    input_key = state.context.input_key
    for part in batches.split(state.batch, min(k, state.num_examples), input_key):
        size = batches.num_examples(part, input_key)
        first = offset if state.first_example is None else state.first_example + offset
        # What a slice makes anew it does not find from the one before.
        anew = {"loss": None, "outputs": state.outputs, "grads": None, "metrics": state.metrics}
        start = current.replace(batch=part, first_example=first, **anew)
        current = body(start, used)
        weight = _num_terms(start, current) if uses_loss else size
        total, offset = total + weight, offset + size
        if current.loss is not None:
            mean_loss = averaged(mean_loss, current.loss, weight, total)
        if current.grads is not None:
            mean_grads = averaged_by_name(mean_grads, current.grads, None, weight, total)
        if current.metrics is not state.metrics:
            numbers = {name: value for name, value in current.metrics.items() if _is_number(value)}
            mean_metrics = averaged_by_name(mean_metrics, numbers, state.metrics, weight, total)
    means = {"loss": mean_loss, "grads": mean_grads, "metrics": {**current.metrics, **mean_metrics}}
    return current.replace(batch=state.batch, first_example=state.first_example, **means)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def _num_terms(before: State, after: State) -> int | Tensor:
    loss_fn = before.context.loss
    # A model that computes its loss finds its targets in the batch, by a way of its own.
    targets = before.batch if isinstance(loss_fn, losses.ModelLoss) else before.targets
    return losses.num_terms(loss_fn, after.outputs, targets)


def _update(state: State, node: Update, used: set[str]) -> State:
    if state.grads is None:
        raise RuntimeError("the program's update comes before any Grad: there are no gradients")
    chosen = state.grads if node.wrt is None else _matching(tuple(state.grads), node.wrt)
    grads = {name: state.grads[name] for name in chosen if name not in used}
    if not grads:
        raise RuntimeError(
            f"{node!r} has nothing to apply: an earlier update has used every gradient of these parameters; put "
            "a Grad before it, or leave it out"
        )
    used.update(grads)
    params, opt_state = state.optimizer.update(grads, state.opt_state, state.params, state.scalar)
    return state.replace(params=params, opt_state=opt_state)


def _without(grads: dict[str, Tensor], used: set[str]) -> dict[str, Tensor]:
    return {name: grad for name, grad in grads.items() if name not in used}


def _matching(names: tuple[str, ...], wrt: str | None) -> tuple[str, ...]:
    if wrt is None:
        return names
    found = tuple(name for name in names if fnmatch.fnmatchcase(name, wrt))
    if not found:
        raise ValueError(f"wrt={wrt!r} matches no trainable parameter; there are {', '.join(names) or 'none'}")
    return found
