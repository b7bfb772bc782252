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
from purecompose.core.state import State
from purecompose.errors import FormError
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.outer import after_batch, begun, ended, fired
from purecompose.testing.record import (
    FORMED,
    LASTING,
    Act,
    Watched,
    changed_context,
    check_equal,
    compare,
    copied,
    inserted,
    run,
    snapshot,
)
from purecompose.testing.subject import Subject
from purecompose.testing.tasks import Task
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
    """Compare the forms at the end of each step, before the step's own check, and around each outer event.

    Parameters and buffers that are contiguous at the start must remain so.
    """
    log: list[tuple[Event, _Forms, _Forms]] = []
    start: _Forms = {}

    def around(event: Event, state: State, act: Act) -> State:
        before = _forms(state)
        after = act(state)
        if not subject.algorithm.host:
            _check_context(state, after, _LABELS, event)
        forms = _forms(after)
        if event not in step.events:
            _check_forms(before, forms, lambda field: event)
        log.append((event, before, forms))
        return after

    def at_end(state: State) -> State:
        def guilty(field: str) -> Event | None:
            return next((event for event, before, after in reversed(log) if before[field] != after[field]), None)

        _check_forms(start, _forms(state), guilty)
        return state

    watched = Watched(subject.algorithm, around)
    step = case.step(watched.algorithm, program=(*loop_events, at_end))
    outer = [event for event in Event if event not in step.events and event not in _NOT_FIRED]
    state = step.init(case.state())
    _check_not_inferred(state)
    start.update(_forms(state))
    state = fired(step, [event for event in outer if event.is_before_event], state)
    plain = case.step()
    for batch in case.batches():
        end = step.fold(state, batch)
        # Compared with the plain step: a new state's loss has the dtype of the weights, which the network's may not.
        expected = plain(plain.init(case.state()), batch).loss
        # With weights in half precision, losses of dense targets and of mixtures are float32 on purpose.
        if expected is None or torch.finfo(expected.dtype).bits >= 32:
            check_equal(_form(expected), _form(end.loss), ("without the algorithm", "with it"), "loss")
        state = step.finish(end)
    fired(step, [event for event in outer if not event.is_before_event], state)
    return watched.acted


_Forms = dict[str, Any]
"""For each field, the tree with descriptions instead of tensors; under "strided", weights that are not contiguous."""


def _forms(state: State) -> _Forms:
    forms: _Forms = {field: tree.map(_form, getattr(state, field)) for field in FORMED}
    weights = {"params": state.params, "buffers": state.buffers}
    return forms | {
        "strided": {f"{field}[{k!r}]" for field, found in weights.items() for k, v in found.items() if _is_strided(v)}
    }


def _form(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    marks = {" with requires_grad": leaf.requires_grad, " of inference_mode": leaf.is_inference()}
    return tree.describe(leaf) + "".join(mark for mark, holds in marks.items() if holds)


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_contiguous()


def _check_forms(before: _Forms, after: _Forms, guilty: Callable[[str], Event | None]) -> None:
    for field in FORMED:
        if before[field] != after[field]:
            check_equal(before[field], after[field], _LABELS, field, event=guilty(field))
    for path in sorted(after["strided"] - before["strided"]):
        raise Broken("it was contiguous, and is strided now", where=path, event=guilty("strided"))


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
    "an algorithm changes nothing that is not its own: others' slots and metrics, the run's key, hparams that it does "
    "not name, and the loss that was differentiated",
    "remember in state.slots[name], by the name that the factory was given; add to metrics: {**state.metrics, name: "
    "value}; draw from state.rng(name), which needs no new key; list the hparams that it writes in its config; report "
    "another loss as a metric, or declare Trait.EDITS_LOSS",
    exempt=never_acts,
)
def own_slot(subject: Subject, case: Case) -> bool:
    """Compare everything that belongs to others around each application, including INIT, and check the final loss.

    The loss at the end of the step must be the one that was computed or differentiated. If the algorithm can be created
    under another name, every second case does so; its slot must then have that name.
    """
    if case.seed % 2:
        subject = subject.renamed("renamed") or subject
    watched = Watched(subject.algorithm, watching_others(subject), with_init=True)
    losses = _Losses()
    # In one slice, so that its loss is the loss of the step.
    step = _in_company(subject, case).step(watched.algorithm, microbatches=1, program=losses.program)
    state = begun(step, case.state())
    for batch in case.batches():
        losses.seen.clear()
        state = after_batch(step, state, batch)
        if Trait.EDITS_LOSS not in subject.algorithm.traits:
            losses.check(state)
    ended(step, state)
    return watched.acted


def watching_others(subject: Subject) -> Callable[[Event, State, Act], State]:
    """Return an `around` that raises `Broken` if the algorithm changes others' slots, metrics, hparams or the key."""
    own_hparams, own_metrics = {hparam.name for hparam in subject.algorithm.hparams}, set[str]()

    def others(state: State) -> dict[str, Any]:
        return {
            "slots": {name: slot for name, slot in state.slots.items() if name != subject.name},
            "hparams": {name: value for name, value in state.hparams.items() if name not in own_hparams},
            "key": state.key,
        }

    def around(event: Event, state: State, act: Act) -> State:
        before = copied({**others(state), "metrics": state.metrics})
        after = act(state)
        own_metrics.update(after.metrics.keys() - state.metrics.keys())
        foreign = {name: value for name, value in before["metrics"].items() if name not in own_metrics}
        for now in (state, after):  # the given state, too, because it may have been edited in place
            found = {**others(now), "metrics": {name: now.metrics[name] for name in foreign if name in now.metrics}}
            for field, value in {**before, "metrics": foreign}.items():
                check_equal(value, found[field], _LABELS, field, event=event)
        return after

    return around


class _Losses:
    """The values of the loss after it is computed and after it is differentiated."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self.program = inserted(loop_events, self._after)

    def _after(self, node: Node) -> StateFn | None:
        if node is loss:
            return self._noting("computed")
        return self._noting("differentiated") if node in loop_events and not isinstance(node, Event) else None

    def _noting(self, where: str) -> StateFn:
        def look(state: State) -> State:
            if state.loss is not None and where not in self.seen:  # once, as further gradients are an algorithm's own
                self.seen[where] = float(state.loss.detach())
            return state

        return look

    def check(self, state: State) -> None:
        """Raise `Broken` unless the final loss is one of the two values; a scaled loss may be scaled back."""
        assert state.loss is not None
        found = float(state.loss)
        if not any(math.isclose(found, seen, rel_tol=1e-5, abs_tol=1e-6) for seen in self.seen.values()):
            seen = self.seen["differentiated"]
            if found == found or seen == seen:
                labels = ("as it was differentiated", "at the end of the step")
                raise Broken(tree.Difference("", "", seen, found), labels, where="loss")


def _sets_buffers(algorithm: Algorithm) -> str | None:
    return "it sets buffers on purpose (Trait.SETS_BUFFERS)" if Trait.SETS_BUFFERS in algorithm.traits else None


@define_law(
    "an algorithm leaves the network's buffers, such as BatchNorm's statistics, to the step's own forward pass",
    "drop the buffers of a forward pass of your own: outputs, _ = state.call(...); a "
    "method that is there to set buffers (averages, re-estimated statistics) declares Trait.SETS_BUFFERS",
    exempt=lambda algorithm: never_acts(algorithm) or _sets_buffers(algorithm),
    unsuited=lambda task: None if task.has_buffers else "its network has no buffers",
)
def buffers_kept(subject: Subject, case: Case) -> bool:
    """Compare the buffers around each application, and BatchNorm's counts of batches with and without the algorithm.

    The counts are not compared if INIT has replaced the network.
    """

    def around(event: Event, state: State, act: Act) -> State:
        before = snapshot(state, ["buffers"])
        after = act(state)
        for now in (state, after):
            compare(before, now, _LABELS, fields=["buffers"], event=event)
        return after

    watched = Watched(subject.algorithm, around)
    run(case.step(watched.algorithm), case.state(), case.batches())
    # In one slice, because an algorithm that selects examples may leave fewer of them than slices.
    steps = [case.step(*algorithms, microbatches=1) for algorithms in ((), (subject.algorithm,))]
    without, with_it = (run(step, case.state(), case.batches()).states[-1] for step in steps)
    if without.model == with_it.model:
        ours, theirs = (
            {name: count for name, count in state.buffers.items() if name.endswith("num_batches_tracked")}
            for state in (without, with_it)
        )
        check_equal(ours, theirs, ("without the algorithm", "with it"), "buffers")
    return watched.acted and bool(with_it.buffers)


def _nothing_frozen(task: Task) -> str | None:
    is_frozen = any(not param.requires_grad for param in task.make_net(0).parameters())
    return None if is_frozen else "its network has no frozen parameters"


@define_law(
    "what is frozen stays, bit for bit, and has no gradient",
    "go over state.grads or state.context.trainable, not over all of state.params: {**state.params, **{name: "
    "state.params[name] * 0.99 for name in state.context.trainable}}",
    exempt=never_acts,
    unsuited=_nothing_frozen,
)
def frozen_kept(subject: Subject, case: Case) -> bool:
    """Compare frozen parameters before and after each step, and check that no application adds a gradient of theirs.

    INIT is left out. A parameter that is frozen or unfrozen during a step counts as not frozen.
    """

    def around(event: Event, state: State, act: Act) -> State:
        after = act(state)
        frozen.intersection_update(after.context.frozen)
        for name in (after.grads or {}).keys() - (state.grads or {}).keys() - set(after.context.trainable):
            raise Broken("a gradient for a frozen parameter", where=f"grads[{name!r}]", event=event)
        return after

    frozen: set[str] = set()
    watched = Watched(subject.algorithm, around)
    step = case.step(watched.algorithm)
    state = begun(step, case.state())
    for batch in case.batches():
        frozen |= state.context.frozen
        after = after_batch(step, state, batch)
        frozen &= after.context.frozen & state.context.frozen
        ours, theirs = ({name: s.params[name] for name in sorted(frozen) if name in s.params} for s in (state, after))
        check_equal(ours, theirs, ("before the step", "after it"), "params")
        state = after
    return watched.acted


def _silent_at_init(algorithm: Algorithm) -> str | None:
    return "it does not act at INIT" if algorithm.predicate.at(Event.INIT) == NEVER else None


@define_law(
    "INIT done twice is INIT done once, in any order, and leaves existing weights as they are",
    "at INIT make the slot from the state's shapes and values, whatever is there already; change weights in later "
    "events, or by surgery that keeps what they compute",
    exempt=_silent_at_init,
    is_about_option=True,
    idle="it does not act at INIT",
)
def init_once(subject: Subject, case: Case) -> bool:
    """Initialise twice, apply INIT to its own result, and list the algorithm before and after its companions."""

    def around(event: Event, state: State, act: Act) -> State:
        before = snapshot(state, ["params", "buffers"])
        after = act(state)
        if event is Event.INIT:
            if after.model == state.model:
                compare(before, after, _LABELS, fields=["params", "buffers"], event=event)
            else:
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
    ours, theirs = ({k: slot for k, slot in state.slots.items() if k == subject.name} for state in (once, other))
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
