"""Laws of whole runs: evaluation in between, pairs of events, `fit`, memory over many steps, and resuming."""

import dataclasses
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from purecompose import tree
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events, loop_events, update
from purecompose.core.operation import walk
from purecompose.core.program import events_in
from purecompose.core.state import State
from purecompose.errors import CheckpointError, InPlaceError
from purecompose.metrics import mean_loss
from purecompose.run.evaluation import Evaluator, evaluate, predict
from purecompose.run.fit import fit
from purecompose.run.saving.checkpoint import load, save
from purecompose.testing.case import Case, Subject
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.process import (
    RemoteError,
    Unportable,
    elsewhere,
    ignoring_missing_terms,
    in_new_processes,
    process_settings,
)
from purecompose.testing.record import (
    Act,
    Watched,
    after_batch,
    begun,
    check_equal,
    check_process,
    compare,
    copied,
    snapshot,
)
from purecompose.testing.suite.contract import watching_others
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER


# One evaluation before the first step and one after it are enough to show a leak.
_FEW = 2


@define_law(
    "evaluation changes nothing in training, training methods change nothing in evaluation, and prediction sees the "
    "weights that evaluation sees",
    "act at events of training; for evaluation replace params or buffers at EVAL_START and PREDICT_START, and no "
    "more, or outputs in both, by Trait.REPLACES_OUTPUTS; remember in state.slots[name], not in a closure",
    exempt=never_acts,
)
def evaluation_blind(subject: Subject, case: Case) -> bool:
    """Evaluate and predict between the steps of one of two runs, and compare it with evaluations without algorithms.

    An algorithm may exchange weights, params or buffers, at EVAL_STANDALONE_START, EVAL_START and PREDICT_START
    (averaged weights). After that, batches, targets, outputs and metrics must be those of a step without algorithms
    with these weights; the algorithm may add its own metrics. One that declares `Trait.REPLACES_OUTPUTS` may have other
    outputs, the same in evaluation and prediction.
    """
    watched, data = Watched(subject.algorithm), case.batches()[:_FEW]
    step = case.step(watched.algorithm)
    plain_states = [begun(step, case.state())]
    for batch in data:
        plain_states.append(after_batch(step, plain_states[-1], batch))
    state = begun(step, case.state())
    for batch, expected in zip(data, plain_states[1:], strict=True):
        _evaluate(step, state, data[:1], may_replace=Trait.REPLACES_OUTPUTS in subject.algorithm.traits)
        state = after_batch(step, state, batch)
        compare(expected, state, ("without evaluation in between", "with it"))
    return watched.acted


def _evaluate(step: Step, state: State, data: Sequence[Any], *, may_replace: bool) -> None:
    """Evaluate and predict, and compare each with the result of a step without algorithms, or with one another."""
    before, labels = snapshot(state, _EVALUATED), ("the network's own", "through the step")
    try:
        begun = step.fire(Event.EVAL_STANDALONE_START, state)
        in_evaluation = _with_weights(state, step.fire(Event.EVAL_START, begun))
        in_prediction = _with_weights(state, step.fire(Event.PREDICT_START, state))
        with ignoring_missing_terms():
            ours, theirs = evaluate(in_evaluation, data), evaluate(state, data, step=step)
        outputs = predict(state, data, step=step)
        if may_replace:
            check_equal(_evaluated(step, state, data), outputs, ("in evaluation", "in prediction"), "outputs")
        else:
            # The algorithm may add its own metrics.
            check_equal(dict(ours), {name: theirs.get(name) for name in ours}, labels, "metrics")
            check_equal(predict(in_prediction, data), outputs, labels, "outputs")
    except InPlaceError as error:
        raise Broken(str(error), event=error.event) from error
    # Both exchange the weights, or neither; their own draws may differ.
    if _are_exchanged(state, in_evaluation) != _are_exchanged(state, in_prediction):
        compare(in_evaluation, in_prediction, ("in evaluation", "in prediction"), fields=_EVALUATED[:2])
    compare(before, state, ("before evaluation", "after it"), fields=_EVALUATED)


_EVALUATED = ("params", "buffers", "slots")


def _evaluated(step: Step, state: State, data: Sequence[Any]) -> list[Any]:
    """Return the outputs in an evaluation, for each batch."""
    inner = step.replace(program=eval_events)
    start = inner.fire(Event.EVAL_START, state)
    return [inner.fold(start, batch, domain="eval", draw=number).outputs for number, batch in enumerate(data)]


def _with_weights(state: State, started: State) -> State:
    """Return the training state with the weights of evaluation."""
    return state.replace(params=started.params, buffers=started.buffers)


def _are_exchanged(state: State, evaluated: State) -> bool:
    return any(not tree.equal(getattr(state, field), getattr(evaluated, field)) for field in _EVALUATED[:2])


def _pairs(algorithm: Algorithm) -> dict[Event, Event]:
    """Return the pairs of opening and closing events of a training step at which the algorithm may act."""
    events = [event for event in events_in(loop_events) if event in algorithm.events]
    return {
        opening: closing
        for opening in events
        for closing in events
        if opening.is_before_event and closing.is_after_event and opening.canonical_name == closing.canonical_name
    }


def _no_pair(algorithm: Algorithm) -> str | None:
    if algorithm.predicate == NEVER:
        return never_acts(algorithm)
    return None if _pairs(algorithm) else "it acts on both halves of no before/after pair"


@define_law(
    "whatever the algorithm replaces at a BEFORE event is restored after the matching AFTER event",
    "keep the original in state.slots[name] at the first event, put that back at the second and drop the slot; do not "
    "compute it back; let both halves match at the same times; or, if the change is meant to last, act at the closing "
    "event in a second algorithm",
    exempt=_no_pair,
    idle="it puts nothing in place of something that it touches again at the closing event of the pair",
)
def pairs_undone(subject: Subject, case: Case) -> bool:
    """Check at the closing event of a pair that what was replaced at the opening one is as it was.

    That is the batch, single hparams and the set of frozen parameters; also the parameters, for pairs between whose
    events the optimizer does not change them. Values and dtypes must agree. A replacement may last, unless the
    algorithm has put the original into its slot or changes the same thing at the closing event.
    """
    pairs, has_judged = _pairs(subject.algorithm), False
    keeps_params = _events_that_keep_params(pairs)
    replaced: dict[Event, dict[str, Any]] = {}
    kept: dict[Event, list[Tensor]] = {}
    left, changed_alone = set[tuple[Event, str]](), set[tuple[Event, str]]()

    def fields(state: State, event: Event) -> dict[str, Any]:
        hparams = {f"hparams[{name!r}]": value for name, value in state.hparams.items()}
        found = {"batch": state.batch, "frozen": state.context.frozen, **hparams}
        return found | ({"params": state.params} if event in keeps_params else {})

    def around(event: Event, state: State, act: Act) -> State:
        nonlocal has_judged
        before, slot = copied(fields(state, event)), state.slots.get(subject.name)
        after = act(state)
        now = fields(after, event)
        changed = {name: value for name, value in before.items() if not tree.equal(value, now.get(name))}
        if event in pairs:
            replaced[pairs[event]] = changed
            kept[pairs[event]] = _new_tensors(slot, after.slots.get(subject.name))
            return after
        opened = replaced.pop(event, {})
        changed_alone.update((event, name) for name in changed if name not in opened)
        for name, original in opened.items():
            if name in changed or _is_among(kept[event], original, before[name]):
                has_judged = True
                check_equal(original, now.get(name), ("before the pair", f"after {event.name}"), name, event=event)
        return after

    step = case.step(Watched(subject.algorithm, around).algorithm)
    state = step.init(case.state())
    for batch in case.batches():
        state = step(state, batch)
        left |= {(event, name) for event, names in replaced.items() for name in names}
        replaced.clear()
    for event, name in left & changed_alone:
        raise Broken("it is replaced in one step, and changed back in another", where=name, event=event)
    return has_judged


def _events_that_keep_params(pairs: Mapping[Event, Event]) -> set[Event]:
    """Return the events of the pairs between which the optimizer does not change the parameters."""
    nodes = list(walk(loop_events))
    updated = nodes.index(update)
    same_side = [pair for pair in pairs.items() if (nodes.index(pair[0]) > updated) == (nodes.index(pair[1]) > updated)]
    return {event for pair in same_side for event in pair}


def _new_tensors(before: Any, after: Any) -> list[Tensor]:
    """Return the tensors of a slot that were not there before."""
    old = {id(leaf) for leaf in tree.leaves(before)}
    return [leaf for leaf in tree.leaves(after) if isinstance(leaf, Tensor) and id(leaf) not in old]


def _is_among(kept: Sequence[Tensor], original: Any, now: Any) -> bool:
    """Return whether one of the replaced tensors is among those that were kept."""
    current = tree.leaves_with_paths(now, into_objects=True)
    replaced = [
        leaf
        for path, leaf in tree.leaves_with_paths(original, into_objects=True).items()
        if isinstance(leaf, Tensor) and not tree.equal(leaf, current.get(path))
    ]
    return any(tree.equal(leaf, other) for leaf in replaced for other in kept)


_FIT_LABELS = ("in the first run", "in the second")
_MOST_BATCHES = 8


@define_law(
    "two runs of fit from one state end alike, bit for bit, and leave the state, what is not the algorithm's own and "
    "the process as they were",
    "remember in state.slots[name], made at INIT, also from one epoch to the next; at events outside the step, too, "
    "go over state.context.trainable, replace your own slot only, and leave global settings alone",
    exempt=never_acts,
    most_cases=8,
)
def fit_repeats(subject: Subject, case: Case) -> bool:
    """Train twice with `fit`, including evaluation, and compare the final states and all metrics that observers see.

    The second time the clocks, the global generators and the process's rank are different. A long run ends after a few
    batches.
    """
    watched = Watched(subject.algorithm, watching_others(subject))
    step = case.step(watched.algorithm)
    start = step.init(case.state())
    before = snapshot(start)
    (first, metrics), (second, metrics_again) = (_fitted(step, start, case, seed) for seed in (1, 2))
    compare(before, start, ("before fit", "after it"))
    check_equal(metrics, metrics_again, _FIT_LABELS, "metrics seen by observers")
    compare(first, second, _FIT_LABELS)
    return watched.acted


def _fitted(step: Step, start: State, case: Case, seed: int) -> tuple[State, list[dict[str, Any]]]:
    """Return the final state of a run, and the metrics that it has shown to observers."""
    shown: list[dict[str, Any]] = []

    def look(event: Event, state: State) -> None:
        del event
        shown.append(dict(state.metrics))

    data = [case.batch(index) for index in range(case.batches_per_epoch)]
    evaluator = Evaluator([case.batch(0)], {"loss": mean_loss()})
    total = case.epochs * case.batches_per_epoch
    duration = f"{case.start + _MOST_BATCHES}ba" if total - case.start > _MOST_BATCHES else None
    with ignoring_missing_terms(), elsewhere(seed):
        before = process_settings()
        end = fit(step, start, data, duration=duration, evaluate=evaluator, observers=look)
        check_process(before, ("before fit", "after it"))
    return end, shown


_RESUMED_LABELS = ("without a break", "resumed")


@define_law(
    "a run that is saved, loaded in a new process and continued ends bit for bit as one without a break",
    "remember in state.slots[name], made at INIT, not in a closure, a list or a global; draw from state.rng(name), not "
    "from a clock, a process number or hash(text); ask state.clock for the time, not a counter of calls; sets iterate "
    "in another order in each process: sorted(...); an optimizer or precision that a host algorithm sets on the way is "
    "not in the checkpoint: set it at INIT, or again in each step",
    owns=(CheckpointError,),
    exempt=never_acts,
)
def resume_exact(subject: Subject, case: Case) -> bool:
    """Save in the middle of a run, within an epoch if its length allows, and continue in another process.

    There the algorithm is created from the subject's source text, in a process in which it has not run before, and the
    checkpoint is loaded into a state with other weights. A subject without such a text, or a case that cannot be
    pickled (a task with a lambda), continues in this process instead, with a new step and template. This does not
    detect values that were remembered at the first call and never changed, or that depend on the process.
    """
    first, num = case.num_batches + _more(case), case.num_batches
    watched = Watched(subject.algorithm)
    step = case.step(watched.algorithm)
    middle = _after(step, begun(step, case.state()), case, range(first))
    end = _after(step, middle, case, range(first, first + num))
    acted = {event for event, _ in watched.applications}
    # A single event needs no search for the guilty one, which hidden memory could mislead.
    only = acted.pop() if len(acted) == 1 else None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that differ, such as the template's learning rate
        path = save(middle, Path(folder, "middle"))
        try:
            resumed_end = _resumed_elsewhere(subject, case, path, end)
        except RemoteError as error:
            raise Broken(f"the run continues here, but fails in a new process: {error}", event=only) from error
        check_equal(vars(end.timestamp), vars(resumed_end.timestamp), _RESUMED_LABELS, "timestamp", event=only)
        compare(end, resumed_end, _RESUMED_LABELS, event=only)
    return watched.acted


def _resumed_elsewhere(subject: Subject, case: Case, path: Path, end: State) -> State:
    """Return the end of the resumed run, in a new process if the run can be sent there; `end` is its template."""
    try:
        in_new_processes(_save_end, [(subject, case, path)])
    except Unportable:
        return _resumed(subject, case, path)
    return load(path.with_name("end"), like=end)


def _save_end(subject: Subject, case: Case, path: Path) -> None:
    save(_resumed(subject, case, path), path.with_name("end"))


def _resumed(subject: Subject, case: Case, path: Path) -> State:
    """Return the state at the end of a run that continues from a checkpoint, with a new step and a new template."""
    step, first = case.step(subject.algorithm), case.num_batches + _more(case)
    # A program that resumes a run first builds a network with other weights and rates, at time 0. Its values must not
    # matter.
    template = step.init(dataclasses.replace(case, seed=case.seed + 1, start=0, lr=2 * case.lr).state())
    state = load(path, like=template, step=step)
    return _after(step, state, case, range(first, first + case.num_batches))


def _more(case: Case) -> int:
    """Return 1 if the break would otherwise be between two epochs, to take one more step before it; else 0."""
    return int((case.start + case.num_batches) % case.batches_per_epoch == 0 and case.batches_per_epoch > 1)


def _after(step: Step, state: State, case: Case, indices: Iterable[int]) -> State:
    for index in indices:
        state = after_batch(step, state, case.batch(index))
    return state
