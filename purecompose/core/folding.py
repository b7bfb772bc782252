"""The fold: a program as one function `State -> State`.

Here events get their algorithms, scopes their meaning: whose gradient `Grad` takes, how `Microbatches` cuts and
averages, and which gradients an update has used.
"""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.functorch import is_fake
from purecompose.core.algorithm import Algorithm
from purecompose.core.contract import Contract
from purecompose.core.gradient import (
    Op,
    averaged,
    averaged_by_name,
    averaged_grads,
    check_terms,
    differentiate,
    num_terms,
)
from purecompose.core.loop import Cut, Grad, Microbatches, Node, Stage, Update, events_in, loss, walk
from purecompose.core.ranks import Ranks, Sharing
from purecompose.core.state import State
from purecompose.time.event import Event


__all__ = ["At", "Body", "Notes", "Unit", "build", "has_mean", "in_turn"]

At: TypeAlias = Callable[[Event], Sequence[tuple[Algorithm, Op]]]
"""What to do at an event: the algorithms that act there, in their order."""


def has_mean(metric: Any) -> bool:
    """Whether `Microbatches` averages a metric over the slices: a single floating number."""
    return isinstance(metric, Tensor) and metric.ndim == 0 and metric.is_floating_point()


@dataclass(slots=True)
class Notes:
    """What a run of the program knows beside the state."""

    used: set[str] = field(default_factory=set)
    """The gradients that an update has applied, by name: none applies them again.

    They stay in the state, for those who look, until the next Grad. A Grad makes new ones, and so may a stage;
    algorithms at events edit them, and a used one that was edited is not new.
    """
    terms: int | Tensor | None = None
    """In a slice: how many terms the last loss was a mean of."""
    sharing: Sharing = "all"
    """Where several processes share the batch: what gradients are of."""
    is_again: bool = False
    """Whether this is `state.gradient`, of which only gradients and loss are wanted."""
    contract: Contract | None = None
    """In a watched run: what looks at stages and updates."""


Body: TypeAlias = Callable[[State, Notes], State]
"""A part of a program."""


class Unit(NamedTuple):
    """One step of a fold: a stage, a scope, or one algorithm at one event."""

    run: Callable[..., State]
    """`state -> state`, or `(state, notes) -> state`."""
    takes_notes: bool
    node: int
    """Its place in the program: the index of the node it came from."""
    algorithm: Algorithm | None = None
    """Whom an event lets act."""
    sliced: "Callable[[Callable[[Body], Body]], Body] | None" = None
    """For a scope that runs on several slices of the batch: makes it anew, what runs on a slice put through a
    function, such as one that compiles it."""
    is_host: bool = False
    """Whether it is a host algorithm, or a scope in which one acts: runs outside compiled code."""


def build(node: Node, index: int, at: At, cut: Cut, ranks: Ranks | None = None) -> list[Unit]:
    """The steps of one node of the program.

    Args:
        node: The node.
        index: Its place in the program.
        at: Gives what to do at an event.
        cut: How batches are cut where the node does not say.
        ranks: The processes among which batches are divided, if there are several.
    """
    return _build_node(node, _Place(at, cut, ranks), index)


def in_turn(units: Sequence[Unit]) -> Body:
    """The steps one after the other."""
    ops = [(unit.run, unit.takes_notes) for unit in units]

    def run(state: State, notes: Notes) -> State:
        for op, takes_notes in ops:
            state = op(state, notes) if takes_notes else op(state)
        return state

    return run


class _Place(NamedTuple):
    """Where a part of a program stands."""

    at: At
    cut: Cut
    ranks: Ranks | None = None
    is_slice: bool = False
    """Whether the part runs on slices, whose gradient is not the step's."""
    is_weighted: bool = False
    """Whether there are several slices, so that someone wants to know the terms in their losses."""


def _build_body(program: Iterable[Node], place: _Place) -> Body:
    return in_turn([unit for index, node in enumerate(program) for unit in _build_node(node, place, index)])


def _build_node(node: Node, place: _Place, index: int) -> list[Unit]:
    if isinstance(node, Event):
        return [Unit(op, False, index, algorithm, is_host=algorithm.host) for algorithm, op in place.at(node)]
    if isinstance(node, Update):
        body: Body = lambda state, notes: _update(state, node, notes)  # noqa: E731
    elif isinstance(node, Grad):
        body = _grad(_build_body(node.body, place), node.wrt)
        body = body if place.is_slice else _repeatable(body)
    elif isinstance(node, Microbatches):

        def sliced(change: Callable[[Body], Body]) -> Body:
            return _repeatable(_with_own_gradients(_microbatches(node, place, change)), place.ranks)

        is_cut = ((node.cut or place.cut).may_slice or place.ranks is not None) and not place.is_slice
        is_host = any(algorithm.host for event in events_in(node.body) for algorithm, _ in place.at(event))
        return [Unit(sliced(lambda body: body), True, index, None, sliced if is_cut else None, is_host)]
    elif node is loss and place.is_weighted:
        body = _stage(loss, counts=True)
    else:
        body = _stage(node)
    return [Unit(body, True, index)]


def _microbatches(node: Microbatches, place: _Place, change: Callable[[Body], Body]) -> Body:
    cut = node.cut or place.cut
    # A single slice is the whole of what is around it, and its loss weighs there what it weighs alone.
    ranks, may_slice = place.ranks, cut.may_slice or place.ranks is not None
    inner = place._replace(ranks=None, is_slice=True, is_weighted=place.is_weighted or may_slice)
    body = _build_body(node.body, inner)
    if not may_slice:
        return body
    changed = change(body)
    if ranks is None:
        return lambda state, notes: _run_sliced(changed, state, notes, cut)
    wrt = [inner.wrt for inner in walk(node.body) if isinstance(inner, Grad)]
    return lambda state, notes: _run_shared(changed, state, notes, cut, ranks, wrt)


def _grad(body: Body, wrt: str | None) -> Body:
    def run(state: State, notes: Notes) -> State:
        names = _matching(state.context.trainable, wrt)
        if notes.used and state.grads is not None:
            state = state.replace(grads=_without(state.grads, notes.used) or None)
        after = differentiate(lambda inner: body(inner, notes), state, names)
        notes.used.difference_update(names)
        return after

    return run


def _with_own_gradients(body: Body) -> Body:
    """Earlier gradients are no slice's: what a slice did with them would be done as often as there are slices."""

    def run(state: State, notes: Notes) -> State:
        if state.grads is None:
            return body(state, notes)
        inside = Notes(sharing=notes.sharing, is_again=notes.is_again, contract=notes.contract)
        after = body(state.replace(grads=None), inside)
        notes.terms = inside.terms
        if not after.grads:
            return after.replace(grads=state.grads)
        earlier = _without(state.grads, notes.used)
        notes.used.difference_update(after.grads)
        notes.used.update(inside.used)
        return after.replace(grads={**earlier, **after.grads})

    return run


def _stage(node: Op, *, counts: bool = False) -> Body:
    """A stage, or any function `State -> State`; with `counts` it is the loss, and notes its terms."""
    op = _noted(node) if isinstance(node, Stage) else node

    def run(state: State, notes: Notes) -> State:
        after = op(state)
        if notes.contract is not None:
            notes.contract.note_stage(node)
            if node is loss:
                check_terms(after)
        if counts:
            notes.terms = num_terms(after)
        if notes.used and after.grads:
            before = state.grads or {}
            notes.used.difference_update(name for name, grad in after.grads.items() if grad is not before.get(name))
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
    return f"{type(value).__name__}({', '.join(map(tree.describe, batches.tensors(value)))})"


class _Again:
    """`state.gradient`: the gradient's part of a step, run again at other parameters.

    A node of the tree with the state that the part began with, so that it can cross a seam between compiled parts,
    and a `vmap`.
    """

    def __init__(self, run_once: Body, used: frozenset[str], ranks: Ranks | None, state: State) -> None:
        self.run_once, self.used, self.ranks, self.state = run_once, used, ranks, state

    def __call__(self, params: dict[str, Tensor], sharing: Sharing = "all") -> tuple[dict[str, Tensor], Tensor]:
        again = self.run_once(self.state.replace(params=params), Notes(set(self.used), sharing=sharing, is_again=True))
        if again.grads is None or again.loss is None:
            raise RuntimeError("state.gradient(params): the program has no Grad with a loss")
        return again.grads, again.loss


tree.register_node(
    _Again,
    lambda again: (("state",), (again.state,), (again.run_once, again.used, again.ranks)),
    lambda names, children, static: _Again(*static, *children),
)


def _repeatable(run_once: Body, ranks: Ranks | None = None) -> Body:
    """The gradient's part of a step, which leaves the way to run it again: `state.gradient`."""

    def run(state: State, notes: Notes) -> State:
        if state.regrad is not None:  # the gradient of an earlier part is not to be had within this one
            state = state.replace(regrad=None)
        again = _Again(run_once, frozenset(notes.used), ranks, state)
        return run_once(state, notes).replace(batch=state.batch, regrad=again)

    return run


def _run_sliced(body: Body, state: State, notes: Notes, cut: Cut) -> State:
    """Runs the body on the slices and averages loss, gradients and metrics, each slice weighted by its terms."""
    if notes.contract is not None:
        _check_rows(state)
    current, offset, total, earlier_terms = state, 0, 0, notes.terms
    mean_loss: Tensor | None = None
    mean_grads: dict[str, Tensor] | None = None
    mean_metrics: dict[str, Tensor] = {}
    # A ragged last batch, or one that a method made smaller, may have fewer examples than slices.
    layout = state.context.layout
    for part in layout.split(state.batch, cut.num_slices(state.num_examples)):
        size = layout.num_examples(part)
        first = offset if state.first_example is None else state.first_example + offset
        # What a slice makes anew it does not find from the one before.
        anew = {"loss": None, "outputs": state.outputs, "grads": None, "metrics": state.metrics}
        notes.terms = None
        current = body(current.replace(batch=part, first_example=first, **anew), notes)
        weight = size if notes.terms is None else notes.terms
        total, offset = total + weight, offset + size
        if current.loss is not None:
            mean_loss = averaged(mean_loss, current.loss, weight, total)
        if current.grads is not None:
            mean_grads = averaged_grads(mean_grads, current.grads, weight, total)
        if current.metrics is not state.metrics:
            numbers = {name: value for name, value in current.metrics.items() if has_mean(value)}
            mean_metrics = averaged_by_name(mean_metrics, numbers, state.metrics, weight, total)
    notes.terms = earlier_terms if notes.terms is None else total  # for a slice around these
    means = {"loss": mean_loss, "grads": mean_grads, "metrics": {**current.metrics, **mean_metrics}}
    return current.replace(batch=state.batch, first_example=state.first_example, **means)


def _check_rows(state: State) -> None:
    """Raises where the inputs and targets of a batch that is to be cut differ in their number of examples."""
    if state.context.layout.splitter is not None:
        return
    dim = state.context.layout.dim
    try:
        inputs, targets = (batches.leading_size(member, dim) for member in (state.inputs, state.targets))
    except KeyError:  # a batch without targets, or with those of a model's own loss
        return
    if inputs is not None and targets is not None and inputs != targets:
        raise ValueError(
            f"the batch cannot be cut into parts: expected the same number of examples along dimension {dim} of inputs "
            f"and targets, got {inputs} and {targets}; for sequences (T, N, ...) give State.create batch_dim=1"
        )


def _run_shared(body: Body, state: State, notes: Notes, cut: Cut, ranks: Ranks, wrt: Sequence[str | None]) -> State:
    """Runs the body on this rank's slices, and puts together what all ranks have found.

    `wrt` are the patterns of the gradients that the body takes.
    """
    if notes.sharing == "none":
        return _run_sliced(body, state, notes, cut)
    if notes.contract is not None:
        _check_rows(state)
    share = ranks.share(state.batch, state.context.layout)
    first = share.first_example if state.first_example is None else state.first_example + share.first_example
    earlier_terms, notes.terms = notes.terms, None
    after = _run_sliced(body, state.replace(batch=share.batch, first_example=first), notes, cut)
    terms, notes.terms = notes.terms, earlier_terms
    after = after.replace(batch=state.batch, first_example=state.first_example)
    if notes.sharing == "own":
        return after
    for name in ("params", "opt_state", "hparams", "key"):
        if getattr(after, name) is not getattr(state, name):
            raise RuntimeError(
                f"data_parallel: {name} changed between BEFORE_FORWARD and AFTER_BACKWARD, where each process sees its "
                "own part of the batch, and states would come apart: change it at AFTER_TRAIN_BATCH or later; an "
                "update belongs after Microbatches"
            )
    weight = share.num_examples if terms is None or not share.num_examples else terms
    names = [name for pattern in wrt for name in _matching(state.context.trainable, pattern)]
    after = _averaged_over_ranks(state, after, names, weight, ranks)
    if notes.is_again:
        return after
    return after.replace(
        buffers=ranks.with_buffers(state.buffers, after.buffers, share.num_examples),
        slots=ranks.with_slots(state.slots, after.slots, counts=share.num_examples > 0),
    )


def _averaged_over_ranks(
    before: State, after: State, names: Sequence[str], weight: int | Tensor, ranks: Ranks
) -> State:
    """The state with loss, gradients and new metrics averaged over the ranks.

    Args:
        before: The state before the ranks' parts.
        after: The state after this rank's part.
        names: The parameters that the part differentiates in, the same on all ranks.
        weight: What this rank's part counts.
        ranks: The processes.
    """
    new = {name: value for name, value in after.metrics.items() if value is not before.metrics.get(name)}
    found: dict[str, Any] = {"metrics": {name: value for name, value in new.items() if has_mean(value)}}
    if after.loss is not None:
        found["loss"] = after.loss
    own = after.grads or {}
    # A part may reach parameters that others do not, and all ranks must send the same. Traced steps cannot tell the
    # difference, and need not: all ranks have one graph.
    flags = None
    if own and not is_fake(before.key):
        found["grads"] = {**{name: torch.zeros_like(before.params[name]) for name in names}, **own}
        is_reached = torch.tensor([name in own for name in found["grads"]])
        flags = is_reached.to(before.device, non_blocking=True)
    elif own:
        found["grads"] = own
    leaves, spec = tree.flatten(found)
    averages, count = ranks.means_and_count(leaves, weight, flags)
    means = tree.unflatten(spec, averages)
    # Where this rank's part reaches all of them, there is no need to wait for the device to read the flags.
    if count is not None and len(own) < len(count):
        reached = zip(means["grads"].items(), count.tolist(), strict=True)
        means["grads"] = {name: grad for (name, grad), num_ranks in reached if num_ranks}
    return after.replace(**{**means, "metrics": {**after.metrics, **means["metrics"]}})


def _update(state: State, node: Update, notes: Notes) -> State:
    used = notes.used
    if state.grads is None:
        raise RuntimeError("the program's update comes before any Grad: there are no gradients")
    if not state.grads:  # a method has taken them all, for a later step
        return state
    if node.wrt is None:
        chosen = state.grads
    else:
        # By all trainable names: gradients that an earlier update has used are gone after the next Grad.
        chosen = _matching(tuple(dict.fromkeys([*state.context.trainable, *state.grads])), node.wrt)
    grads = {name: state.grads[name] for name in chosen if name in state.grads and name not in used}
    if not grads:
        if used.isdisjoint(chosen):  # the loss does not reach them
            return state
        raise RuntimeError(
            f"{node!r} has nothing to apply: an earlier update has used every gradient of these parameters; put "
            "a Grad before it, or leave it out"
        )
    used.update(grads)
    try:
        result = state.optimizer.update(grads, state.opt_state, state.params, state.scalar)
    except Exception as error:
        error.add_note(f"in the update of the optimizer {state.optimizer!r}")
        raise
    if notes.contract is not None:
        notes.contract.note_update(state, result)
    params, opt_state = result
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
