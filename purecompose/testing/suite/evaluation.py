"""Laws about what must not leak: training into evaluation, evaluation into training, a loss's targets beyond it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from purecompose import tree
from purecompose.algorithm import Algorithm
from purecompose.compose import Step, compose
from purecompose.contract import InPlaceError
from purecompose.evaluation import Evaluator, evaluate, predict, run_evaluator
from purecompose.event import Event
from purecompose.loop import Grad, Microbatches, Node, Program, eval_events, loop_events, predict_events, walk
from purecompose.metrics import mean_loss
from purecompose.predicate import NEVER
from purecompose.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.record import compare, copied, intercepted
from purecompose.testing.subject import Subject


__all__ = ["evaluation_blind", "pairs_undone"]

# One evaluation before the first step and one after it show what a leak does; more cost as much again.
_FEW = 2
_TRAINING_LABELS = ("without evaluation in between", "with it")
_EVALUATION_LABELS = ("the network's own", "through the step")


@define_law(
    "evaluation and training do not see each other: evaluating leaves the run bit for bit as it was, and tells what "
    "the network says of the data",
    "act at events of training; for evaluation replace params or buffers at EVAL_START (and PREDICT_START), and no "
    "more; remember in state.slots[name], not in a closure",
    exempt=never_acts,
)
def evaluation_blind(subject: Subject, case: Case) -> bool:
    """Evaluates and predicts between the steps of one of two runs, and compares it with evaluations without algorithms.

    What an algorithm may do is exchange weights, params or buffers, at EVAL_STANDALONE_START, EVAL_START and
    PREDICT_START (averaged weights). From there on, batches, targets, outputs and metrics must be those that a step
    without algorithms finds with these weights.
    """
    seen: list[Event] = []

    def around(event: Event, state: State, act: Callable[[State], State]) -> State:
        seen.append(event)
        return act(state)

    step, data = case.step(intercepted(subject.algorithm, around)), case.batches()[:_FEW]
    plain_states = [step.init(case.state())]
    for batch in data:
        plain_states.append(step(plain_states[-1], batch))
    state, inner = step.init(case.state()), _Evaluation(step, data[:1])
    for batch, expected in zip(data, plain_states[1:], strict=True):
        inner.check(state)
        state = step(state, batch)
        compare(expected, state, _TRAINING_LABELS)
    return bool(seen)


class _Evaluation:
    """All ways of evaluating a state through a step on some data."""

    def __init__(self, step: Step, data: Sequence[Any]) -> None:
        self.step, self.data = step, data
        self.evaluating, self.predicting = (step.replace(program=program) for program in (eval_events, predict_events))

    def check(self, state: State) -> None:
        """Evaluates and predicts, and compares each with what a step without algorithms finds."""
        before = copied({"params": state.params, "buffers": state.buffers, "slots": state.slots})
        try:
            self.check_evaluate(state)
            self.check_evaluator(state)
            self.check_predict(state)
        except InPlaceError as error:
            raise Broken(str(error), event=error.event) from error
        now = {"params": state.params, "buffers": state.buffers, "slots": state.slots}
        _check_equal(before, now, ("before evaluation", "after it"), "state")

    def check_evaluate(self, state: State) -> None:
        """`evaluate`, as a user calls it."""
        begun = self.evaluating.fire(Event.EVAL_STANDALONE_START, state)
        weights = _weights(state, self.evaluating.fire(Event.EVAL_START, begun))
        ours, theirs = evaluate(weights, self.data), evaluate(state, self.data, step=self.step)
        # Batch by batch first, which tells more.
        self._check_batches(weights, self.evaluating.fire(Event.EVAL_START, begun), "eval")
        _check_equal(ours, theirs, _EVALUATION_LABELS, "metrics")

    def check_evaluator(self, state: State) -> None:
        """An evaluation as `fit` does it."""
        begun = self.evaluating.fire(Event.EVAL_BEFORE_ALL, state)
        weights = _weights(state, self.evaluating.fire(Event.EVAL_START, begun))
        evaluator = Evaluator(self.data, {"loss": mean_loss(state.context.loss)})
        ours = run_evaluator(evaluator, weights, compose(eval_events))
        theirs = run_evaluator(evaluator, begun, self.evaluating)
        self.evaluating.fire(Event.EVAL_AFTER_ALL, begun)
        _check_equal(ours.metrics, theirs.metrics, _EVALUATION_LABELS, "metrics")

    def check_predict(self, state: State) -> None:
        """`predict`, as a user calls it."""
        started = self.predicting.fire(Event.PREDICT_START, state)
        weights = _weights(state, started)
        self._check_batches(weights, started, "predict")
        ours, theirs = predict(weights, self.data), predict(state, self.data, step=self.step)
        _check_equal(ours, theirs, _EVALUATION_LABELS, "outputs")

    def _check_batches(self, weights: State, started: State, purpose: str) -> None:
        through = self.evaluating if purpose == "eval" else self.predicting
        plain = compose(through.program)
        for number, batch in enumerate(self.data):
            ours, theirs = (
                step.fold(state, batch, purpose=purpose, draw=number)
                for step, state in ((plain, weights), (through, started))
            )
            for field in ("batch", "outputs", "loss"):
                _check_equal(getattr(ours, field), getattr(theirs, field), _EVALUATION_LABELS, field)
            started = through.finish(theirs)


def _weights(state: State, started: State) -> State:
    """The training state with the weights that evaluation has put in their place."""
    return state.replace(params=started.params, buffers=started.buffers)


def _pairs(algorithm: Algorithm) -> tuple[tuple[Event, Event], ...]:
    """The pairs of a training step on both halves of which the algorithm may act."""
    events = [event for event in walk(loop_events) if isinstance(event, Event) and event in algorithm.events]
    return tuple(
        (opening, closing)
        for opening in events
        for closing in events
        if opening.is_before_event and closing.is_after_event and opening.canonical_name == closing.canonical_name
    )


def _no_pair(algorithm: Algorithm) -> str | None:
    if algorithm.predicate == NEVER:
        return never_acts(algorithm)
    return None if _pairs(algorithm) else "it acts on both halves of no before/after pair"


@define_law(
    "what the algorithm puts in place of something at a BEFORE event is back, as it was, after the AFTER event",
    "keep the original in state.slots[name] at the first event, put that back at the second and drop the slot; do not "
    "compute it back; let both halves match at the same times",
    exempt=_no_pair,
)
def pairs_undone(subject: Subject, case: Case) -> bool:
    """Looks at what the algorithm replaced at the opening event of a pair again after the closing one.

    That is the batch, the hparams and which parameters are frozen; for pairs within the gradient the parameters too,
    which elsewhere the optimizer moves in between. Everything counts: values, dtypes, kinds of containers. What it
    left alone at the opening event it may change at the closing one.
    """
    opened = _Opened(_pairs(subject.algorithm))
    step = case.step(intercepted(subject.algorithm, opened.around), program=opened.watched(loop_events))
    state = step.init(case.state())
    for batch in case.batches():
        state = step(state, batch)
    return opened.replaced_something


class _Opened:
    """What has been replaced at the opening events of pairs, and is to be back."""

    def __init__(self, pairs: Sequence[tuple[Event, Event]]) -> None:
        inner = {event for node in loop_events for event in _events_in_grad(node)}
        self.openings = {opening: closing for opening, closing in pairs}
        self.closings = set(self.openings.values())
        self.within_grad = {opening for opening, closing in pairs if {opening, closing} <= inner}
        self.originals: dict[Event, dict[str, Any]] = {}
        self.replaced_something = False

    def around(self, event: Event, state: State, act: Callable[[State], State]) -> State:
        """Keeps copies of what an application replaces at an opening event."""
        closing = self.openings.get(event)
        if closing is None:
            return act(state)
        before = copied(self._fields(state, event))
        after = act(state)
        replaced = self._fields(after, event)
        changed = {name: value for name, value in before.items() if not tree.equal(value, replaced[name])}
        self.originals[closing] = changed
        self.replaced_something |= bool(changed)
        return after

    def watched(self, program: Sequence[Node]) -> Program:
        """The program with a look at the state after each closing event, whether or not the algorithm acted there."""
        nodes: list[Node] = []
        for node in program:
            if isinstance(node, Grad):
                node = Grad(*self.watched(node.body), wrt=node.wrt)
            elif isinstance(node, Microbatches):
                node = Microbatches(*self.watched(node.body), k=node.k)
            nodes.append(node)
            if isinstance(node, Event) and node in self.closings:
                nodes.append(self._look_after(node))
        return tuple(nodes)

    def _look_after(self, closing: Event) -> Callable[[State], State]:
        def look(state: State) -> State:
            for name, original in self.originals.pop(closing, {}).items():
                now = self._fields(state, None)[name]
                opening = next(opening for opening, other in self.openings.items() if other is closing)
                labels = (f"before {opening.name}", f"after {closing.name}")
                _check_equal(original, now, labels, name, event=closing)
            return state

        return look

    def _fields(self, state: State, opening: Event | None) -> dict[str, Any]:
        fields = {"batch": state.batch, "hparams": state.hparams, "frozen": state.context.frozen}
        return fields | ({"params": state.params} if opening is None or opening in self.within_grad else {})


def _events_in_grad(node: Node) -> Iterator[Event]:
    for inner in walk((node,)):
        if isinstance(inner, Grad):
            yield from (event for event in walk(inner.body) if isinstance(event, Event))


def _check_equal(first: Any, second: Any, labels: tuple[str, str], where: str, *, event: Event | None = None) -> None:
    difference = next(tree.differences(first, second), None)
    if difference is not None:
        raise Broken(difference, labels, event=event, where=where)
