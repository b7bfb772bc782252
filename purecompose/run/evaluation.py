"""Evaluation and prediction: loop programs like the one of training, run on a temporary state."""

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch

from purecompose import batch as batches, tree
from purecompose._support.contexts import NOTHING
from purecompose._support.device import whole
from purecompose._support.messages import warn
from purecompose._support.specs import check_whole, shown, suggests_keywords
from purecompose.core.algorithm import Trait
from purecompose.core.calls import Marks, watched
from purecompose.core.compose import Step, compose
from purecompose.core.contract import tensors_in
from purecompose.core.loop import eval_events, predict_events
from purecompose.core.means import targets_of_metric
from purecompose.core.ranks import Ranks, Share
from purecompose.core.separable import check_evaluated, is_due
from purecompose.core.state import State, check_single
from purecompose.data.loaders import check_batches, fixed_batches, shuffles
from purecompose.data.position import position_holder
from purecompose.data.reader import prefetch
from purecompose.losses import couples_examples
from purecompose.losses.evaluation import lacks_weights, without_weights
from purecompose.metrics import GivenMetrics, Metric, as_metrics, counting, mean_loss, of_loss
from purecompose.nn.keyed.modules import detect
from purecompose.time.event import Event
from purecompose.time.timestamp import Interval, interval_or_function
from purecompose.transforms.members import mapped
from purecompose.transforms.rank_results import digest, naming_late_ranks


class Totals:
    """The accumulators of one evaluation. Several processes compute a part each if all metrics are sums over examples.

    The first call of a metric that is not in `seen` is watched.
    """

    def __init__(self, metrics: Mapping[str, Metric], state: State, ranks: Ranks | None, seen: set[str]) -> None:
        self._metrics, self._state, self._seen = metrics, state, seen
        self.takes_loss: bool = any(metric.takes_loss for metric in metrics.values())
        is_coupled = self.takes_loss and couples_examples(state.context.loss)
        self._ranks = None if is_coupled or not all(metric.is_sum for metric in metrics.values()) else ranks
        self._totals: dict[str, Any] = {}
        self._num_shares = 0

    def guarded(self) -> AbstractContextManager[Any]:
        """Return a context manager that reports processes that do not answer."""
        return NOTHING if self._ranks is None else naming_late_ranks(self._ranks, self._state.timestamp.batch)

    def share(self, batch: Any) -> Share:
        """Return the part of a batch that this process computes; raise if the first batch differs between processes."""
        if self._ranks is None:
            return Share(batch, 0, 1)
        if not self._num_shares:
            self._check_same([digest(batches.tensors(batch), self._state.device)])
        self._num_shares += 1
        return self._ranks.share(batch, self._state.context.layout)

    def update(self, state: State, num_examples: int, *, counts: bool) -> None:
        """Add a batch of a state, or this process's part of it.

        `counts` is false for a process without a part, which has computed an example of another one.
        """
        for name, metric in self._metrics.items():
            known = self._totals.get(name)
            if self._ranks is None:
                known = self._empty(metric) if known is None else known
                self._totals[name] = self._updated(name, known, state, num_examples)
                continue
            added = self._updated(name, self._empty(metric), state, num_examples)
            added = added if counts else tree.map(torch.zeros_like, added)
            self._totals[name] = added if known is None else tree.map(torch.add, known, added)

    def values(self) -> dict[str, Any]:
        """Return the values of the metrics, as "name", or "name/part" for one with several."""
        totals = self._totals
        if self._ranks is not None:
            self._check_same([torch.tensor(self._num_shares, device=self._state.device)])
            leaves, spec = tree.flatten(totals)
            totals = tree.unflatten(spec, self._ranks.reduced(leaves, "sum"))
        found: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            value = self._each(metric.compute)(totals[name])
            parts = value if isinstance(value, dict) else {"": value}
            found |= {f"{name}{part and f'/{part}'}": torch.as_tensor(own) for part, own in parts.items()}
        return found

    def _check_same(self, numbers: list[torch.Tensor]) -> None:
        assert self._ranks is not None
        if not all(self._ranks.agree(numbers)):
            raise ValueError(
                f"evaluation: the {self._ranks.size} processes have different data: give each all batches, in one "
                "order (no DistributedSampler): the evaluation divides each batch"
            )

    def _each(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one state's values; for stacked states it is mapped over the members."""
        return fn if self._state.key.ndim == 1 else mapped(fn)

    def _empty(self, metric: Metric) -> Any:
        return self._each(lambda key: metric.init(key.device))(self._state.key)

    def _updated(self, name: str, total: Any, state: State, num_examples: int) -> Any:
        """Return the accumulator of a metric, with the batch and the outputs of a state added."""
        metric, targets = self._metrics[name], targets_of_metric(self._metrics[name], state)
        update = counting(metric, num_examples)

        def with_loss(total: Any, one: State, targets: Any) -> Any:
            return one.call_loss(lambda loss: update(total, one.outputs, targets, loss_fn=loss), train=False)[0]

        def call() -> Any:
            if metric.takes_loss:
                return self._each(with_loss)(total, state, targets)
            return self._each(update)(total, state.outputs, targets)

        if name in self._seen:
            return call()
        self._seen.add(name)
        marks = Marks(lambda: tensors_in(state, "batch", "outputs"), with_values=True)
        with detect():
            return watched(call, "the loss" if metric.takes_loss else f"the metric {name!r}", [marks])


_SEEN: weakref.WeakKeyDictionary[Step, dict[str, set[str]]] = weakref.WeakKeyDictionary()
"""The metrics whose first call has been watched, by the step of an evaluation and the label of its evaluator."""

Observer: TypeAlias = Callable[[Event, State], None]
"""A function that reads states at the outer events and at BATCH_END, and never changes anything."""


@suggests_keywords
@dataclass(frozen=True)
class Evaluator:
    """An evaluation during a run: its data, its metrics and how often it runs.

    Args:
        data: Batches, iterated from the start at each evaluation. Endless data need `num_batches`.
        metrics: Metrics, or functions `(outputs, targets)` of one value for each example: a mapping from names, a list
            (`["accuracy", f1]`), or a single one, each also by name; see `metrics.as_metrics`. By default the mean
            loss, as `"loss"`. Values with further dimensions, (N, ...), are averaged over them.
        every: Interval between evaluations: a number of epochs, batches, samples or tokens, or a fraction of the run.
            The evaluation also runs once at the end.
            Or a function `Timestamp -> bool`, called after every batch and epoch, which returns whether an evaluation
            is due, such as `lambda now: now.batch in (10, 100, 1000)`.
        label: Name of the evaluator in records: a metric appears as "label/name".
        num_batches: Maximal number of batches per evaluation; by default all.

    Raises:
        ValueError: An interval that is not positive, or in seconds; `num_batches` below 1.
        TypeError: Something that is not a metric.

    Example::

        fit(step, state, train, evaluate=Evaluator(test, ["accuracy", "loss"], every="2ep"))
    """

    data: Iterable[Any]
    metrics: GivenMetrics = field(default_factory=dict[str, Any])
    every: Interval | str = "1ep"
    label: str = "eval"
    num_batches: int | None = None

    def __post_init__(self) -> None:
        if self.num_batches is not None:
            check_whole(self.num_batches, "Evaluator: num_batches", 1)
        check_batches(self.data, "Evaluator: data")
        every = interval_or_function(self.every, "Evaluator: every")
        object.__setattr__(self, "every", every)
        object.__setattr__(self, "metrics", as_metrics(self.metrics))

    def __repr__(self) -> str:
        rest = f"every={self.every!r}, label={self.label!r}"
        rest += "" if self.num_batches is None else f", num_batches={self.num_batches}"
        return f"Evaluator({type(self.data).__name__}, metrics={list(self._named)}, {rest})"

    @property
    def _named(self) -> dict[str, Metric]:
        return cast("dict[str, Metric]", self.metrics)

    @property
    def reported(self) -> dict[str, Metric | None]:
        """The metrics by their names in records, "label/name"; `None` for the loss of the state."""
        return {f"{self.label}/{name}": metric for name, metric in (self._named or {"loss": None}).items()}

    def measured(self, loss: Any) -> dict[str, Metric]:
        """Return the metrics by name, adapted to a state's loss."""
        return {name: of_loss(metric, loss) for name, metric in (self._named or {"loss": mean_loss()}).items()}


def check_other_data(evaluators: Iterable[Evaluator], data: Any) -> None:
    """Raise `ValueError` if an evaluator would move the position of the training data, which checkpoints hold."""
    holder = position_holder(data)
    for evaluator in evaluators:
        if holder is not None and position_holder(evaluator.data) is holder:
            raise ValueError(
                f"evaluate: {evaluator.label!r} uses the same {type(holder).__name__} as the training, and would "
                "change its position; create another object for the evaluator"
            )


@suggests_keywords
def evaluate(
    state: State,
    data: Iterable[Any],
    metrics: GivenMetrics | None = None,
    *,
    step: Step | None = None,
    num_batches: int | None = None,
) -> dict[str, Any]:
    """Return the metrics of a state on some data. The state is not changed.

    Args:
        state: The state, from which evaluation makes a temporary one.
        data: Batches of the form that training uses.
        metrics: The metrics, as for `Evaluator`; by default the mean loss, as `"loss"`.
            With `losses.model_loss`, the library's metrics that take logits (accuracy, perplexity, ...) receive the
            outputs' `logits` and the batch's labels; a function receives the outputs and the target, or the whole batch
            if it has no target at the state's `target_field`.
        step: The training step, if its algorithms should act at evaluation's events (averaged weights do). For
            stacked states, their `population`, whose metrics may not read values in Python. Of several processes all
            must call, with the same batches; each computes a part, if the metrics are sums over examples
            (`Metric.is_sum`).
        num_batches: Maximal number of batches; by default all. Endless data need it; see `Evaluator`.

    Returns:
        The values by name: floats, or for a population lists with one float per member.

    Raises:
        ValueError: There is no batch, or the processes have different ones.
        KeyError: A batch has no target at the state's `target_field`.
        TypeError: Something that is not a metric.

    Warns:
        UserWarning: The loss is measured, and algorithms of `step` have changed the training loss at AFTER_LOSS.

    Example:
        >>> import torch
        >>> from purecompose import losses, optim
        >>> net = torch.nn.Linear(2, 1)
        >>> state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> sorted(evaluate(state, [(torch.ones(4, 2), torch.zeros(4, 1))]))
        ['loss']
    """
    if not isinstance(state, State):
        raise TypeError(f"evaluate(state, data): expected a State first, got {shown(state)}")
    evaluator = Evaluator(data, {} if metrics is None else metrics, num_batches=num_batches)
    inner = _sibling(step, eval_events, state)
    warn_of_missing_terms([evaluator], state, inner)
    begun = inner.fire(Event.EVAL_STANDALONE_START, state)
    result = run_evaluator(evaluator, begun, inner, trained_by=step)
    inner.fire(Event.EVAL_STANDALONE_END, begun)
    return {name.removeprefix(f"{evaluator.label}/"): value.tolist() for name, value in result.metrics.items()}


def run_evaluator(
    evaluator: Evaluator, state: State, step: Step, observers: Iterable[Observer] = (), trained_by: Step | None = None
) -> State:
    """Run one evaluation, from EVAL_START to EVAL_END, by a step over the program of an evaluation.

    Processes of the training step `trained_by` share the data. The `metrics` of the result, the evaluation's own state,
    are the values as "label/name": 0-d tensors on the state's device, or of shape (n,) for a population of n.
    """
    metrics = evaluator.measured(state.context.loss)
    seen = _SEEN.setdefault(step, collections.defaultdict(set))[evaluator.label]
    totals = Totals(metrics, state, None if trained_by is None else trained_by.ranks, seen)
    with torch.no_grad(), totals.guarded():
        current = notify(observers, Event.EVAL_START, step.fire(Event.EVAL_START, state))
        if trained_by is not None and any(getattr(node, "gathers_at_once", False) for node in trained_by.program):
            current = current.replace(params={name: whole(param) for name, param in current.params.items()})
        num_batches = 0
        given = itertools.islice(fixed_batches(evaluator.data, state.key), evaluator.num_batches)
        for batch in prefetch(given, state.device):
            part = totals.share(batch)
            start = current.replace(first_example=part.first_example) if part.first_example else current
            if lacks_weights(part.batch, current.context.target_field):
                start = start.replace(target_field=without_weights(current.context.target_field))
            inner = step.fold(start, part.batch, domain="eval", draw=num_batches)
            totals.update(inner, step.num_examples(state, part.batch), counts=part.num_examples > 0)
            if totals.takes_loss and num_batches and is_due(num_batches):
                check_evaluated(step.members.one(inner))
            current = step.finish(inner)
            notify(observers, Event.EVAL_BATCH_END, current)
            num_batches += 1
        if not num_batches:
            raise ValueError(f"the data of evaluator {evaluator.label!r} has no batch; is it an exhausted iterator?")
        values = {f"{evaluator.label}/{name}": value for name, value in totals.values().items()}
        return notify(observers, Event.EVAL_END, step.fire(Event.EVAL_END, current.replace(metrics=values)))


@suggests_keywords
def predict(state: State, data: Iterable[Any], *, step: Step | None = None) -> list[Any]:
    """Return the network's outputs, batch by batch, on the state's device. The state is not changed.

    Args:
        state: The state.
        data: Batches of the form that training uses; targets are not read. If a `DataLoader` shuffles,
            the outputs are in its order, with a warning.
        step: The training step, if its algorithms should act at prediction's events. For stacked states, their
            `population`; the first dimension of the outputs is then the member.

    Example:
        >>> import torch
        >>> from purecompose import losses, optim
        >>> net = torch.nn.Linear(2, 1)
        >>> state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> [outputs.shape for outputs in predict(state, [(torch.ones(4, 2), torch.zeros(4, 1))])]
        [torch.Size([4, 1])]
    """
    check_batches(data, "predict: data")
    if shuffles(data):
        warn(
            f"predict: the {type(data).__name__} shuffles, or has buckets, so that the outputs are not in the order of "
            "its data set: give it shuffle=False and no buckets (of data.loader, `indices()` returns the order)"
        )
    inner = _sibling(step, predict_events, state)
    outputs = []
    with torch.no_grad():
        current = inner.fire(Event.PREDICT_START, state)
        for batch in prefetch(fixed_batches(data, state.key), state.device):
            folded = inner.fold(current, batch, domain="predict", draw=len(outputs))
            outputs.append(folded.outputs)
            current = inner.finish(folded)
        inner.fire(Event.PREDICT_END, current)
    return outputs


def warn_of_missing_terms(evaluators: Iterable[Evaluator], state: State, step: Step) -> None:
    """Warn of algorithms that change the training loss, but not that of an evaluation."""
    names = [algorithm.name for algorithm in step.algorithms if Trait.EDITS_LOSS in algorithm.traits]
    labels = [one.label for one in evaluators if any(m.takes_loss for m in one.measured(state.context.loss).values())]
    if names and labels:
        warn(
            f"the loss of evaluator {', '.join(map(repr, labels))} lacks what {', '.join(names)} did to the training "
            "loss at AFTER_LOSS: put such a term into the loss itself, or give the evaluator other metrics"
        )


def _sibling(step: Step | None, program: Any, state: State) -> Step:
    """Return a step with the same algorithms over another program."""
    if step is None:
        num = len(state.key)
        remedy = f"give step=population(step, {num}), or take the members of unstack_states(state) one by one"
        check_single(state, "evaluate and predict", remedy)
    return compose(program) if step is None else step.replace(program=program)


def notify(observers: Iterable[Observer], event: Event, state: State) -> State:
    """Call observers one after the other, and return the state unchanged."""
    for observer in observers:
        observer(event, state)
    return state
