"""Laws of the contract: an algorithm keeps the form of persistent fields, and changes only what belongs to it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.loop import eval_events, loop_events, loss, predict_events
from purecompose.core.operation import Node
from purecompose.core.program import StateFn, events_in
from purecompose.core.scopes import Microbatches
from purecompose.core.state import State
from purecompose.errors import FormError
from purecompose.testing.case import Case, Subject
from purecompose.testing.law import Broken, acts_in_step, define_law, never_acts
from purecompose.testing.record import (
    FORMED,
    LASTING,
    Act,
    Watched,
    after_batch,
    begun,
    changed_context,
    check_equal,
    compare,
    ended,
    fired,
    inserted,
    run,
    snapshot,
)
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER


_LABELS = ("before", "after")
_NOT_FIRED = frozenset(
    {Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, *events_in(eval_events), *events_in(predict_events)}
)


@define_law(
    "what outlives a step or an outer event keeps its structure, shapes, dtypes and device",
    "make slots and surgery at INIT; give results back as they came: x.to(old.dtype), x.reshape(old.shape), "
    "x.detach(), x.contiguous(); let nothing last that torch.inference_mode has made",
    owns=(FormError,),
    exempt=never_acts,
)
def structure_kept(subject: Subject, case: Case) -> bool:
    """Compare the forms before and after each step, beyond what the step checks itself, and around each outer event.

    Parameters and buffers that are contiguous at the start must remain so.
    """

    def around(event: Event, state: State, act: Act) -> State:
        after = act(state)
        if not subject.algorithm.host:
            _check_context(state, after, _LABELS, event)
        if event not in step.events:
            _check_forms(state, after, event)
        return after

    watched = Watched(subject.algorithm, around)
    step, plain = case.step(watched.algorithm), case.step()
    outer = [event for event in Event if event not in step.events and event not in _NOT_FIRED]
    state = step.init(case.state())
    _check_not_inferred(state)
    state = fired(step, [event for event in outer if event.is_before_event], state)
    for batch in case.batches():
        end = step.fold(state, batch)
        # Compared with the plain step: a new state's loss has the dtype of the weights, which the network's may not.
        expected = plain(plain.init(case.state()), batch).loss
        # With weights in half precision, losses of dense targets and of mixtures are float32 on purpose.
        if expected is None or torch.finfo(expected.dtype).bits >= 32:
            check_equal(_form(expected), _form(end.loss), ("without the algorithm", "with it"), "loss")
        before, state = state, step.finish(end)
        _check_forms(before, state)
    fired(step, [event for event in outer if not event.is_before_event], state)
    return watched.acted


def _check_forms(first: State, second: State, event: Event | None = None) -> None:
    for field in FORMED:
        ours, theirs = getattr(first, field), getattr(second, field)
        check_equal(tree.map(_form, ours), tree.map(_form, theirs), _LABELS, field, event=event)
    for field in ("params", "buffers"):
        ours, theirs = getattr(first, field), getattr(second, field)
        for name, leaf in theirs.items():
            if not leaf.is_contiguous() and ours[name].is_contiguous():
                raise Broken("it was contiguous, and is strided now", where=f"{field}[{name!r}]", event=event)


def _form(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    marks = {" with requires_grad": leaf.requires_grad, " of inference_mode": leaf.is_inference()}
    return tree.describe(leaf) + "".join(mark for mark, holds in marks.items() if holds)


def _check_not_inferred(state: State) -> None:
    for field in FORMED:
        for path, leaf in tree.leaves_with_paths(getattr(state, field)).items():
            if isinstance(leaf, Tensor) and leaf.is_inference():
                raise Broken(f"{_form(leaf)}: no gradient flows there", where=f"{field}{path}", event=Event.INIT)


def _check_context(first: State, second: State, labels: tuple[str, str], event: Event) -> None:
    name = changed_context(first, second)
    if name is not None:
        values = getattr(first.context, name), getattr(second.context, name)
        raise Broken(tree.Difference(name, "", *values), labels, event=event, where="context.")


@define_law(
    "an algorithm changes nothing that is not its own: others' slots and metrics, what draws depend on (the run's key, "
    "the clock, the number of the first example), hparams that it does not name, frozen parameters, the network's "
    "buffers, and the loss that was differentiated",
    "remember in state.slots[name], by the name that the factory was given; add to metrics: {**state.metrics, name: "
    "value}; draw from state.rng(name) or state.example_rng(name), which use nothing up; list the hparams that it "
    "writes in its config; go over state.grads or state.context.trainable, not over all of state.params (or declare "
    "Trait.SETS_WEIGHTS); drop the buffers of a forward pass of your own: outputs, _ = state.call(...), or declare "
    "Trait.SETS_BUFFERS; report another loss as a metric, or declare Trait.EDITS_LOSS",
    exempt=never_acts,
)
def own_slot(subject: Subject, case: Case) -> bool:
    """Compare everything that belongs to others around each application, including INIT, and check the final loss.

    One parameter more than the task's is frozen. The loss at the end of the step must be the one that was computed or
    differentiated. If the algorithm can be created under another name, every second case does so; its slot must then
    have that name.
    """
    if case.seed % 2:
        subject = subject.renamed("renamed") or subject
    watched, seen = Watched(subject.algorithm, watching_others(subject), with_init=True), dict[str, float]()
    # In one slice, so that its loss is the loss of the step.
    program = inserted(loop_events, lambda node: _loss_noted(node, seen))
    step = _in_company(subject, case).step(watched.algorithm, microbatches=1, program=program)
    state = begun(step, _with_frozen_param(case))
    for batch in case.batches():
        seen.clear()
        state = after_batch(step, state, batch)
        if Trait.EDITS_LOSS not in subject.algorithm.traits:
            _check_loss(state, list(seen.values()))
    ended(step, state)
    return watched.acted


def _with_frozen_param(case: Case) -> State:
    """Return the case's state with one more frozen parameter, chosen by the seed, so that writes into it are seen."""
    state = case.state()
    trained = state.context.trainable
    names = [name for name in trained if state.params[name].any()]  # a method that scales a zero changes nothing
    if len(trained) < 2 or not names:
        return state
    return state.replace(frozen={*state.context.frozen, names[case.seed % len(names)]})


def watching_others(subject: Subject) -> Callable[[Event, State, Act], State]:
    """Return an `around` that raises `Broken` if the algorithm changes what is not its own."""
    own_hparams, own_metrics = {hparam.name for hparam in subject.algorithm.hparams}, set[str]()
    sets_weights, sets_buffers = (
        trait in subject.algorithm.traits for trait in (Trait.SETS_WEIGHTS, Trait.SETS_BUFFERS)
    )

    def others(state: State, event: Event, frozen: frozenset[str]) -> dict[str, Any]:
        found = {
            "slots": {name: slot for name, slot in state.slots.items() if name not in subject.algorithm.names},
            "hparams": {name: value for name, value in state.hparams.items() if name not in own_hparams},
            "metrics": {name: value for name, value in state.metrics.items() if name not in own_metrics},
            "key": state.key,
            "first_example": state.first_example,
            "clock": None if state.clock is None else (state.clock.values, state.clock.domain),
        }
        # INIT may replace layers, and an evaluation exchange the weights.
        if event is not Event.INIT and not event.is_eval and not event.is_predict:
            kept = () if sets_weights else frozen
            found["params"] = {name: param for name, param in state.params.items() if name in kept}
            found["buffers"] = {} if sets_buffers else state.buffers
        return found

    def around(event: Event, state: State, act: Act) -> State:
        before = snapshot(state, ("slots", "hparams", "metrics", "key", "params", "buffers"))
        after = act(state)
        own_metrics.update(after.metrics.keys() - state.metrics.keys())
        frozen = state.context.frozen & after.context.frozen
        expected = others(before, event, frozen)
        for now in (state, after):  # the given state, too, because it may have been edited in place
            found = others(now, event, frozen)
            for field, value in expected.items():
                check_equal(value, found[field], _LABELS, field, event=event)
        for name in (after.grads or {}).keys() - (state.grads or {}).keys() - set(after.context.trainable):
            raise Broken("a gradient for a frozen parameter", where=f"grads[{name!r}]", event=event)
        return after

    return around


def _loss_noted(node: Node, seen: dict[str, float]) -> StateFn | None:
    """Return a stage that notes the loss after the stage `loss` and after the gradient; `None` for other nodes."""
    if node is not loss and not isinstance(node, Microbatches):
        return None
    where = "computed" if node is loss else "differentiated"

    def look(state: State) -> State:
        if state.loss is not None and where not in seen:  # once, as further gradients are an algorithm's own
            seen[where] = float(state.loss.detach())
        return state

    return look


def _check_loss(state: State, seen: list[float]) -> None:
    """Raise `Broken` unless the final loss was computed or differentiated; a scaled loss may be scaled back."""
    assert state.loss is not None
    found, differentiated = float(state.loss), seen[-1]
    is_nan = found != found and differentiated != differentiated
    if not is_nan and not any(math.isclose(found, one, rel_tol=1e-5, abs_tol=1e-6) for one in seen):
        labels = ("as it was differentiated", "at the end of the step")
        raise Broken(tree.Difference("", "", differentiated, found), labels, where="loss")


def _silent_at_init(algorithm: Algorithm) -> str | None:
    return "it does not act at INIT" if algorithm.predicate.at(Event.INIT) == NEVER else None


@define_law(
    "INIT done twice is INIT done once, in any order, and leaves existing weights as they are",
    "at INIT make the slot from the state's shapes and values, whatever is there already; change weights in later "
    "events, or by surgery that keeps what they compute, or declare Trait.SETS_WEIGHTS",
    exempt=_silent_at_init,
    idle="it does not act at INIT",
)
def init_once(subject: Subject, case: Case) -> bool:
    """Initialise twice, apply INIT to its own result, and list the algorithm before and after its companions."""

    def around(event: Event, state: State, act: Act) -> State:
        before = snapshot(state, ["params", "buffers"])
        after = act(state)
        if event is Event.INIT:
            if Trait.SETS_WEIGHTS not in subject.algorithm.traits and after.model == state.model:
                compare(before, after, _LABELS, fields=["params", "buffers"], event=event)
            elif after.model != state.model:
                _check_weights_kept(state, after, case)
            _check_twice(after, act(after), "INIT applied to its own result")
        return after

    watched = Watched(subject.algorithm, around, with_init=True)
    case = _in_company(subject, case)
    early, late = (dataclasses.replace(case, place=place) for place in (0, len(case.others)))
    step = early.step(watched.algorithm)
    once = step.init(early.state())
    _check_twice(once, step.init(once), "after step.init twice")
    other = late.step(watched.algorithm).init(late.state())
    ours, theirs = (
        {k: slot for k, slot in state.slots.items() if k in subject.algorithm.names} for state in (once, other)
    )
    check_equal(ours, theirs, ("listed before the others", "listed after them"), "slots", event=Event.INIT)
    return watched.acted


def _check_weights_kept(before: State, after: State, case: Case) -> None:
    """Raise `Broken` if surgery changes weights that keep their names, and with them the function of the network."""
    shared = [
        name
        for name, param in before.params.items()
        if name in after.params and _form(param) == _form(after.params[name])
    ]
    ours, theirs = ({name: state.params[name] for name in shared} for state in (before, after))
    if tree.equal(ours, theirs):
        return
    inputs = before.replace(batch=case.batch(0)).inputs
    outputs = [batches.tensors(state.forward(inputs, train=False)) for state in (before, after)]
    if list(tree.differences(*outputs, tolerance=_SAME_FUNCTION)):
        check_equal(ours, theirs, _LABELS, "params", event=Event.INIT)


_SAME_FUNCTION = 1e-3


def _check_twice(once: State, twice: State, label: str) -> None:
    labels = ("after INIT", label)
    compare(once, twice, labels, fields=LASTING, event=Event.INIT)
    _check_context(once, twice, labels, Event.INIT)


def _in_company(subject: Subject, case: Case) -> Case:
    """Return the case with at least one companion that has a slot."""
    if "bystander" in (*case.others, subject.name):
        return case
    return dataclasses.replace(case, others=(*case.others, "bystander"))


# Signs and bounded gradients change with the first, and what depends on sizes with the second.
_MOVES = (torch.neg, lambda grad: torch.ones_like(grad) - 2 * grad)


def _sets_no_gradients(algorithm: Algorithm) -> str | None:
    if Trait.RENEWS_GRADIENTS in algorithm.traits:
        return "it computes the gradients again, before others edit them (Trait.RENEWS_GRADIENTS)"
    return never_acts(algorithm) or (None if acts_in_step(algorithm) else "it never acts within a step")


@define_law(
    "a method that sets gradients builds on those that it is given, so that what others did to them is kept",
    "start from state.grads; a method that computes them again from the batch, by state.gradient or state.gradients, "
    "declares Trait.RENEWS_GRADIENTS, by which it acts before those that edit them",
    exempt=_sets_no_gradients,
    idle="it sets no gradients",
)
def gradients_taken(subject: Subject, case: Case) -> bool:
    """Apply the algorithm again to states with other gradients, wherever it sets gradients that are not zero.

    Each of them must be another one in one of these, unless the given ones are in its slot, for a later step.
    """
    was_judged = False

    def around(event: Event, state: State, act: Act) -> State:
        nonlocal was_judged
        after = act(state)
        given, found = state.grads or {}, after.grads or {}
        names = [name for name in found if name in given and found[name] is not given[name] and found[name].any()]
        if names:
            was_judged = True
            others = [act(state.replace(grads={name: move(grad) for name, grad in given.items()})) for move in _MOVES]
            slots = [one.slots.get(subject.name) for one in (after, *others)]
            is_kept = not all(tree.equal(slots[0], slot) for slot in slots)
            for name in names if not is_kept else ():
                if all(tree.equal(found[name], (one.grads or {}).get(name)) for one in others):
                    what = "it is the same whatever gradients are given, so edits of other methods are lost"
                    raise Broken(what, event=event, where=f"grads[{name!r}]")
        return after

    run(case.step(Watched(subject.algorithm, around).algorithm), case.state(), case.batches())
    return was_judged
