"""Metrics as three pure functions: `init` an accumulator, `update` it with a batch, `compute` the value.

Accumulators hold a sum over examples and their number, so that a metric does not depend on how the examples
were cut into batches. They stay on the device: nothing is read back before the caller reads the value. Metrics of
classes take outputs (N, C, ...); their targets are indices (N, ...), dense (N, C, ...) or a `Mixture`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support import instead, publish
from purecompose._support.objects import check_hidden
from purecompose._support.specs import describe, did_you_mean, is_callable_with, shown
from purecompose.losses import (
    CrossEntropy,
    ModelLoss,
    binary_cross_entropy,
    check_loss,
    counts_terms,
    cross_entropy,
    evaluate_parts,
    mse,
    num_terms,
    share_of_mean,
)
from purecompose.losses.evaluation import check_pairs
from purecompose.losses.metric import (
    Device,
    Mean as Mean,
    Metric as Metric,
    accuracy as accuracy,
    balanced_accuracy as balanced_accuracy,
    counting as counting,
    f1 as f1,
    init_mean,
    iou as iou,
    is_lower_better as is_lower_better,
    of_loss as of_loss,
    top_k as top_k,
)
from purecompose.losses.targets import Mixture, num_examples as count_examples, per_row


publish(__name__)

GivenMetrics: TypeAlias = str | Callable[..., Any] | Metric | Sequence[Any] | Mapping[str, Any]
"""Metrics as users give them; see `as_metrics`."""


def mean_loss(loss_fn: Callable[..., Any] | None = None) -> Metric:
    """Return a metric for the loss of all batches as if they were one: batch means weighted by `losses.num_terms`.

    The weights are numbers of examples or, for a loss that reports what it counts, numbers of those positions: tokens,
    not padding.

    Args:
        loss_fn: A loss without parameters; by default that of the evaluated state, with its parts, whose means are
            reported as "loss/part". Terms that algorithms add to the training loss at AFTER_LOSS are not included.

    Raises:
        TypeError: `loss_fn` is not a loss.
        ValueError: It is a module with parameters, whose trained values are in the state.

    Example:
        >>> metric = mean_loss(torch.nn.functional.mse_loss)
        >>> acc = metric.update(metric.init(), torch.tensor([3.0]), torch.tensor([0.0]))
        >>> metric.compute(metric.update(acc, torch.zeros(2), torch.zeros(2))).item()
        3.0
    """
    if loss_fn is None:
        settings = {"takes_loss": True, "takes_weights": True, "higher_is_better": False, "name": "loss"}
        return _sum_of(lambda device=None: {}, _with_parts, _values, **settings)
    check_loss(loss_fn)
    if isinstance(loss_fn, torch.nn.Module) and any(True for _ in loss_fn.parameters()):
        raise ValueError(
            f"metrics.mean_loss: {type(loss_fn).__name__} has parameters, whose trained values are in the state: write "
            "mean_loss(), which is the loss of the state"
        )

    def update(acc: Mean, outputs: Any, targets: Any, num_examples: int | None = None) -> Mean:
        return _with_parts({"": acc}, outputs, targets, num_examples, loss_fn)[""]

    # A model's own loss does not read targets, but it counts the labels in the batch.
    reads_batch, takes_logits = isinstance(loss_fn, ModelLoss), isinstance(loss_fn, CrossEntropy)
    name = _name_of(loss_fn)
    return _sum_of(init_mean, update, Mean.value, reads_batch, takes_logits, higher_is_better=False, name=name)


def perplexity(loss_fn: Callable[..., Tensor] | None = None) -> Metric:
    """Return a metric for exp(`mean_loss`): how many equally likely classes a language model chooses from on average.

    Args:
        loss_fn: A mean of -log p over positions, in nats; by default cross entropy without the index that the state's
            loss leaves out.

    Example:
        >>> metric = perplexity()
        >>> round(metric.compute(metric.update(metric.init(), torch.zeros(2, 8, 5), torch.ones(2, 5).long())).item(), 4)
        8.0
    """
    mean = mean_loss(cross_entropy if loss_fn is None else loss_fn)

    def update(acc: Mean, outputs: Any, targets: Any, ignore_index: int = -100, **options: Any) -> Mean:
        return mean_loss(CrossEntropy(ignore_index)).update(acc, outputs, targets, **options)

    if loss_fn is None:
        mean = mean._replace(update=update, takes_ignore_index=True)
    return mean._replace(compute=lambda acc: Mean.value(acc).exp(), name="perplexity")


def from_function(fn: Callable[[Any, Any], Tensor], *, higher_is_better: bool | None = None) -> Metric:
    """Return a metric for the mean over examples of a plain function of (outputs, targets).

    The function returns a value for each example, (N,) or (N, ...), averaged over the other dims; or a 0-d mean
    of the batch, weighted by its number of examples. A `Mixture` is passed to it as dense targets.

    Args:
        fn: A function of (outputs, targets).
        higher_is_better: Whether higher values are better, if a rule is to stop, keep or rank by them.

    Raises:
        TypeError: `fn` is not callable, or it does not return a tensor.
        ValueError: The tensor it returns is neither 0-d nor has one row per example, or it compares each output with
            each target, as (N, 1) with (N,).

    Example:
        >>> metric = from_function(lambda outputs, targets: (outputs - targets).abs())
        >>> metric.compute(metric.update(metric.init(), torch.tensor([1.0, 2.0]), torch.zeros(2))).item()
        1.5
    """
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"expected a function (outputs, targets) -> tensor, got {fn!r} ({type(fn).__name__})")

    def update(
        acc: Mean, outputs: Any, targets: Any, num_examples: int | None = None, ignore_index: int = -100
    ) -> Mean:
        if isinstance(targets, Mixture):
            targets = targets.soft(outputs, ignore_index=ignore_index)
        values = fn(outputs, targets)
        count = count_examples(outputs, targets) if num_examples is None else num_examples
        _check_values(fn, values, count)
        check_pairs(fn, outputs, targets)
        values = values.detach().to(acc.total.dtype)
        rows = values.flatten(1).mean(1).sum() if values.ndim > 1 else values.sum()
        return Mean(acc.total + (rows if values.ndim else values * count), acc.number + count)

    settings = {"higher_is_better": higher_is_better, "name": _name_of(fn)}
    return _sum_of(init_mean, update, Mean.value, takes_ignore_index=True, **settings)


def weighted(metric: Metric | Callable[..., Any] | str) -> Metric:
    """Return a metric in which examples count by their weights, those of the state's `weight_field`.

    Without such a field, and for a batch without weights, each example has the weight 1. The metric is updated with
    one example at a time, mapped over the batch.

    Args:
        metric: A metric whose accumulators add up (`Metric.is_sum`), in any form that `as_metric` takes, or a name.

    Raises:
        TypeError: The metric is not such a sum, or measures the loss of the state, which has its weights anyway.

    Example:
        >>> from purecompose.losses import Mixture
        >>> metric, outputs = weighted("accuracy"), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> targets = Mixture.weighted(torch.tensor([0, 1]), torch.tensor([3.0, 1.0]))
        >>> metric.compute(metric.update(metric.init(), outputs, targets)).item()
        0.75
    """
    plain = _checked(metric, f"metric {metric!r:.80}")
    if not plain.is_sum or plain.takes_loss or plain.reads_batch:
        raise TypeError(f"metrics.weighted: {shown(metric)} is not a sum over examples, which could have weights")

    def init(device: Device = None) -> Any:
        dtype = init_mean(device).total.dtype
        return tree.map(lambda start: start.to(dtype), plain.init(device))

    def update(acc: Any, outputs: Any, targets: Any, **options: Any) -> Any:
        has_weights = isinstance(targets, Mixture) and targets.is_weighted
        weights = torch.stack(targets.weights).sum(0) if has_weights else None
        leaves, spec = tree.flatten((outputs, targets.unweighted() if has_weights else targets))
        if "num_examples" in options:
            options["num_examples"] = 1

        def one(*rows: Tensor) -> Any:
            return plain.update(
                plain.init(rows[0].device), *tree.unflatten(spec, [row[None] for row in rows]), **options
            )

        def added(total: Tensor, each: Tensor) -> Tensor:
            return total + (each if weights is None else each * per_row(weights, each)).sum(0)

        return tree.map(added, acc, torch.vmap(one)(*leaves))

    return plain._replace(init=init, update=update, takes_weights=True)


def as_metric(value: Metric | Callable[..., Tensor]) -> Metric:
    """Return a metric unchanged; convert one of torchmetrics by `from_torchmetrics`, a loss that reports its number of
    terms by `mean_loss`, and any other function by `from_function`.

    Args:
        value: A metric, a metric of torchmetrics, a loss, or a function of (outputs, targets).

    Raises:
        TypeError: The value is none of these, or is another object that accumulates internally.

    Example:
        >>> as_metric(accuracy) is accuracy
        True
    """
    if isinstance(value, Metric):
        return value
    if hasattr(value, "metric_state"):
        return from_torchmetrics(value)
    if hasattr(value, "compute") and hasattr(value, "reset"):
        raise TypeError(
            f"expected a metric without internal state, got {type(value).__name__}, which accumulates "
            "values; use its functional form, one of torchmetrics, or write a Metric"
        )
    if not callable(value) or isinstance(value, type):
        raise TypeError(
            "expected a Metric or a function (outputs, targets) -> value per example, got "
            f"{value!r} ({type(value).__name__}); see purecompose.metrics"
        )
    return mean_loss(value) if counts_terms(value) else from_function(value)


def from_torchmetrics(metric: Any) -> Metric:
    """Return a metric of torchmetrics as three pure functions; the object itself is copied and not changed.

    Its states (`metric_state`) are the accumulator. Its `update(preds, target)` is called with `(outputs, targets)`; a
    `Mixture` is passed as dense targets. The result should be a single number, to appear in records. For a population
    it must not inspect values: use `validate_args=False`.

    Args:
        metric: A metric such as `torchmetrics.classification.MulticlassF1Score(num_classes=10)`.

    Raises:
        TypeError: The object is not a metric, or contains other metrics, as a `MetricCollection` does; pass its
            members one by one.
    """
    if isinstance(metric, type) or not all(
        hasattr(metric, name) for name in ("metric_state", "higher_is_better", "compute")
    ):
        raise TypeError(
            f"expected a metric of torchmetrics, got {metric!r:.80}; pass members of a collection one by one"
        )
    inside = [member for member in metric.modules() if member is not metric and hasattr(member, "metric_state")]
    if inside or not metric.metric_state:
        raise TypeError(
            f"{type(metric).__name__} keeps its state in other metrics, which is not supported: pass these one by one"
        )
    blank = copy.deepcopy(metric)
    blank.reset()

    def filled(acc: dict[str, Any]) -> Any:
        # Each call works on its own copy, because torchmetrics adds up in place and caches results.
        worker = copy.deepcopy(blank)
        for name, value in acc.items():
            setattr(worker, name, list(value) if isinstance(value, list) else value.clone())
        return worker

    def init(device: Device = None) -> dict[str, Any]:
        fresh = copy.deepcopy(blank)
        return dict((fresh if device is None else fresh.to(device)).metric_state)

    def update(acc: dict[str, Any], outputs: Any, targets: Any, ignore_index: int = -100) -> dict[str, Any]:
        worker = filled(acc)
        if isinstance(targets, Mixture):
            targets = targets.soft(outputs, ignore_index=ignore_index)
        worker.update(outputs, targets)
        return dict(worker.metric_state)

    def compute(acc: dict[str, Any]) -> Tensor:
        worker = filled(acc)
        worker._update_count = 1  # otherwise it warns that `update` was not called
        return worker.compute()

    reductions = getattr(blank, "_reductions", {"": None}).values()
    is_sum = all(getattr(reduction, "__name__", "") == "dim_zero_sum" for reduction in reductions)
    higher = blank.higher_is_better
    settings = {"is_sum": is_sum, "higher_is_better": higher, "name": _name_of(metric)}
    return Metric(init, update, compute, takes_ignore_index=True, **settings)


def as_metrics(metrics: Any) -> dict[str, Metric]:
    """Return metrics by name, from any form in which they are given.

    A metric of this module has its name; a function the name that it was defined with; a loss or a metric of
    torchmetrics the name of its class in lower case, such as "multiclass_f1_score".

    Args:
        metrics: A mapping from names to metrics, a list of metrics, or a single one; each is a name ("accuracy",
            "top_5", "loss", ...), or anything that `as_metric` takes. `None` is an empty mapping.

    Raises:
        TypeError: Something that is not a metric, or has no name, as a lambda in a list.
        ValueError: An unknown name, for which the message lists the known ones; two metrics of one name; a metric that
            keeps a random generator or an iterator.

    Example:
        >>> list(as_metrics(["accuracy", "top_5", mean_loss(), cross_entropy]))
        ['accuracy', 'top_5', 'loss', 'cross_entropy']
        >>> as_metrics({"share": "accuracy"}) == {"share": accuracy}
        True
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        return {str(name): _checked(one, f"metric {name!r}") for name, one in metrics.items()}
    found: dict[str, Metric] = {}
    is_list = isinstance(metrics, list | tuple) and not isinstance(metrics, Metric)
    for given in metrics if is_list else [metrics]:
        metric = _checked(given, f"metric {given!r:.80}")
        if not metric.name:
            raise TypeError(f"the metric {shown(given)} has no name: give a mapping, such as {{'name': metric}}")
        if metric.name in found:
            raise ValueError(f"two metrics are called {metric.name!r}: give them names, {{name: metric}}")
        found[metric.name] = metric
    return found


def _checked(given: Any, what: str) -> Metric:
    """Return one of the metrics that a user has given."""
    if isinstance(given, str):
        return _called(given)
    metric = as_metric(given)
    check_hidden(given, f"the {what}")
    is_known = isinstance(given, Metric) or hasattr(given, "metric_state")
    if not is_known and not is_callable_with(given, 2):
        hint = ""
        if isinstance(given, types.FunctionType) and given.__module__.startswith("purecompose."):
            hint = f"; call it: {describe(given.__name__, inspect.signature(given))}"
        raise TypeError(f"{what}: {shown(given)} cannot be called as metric(outputs, targets){hint}")
    return metric


def _called(name: str) -> Metric:
    if number := re.fullmatch(r"top_([1-9]\d*)", name):
        return top_k(int(number[1]))
    if name in ("balanced_accuracy", "f1", "iou"):
        raise ValueError(f"the metric {name!r} needs the number of classes: write pc.metrics.{name}(10) for 10 classes")
    if name not in _NAMED:
        hint = (known := instead(name)) and f"{known}." or did_you_mean(name, _NAMED)
        raise ValueError(
            f"no metric is called {name!r};{hint} {'There' if hint else 'there'} are {', '.join(_NAMED)}, and top_k "
            "for any k, such as top_5; give others as functions (outputs, targets), or by a mapping, {name: metric}"
        )
    return _NAMED[name]


def _name_of(given: Any) -> str:
    """Return the name of a function, or that of an object's class in snake case; nothing for what has no own name."""
    if isinstance(given, functools.partial):
        return ""
    name = getattr(given, "__name__", None)
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(given).__name__).lower()
    return "" if name == "<lambda>" else name


_sum_of = functools.partial(Metric, takes_count=True, is_sum=True)


def _with_parts(
    acc: dict[str, Mean], outputs: Any, targets: Any, num_examples: int | None = None, loss_fn: Any = None
) -> dict[str, Mean]:
    """Return the means of the loss, called "", and of its parts, with one more batch."""
    assert loss_fn is not None
    loss, parts = evaluate_parts(loss_fn, outputs, targets)
    if loss.ndim:
        raise ValueError(
            f"expected the mean over the batch, a 0-d tensor, from the loss {loss_fn!r}, got shape {tuple(loss.shape)}"
        )
    check_pairs(loss_fn, outputs, targets)
    terms, found = num_terms(loss_fn, outputs, targets, num_examples), dict(acc)
    if isinstance(terms, Tensor) and terms.is_floating_point():  # float32 would round away further weights
        terms = terms.to(init_mean(loss.device).total.dtype)
    for name, value in {"": loss, **parts}.items():
        total, number = acc.get(name) or init_mean(loss.device)
        # With a total of 1 the share is value * terms, or zero if nothing in the batch counts.
        found[name] = Mean(total + share_of_mean(value.detach().to(total.dtype), terms, 1), number + terms)
    return found


def _values(acc: dict[str, Mean]) -> Any:
    return {name: mean.value() for name, mean in acc.items()}


def _check_values(fn: object, values: object, count: int) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(
            f"expected a tensor from the metric {fn!r}, got {type(values).__name__}; return a 0-d tensor, "
            "or one value for each example (a Python number would wait for the device)"
        )
    if values.ndim and values.shape[0] != count:
        raise ValueError(
            f"expected a 0-d tensor or {count} rows, one per example, from the metric {fn!r}, got shape "
            f"{tuple(values.shape)}; keep the batch dim first or average over it"
        )


def _is_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs > 0).view_as(targets) == (targets > 0.5)


def _distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs()


binary_accuracy: Metric = from_function(_is_right, higher_is_better=True)._replace(name="binary_accuracy")
"""The share of logits, of any shape, that are above 0 where the target, of this shape, is above 1/2 (or 1), and not
elsewhere: for one logit per example, or several labels."""
mae: Metric = from_function(_distance, higher_is_better=False)._replace(name="mae")
"""The mean absolute difference between outputs and targets of one shape."""

_LOSSES = {"cross_entropy": cross_entropy, "binary_cross_entropy": binary_cross_entropy, "mse": mse}
_NAMED: dict[str, Metric] = {
    **{metric.name: metric for metric in (accuracy, binary_accuracy, perplexity(), mae, mean_loss())},
    **{name: mean_loss(loss)._replace(name=name) for name, loss in _LOSSES.items()},
}
"""The metrics that can be given by name, besides "top_k" for any k."""
