"""Laws against leaks: from training into evaluation, from evaluation into training, out of before/after pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from purecompose import tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step, compose
from purecompose.core.loop import eval_events, loop_events, predict_events, update
from purecompose.core.operation import Node, walk
from purecompose.core.program import StateFn, events_in
from purecompose.core.state import State
from purecompose.errors import InPlaceError
from purecompose.losses.metrics import mean_loss
from purecompose.run.evaluation import Evaluator, evaluate, predict, run_evaluator
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.outer import after_batch, begun
from purecompose.testing.process import ignoring_missing_terms
from purecompose.testing.record import Act, Watched, check_equal, compare, copied, inserted, snapshot
from purecompose.testing.subject import Subject
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER


# One evaluation before the first step and one after it are enough to show a leak.
_FEW = 2
_TRAINING_LABELS = ("without evaluation in between", "with it")
_EVALUATION_LABELS = ("the network's own", "through the step")


@define_law(
    "evaluation changes nothing in training, training methods change nothing in evaluation, and prediction sees the "
    "weights that evaluation sees",
    "act at events of training; for evaluation replace params or buffers at EVAL_START and PREDICT_START, and no "
    "more; remember in state.slots[name], not in a closure",
    exempt=never_acts,
)
def evaluation_blind(subject: Subject, case: Case) -> bool:
    """Evaluate and predict between the steps of one of two runs, and compare it with evaluations without algorithms.

    An algorithm may exchange weights, params or buffers, at EVAL_STANDALONE_START, EVAL_START and PREDICT_START
    (averaged weights). After that, batches, targets, outputs and metrics must be those of a step without algorithms
    with these weights; the algorithm may add its own metrics.
    """
    watched, data = Watched(subject.algorithm), case.batches()[:_FEW]
    step = case.step(watched.algorithm)
    plain_states = [begun(step, case.state())]
    for batch in data:
        plain_states.append(after_batch(step, plain_states[-1], batch))
    state, inner = begun(step, case.state()), _Evaluation(step, data[:1])
    for batch, expected in zip(data, plain_states[1:], strict=True):
        inner.check(state)
        state = after_batch(step, state, batch)
        compare(expected, state, _TRAINING_LABELS)
    return watched.acted


class _Evaluation:
    """All ways of evaluating a state through a step on some data."""

    def __init__(self, step: Step, data: Sequence[Any]) -> None:
        self.step, self.data = step, data
        self.exchanged: dict[str, State] = {}
        self.evaluating, self.predicting = (step.replace(program=program) for program in (eval_events, predict_events))

    def check(self, state: State) -> None:
        """Evaluate and predict, and compare each with the result of a step without algorithms."""
        fields = ("params", "buffers", "slots")
        before = snapshot(state, fields)
        try:
            with ignoring_missing_terms():
                self.check_evaluate(state)
                self.check_evaluator(state)
            self.check_predict(state)
            self.check_weights(state)
        except InPlaceError as error:
            raise Broken(str(error), event=error.event) from error
        compare(before, state, ("before evaluation", "after it"), fields=fields)

    def check_evaluate(self, state: State) -> None:
        """Check `evaluate`, as a user calls it."""
        begun = self.evaluating.fire(Event.EVAL_STANDALONE_START, state)
        weights = self.exchanged["evaluation"] = _weights(state, self.evaluating.fire(Event.EVAL_START, begun))
        ours, theirs = evaluate(weights, self.data), evaluate(state, self.data, step=self.step)
        # Batch by batch first, which shows more detail.
        self._check_batches(weights, self.evaluating.fire(Event.EVAL_START, begun), "eval")
        _check_metrics(ours, theirs)

    def check_evaluator(self, state: State) -> None:
        """Check an evaluation as in `fit`."""
        begun = self.evaluating.fire(Event.EVAL_BEFORE_ALL, state)
        weights = _weights(state, self.evaluating.fire(Event.EVAL_START, begun))
        evaluator = Evaluator(self.data, {"loss": mean_loss()})
        ours = run_evaluator(evaluator, weights, compose(eval_events))
        theirs = run_evaluator(evaluator, begun, self.evaluating)
        self.evaluating.fire(Event.EVAL_AFTER_ALL, begun)
        _check_metrics(ours.metrics, theirs.metrics)

    def check_predict(self, state: State) -> None:
        """Check `predict`, as a user calls it."""
        started = self.predicting.fire(Event.PREDICT_START, state)
        weights = self.exchanged["prediction"] = _weights(state, started)
        self._check_batches(weights, started, "predict")
        ours, theirs = predict(weights, self.data), predict(state, self.data, step=self.step)
        check_equal(ours, theirs, _EVALUATION_LABELS, "outputs")

    def check_weights(self, state: State) -> None:
        """Check that evaluation and prediction both exchange the weights, or neither; their own draws may differ."""
        fields = ("params", "buffers")
        is_exchanged = {
            name: any(not tree.equal(getattr(state, field), getattr(weights, field)) for field in fields)
            for name, weights in self.exchanged.items()
        }
        if is_exchanged["evaluation"] != is_exchanged["prediction"]:
            labels = ("in evaluation", "in prediction")
            compare(self.exchanged["evaluation"], self.exchanged["prediction"], labels, fields=fields)

    def _check_batches(self, weights: State, started: State, domain: str) -> None:
        through = self.evaluating if domain == "eval" else self.predicting
        plain = compose(through.program)
        for number, batch in enumerate(self.data):
            ours, theirs = (
                step.fold(state, batch, domain=domain, draw=number)
                for step, state in ((plain, weights), (through, started))
            )
            for field in ("batch", "outputs", "loss"):
                check_equal(getattr(ours, field), getattr(theirs, field), _EVALUATION_LABELS, field)
            started = through.finish(theirs)


def _weights(state: State, started: State) -> State:
    """Return the training state with the weights of evaluation."""
    return state.replace(params=started.params, buffers=started.buffers)


def _check_metrics(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that evaluations agree in everything but the algorithm's own reports."""
    check_equal(dict(ours), {k: v for k, v in theirs.items() if k in ours}, _EVALUATION_LABELS, "metrics")


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
    "what the algorithm puts in place of something at a BEFORE event is back, as it was, after the AFTER event",
    "keep the original in state.slots[name] at the first event, put that back at the second and drop the slot; do not "
    "compute it back; let both halves match at the same times; or, if the change is meant to last, act at the closing "
    "event in a second algorithm",
    exempt=_no_pair,
    is_about_option=True,
    idle="it puts nothing in place of something that it touches again at the closing event of the pair",
)
def pairs_undone(subject: Subject, case: Case) -> bool:
    """Check after the closing event of a pair that everything replaced at the opening one is restored.

    That is the batch, single hparams and the set of frozen parameters; also the parameters, for pairs between whose
    events the optimizer does not change them. Values, dtypes and types of containers must agree. The algorithm may
    change other things at the closing event; and a replacement may last, unless the algorithm has put the original into
    its slot or changes the same thing at the closing event of any step.
    """
    opened = _Opened(subject)
    step = case.step(Watched(subject.algorithm, opened.around).algorithm, program=opened.program)
    state = step.init(case.state())
    for batch in case.batches():
        state = step(state, batch)
    opened.check()
    return opened.has_to_undo


_Place = tuple[Event, str]
"""A closing event, and the name of something replaced at its opening event."""


class _Opened:
    """The replacements at the opening events of pairs, which may have to be restored."""

    def __init__(self, subject: Subject) -> None:
        nodes = list(walk(loop_events))
        updated = nodes.index(update)
        late = {event: nodes.index(event) > updated for event in events_in(loop_events)}
        self.name, self.closing_of = subject.name, _pairs(subject.algorithm)
        self.opening_of = {closing: opening for opening, closing in self.closing_of.items()}
        self.keeps_params = {e for o, c in self.closing_of.items() if late[o] == late[c] for e in (o, c)}
        self.program = inserted(loop_events, self._look_after)
        self.originals: dict[Event, dict[str, Any]] = {}
        self.replaced, self.owed = set[_Place](), set[_Place]()
        self.missing: dict[_Place, Broken] = {}

    @property
    def has_to_undo(self) -> bool:
        """True if it has replaced anything that has to be restored."""
        return bool(self.replaced & self.owed)

    def around(self, event: Event, state: State, act: Act) -> State:
        """Copy what an application replaces at an opening event, and record what it changes at a closing one."""
        if event not in self.closing_of and event not in self.opening_of:
            return act(state)
        before, slot_before = copied(self._fields(state, event)), state.slots.get(self.name)
        after = act(state)
        now = self._fields(after, event)
        changed = {name: value for name, value in before.items() if not tree.equal(value, now.get(name))}
        if event in self.opening_of:
            self.owed |= {(event, name) for name in changed}
        else:
            closing = self.closing_of[event]
            self.originals[closing] = changed
            self.replaced |= {(closing, name) for name in changed}
            kept = _new_tensors(slot_before, after.slots.get(self.name))
            self.owed |= {(closing, name) for name, value in changed.items() if _is_among(kept, value, now.get(name))}
        return after

    def check(self) -> None:
        """Raise `Broken` for the first thing that has to be restored and is not."""
        for place, broken in self.missing.items():
            if place in self.owed:
                raise broken

    def _look_after(self, closing: Node) -> StateFn | None:
        """Return a stage that checks the state after a closing event, whether or not the algorithm acted there."""
        if not isinstance(closing, Event) or closing not in self.opening_of:
            return None

        def look(state: State) -> State:
            now = self._fields(state, closing)
            labels = (f"before {self.opening_of[closing].name}", f"after {closing.name}")
            for name, original in self.originals.pop(closing, {}).items():
                try:
                    check_equal(original, now.get(name), labels, name, event=closing)
                except Broken as broken:
                    self.missing.setdefault((closing, name), broken)
            self.check()
            return state

        return look

    def _fields(self, state: State, event: Event) -> dict[str, Any]:
        hparams = {f"hparams[{name!r}]": value for name, value in state.hparams.items()}
        fields = {"batch": state.batch, "frozen": state.context.frozen, **hparams}
        return fields | ({"params": state.params} if event in self.keeps_params else {})


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
