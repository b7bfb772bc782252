"""Methods that only report: norms of gradients, the gradient noise scale, and metrics of training."""

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.device import as_scalar, whole
from purecompose.algorithms._per_example_clipping import gradient_of_part
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.means import num_terms, targets_of_metric
from purecompose.core.state import State
from purecompose.metrics import GivenMetrics, Metric, as_metrics, counting, of_loss
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import wide
from purecompose.time import Time, TimeUnit
from purecompose.time.event import Event, named_time
from purecompose.time.predicates import NEVER, on


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements together: 0-d, float64 if any tensor is, else float32."""
    return tree.global_norm([tensor.detach() for tensor in tensors])


@factory
def gradient_norm(*, total: bool = True, each: bool = False, name: str = "gradient_norm") -> Algorithm:
    """Report the norm of the gradients as they are applied.

        |g| = sqrt(sum of g_i^2), over all parameters

    Events: BATCH_END, where the gradients are those of the update (clipped, perturbed, averaged over microbatches),
    whatever the order of the algorithms. Reads `grads`; adds `metrics[name]`, and with `each=True`
    `metrics[f"{name}/{parameter}"]`; changes nothing else, and remembers nothing.

    Args:
        total: Report the norm over all parameters.
        each: Report the norm of each parameter.
        name: Name of the algorithm and prefix of its metrics.

    If both flags are False, the algorithm never matches.

    Example:
        >>> gradient_norm(each=True)
        gradient_norm(total=True, each=True)
    """

    def apply(event: Event, state: State) -> State:
        del event
        grads = state.grads or {}
        found = {}
        if each:
            norms = {key: whole(torch.linalg.vector_norm(wide(grad.detach()))) for key, grad in grads.items()}
            found = {f"{name}/{key}": norm for key, norm in norms.items()}
        if total:
            found[name] = norm_of(grads.values()) if grads else torch.zeros((), device=state.device)
        return state.replace(metrics={**state.metrics, **found})

    return Algorithm(name, on(Event.BATCH_END) if total or each else NEVER, apply)


_FEWEST = 4
"""Least number of examples in a batch that is halved, because batch normalisation needs two examples in each part."""


class NoiseScale(NamedTuple):
    """Slot of `gradient_noise_scale`; all fields are 0-d, float64 if any parameter is, else float32."""

    squared_norm: Tensor
    """Sum of the estimates of |G|^2 with decaying weights; changes at AFTER_TRAIN_BATCH, as do the other fields."""
    trace: Tensor
    """Sum of the estimates of tr(Sigma) with the same weights."""
    weight: Tensor
    """Sum of the weights: 0 before the first estimate, approaching 1."""


class _Parts(NamedTuple):
    """Content of the slot from BEFORE_TRAIN_BATCH to AFTER_TRAIN_BATCH: sums over parts with t terms and b examples."""

    own: NoiseScale
    num_parts: Tensor
    """Number of parts that have terms."""
    terms: Tensor
    """Sum of t."""
    squared_norm: Tensor
    """Sum of t |g|^2."""
    share: Tensor
    """Sum of t / b."""
    squared_share: Tensor
    """Sum of t^2 / b."""


_Norms: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""The arguments of `estimate_noise`: squared norms at two batch sizes, and the sizes; all 0-d."""


@checked
def estimate_noise(
    small: Tensor, big: Tensor, small_size: float | Tensor, big_size: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of |G|^2 and of tr(Sigma) from gradients at two batch sizes.

    Args:
        small: The squared norm of the gradient of a small batch, or its mean over several small batches.
        big: The squared norm of the gradient of a big batch, which may contain the small ones.
        small_size: The number of examples in the small batch, above 0; for several batches, the harmonic mean.
        big_size: The number of examples in the big batch, greater than `small_size`.

    Returns:
        The two estimates, 0-d; each may be negative.

    Example:
        >>> squared_norm, trace = estimate_noise(torch.tensor(5.0), torch.tensor(2.0), 2, 8)
        >>> squared_norm.item(), trace.item()
        (1.0, 8.0)
    """
    squared_norm = (big_size * big - small_size * small) / (big_size - small_size)
    trace = (small - big) / (1 / small_size - 1 / big_size)
    return squared_norm, trace


@checked
def critical_batch_size(squared_norm: Tensor, trace: Tensor) -> Tensor:
    """Return B_simple = tr(Sigma) / |G|^2 of averaged estimates, at least 0, and infinite if |G|^2 is not above 0.

    Args:
        squared_norm: Estimates of |G|^2, of any shape.
        trace: Estimates of tr(Sigma), of the same shape.

    Example:
        >>> critical_batch_size(torch.tensor([2.0, -1.0]), torch.tensor([8.0, 8.0]))
        tensor([4., inf])
    """
    is_seen = squared_norm > 0
    found = torch.where(is_seen, trace.clamp(min=0) / torch.where(is_seen, squared_norm, 1), torch.inf)
    return torch.where(squared_norm.isnan() | trace.isnan(), torch.nan, found)


@factory
def gradient_noise_scale(
    decay: Annotated[float, Within(0, 1, below=True, hint="0.95 is common")] = 0.95,
    *,
    name: str = "gradient_noise_scale",
) -> Algorithm:
    """Report the critical batch size.

        B_simple = tr(Sigma) / |G|^2

    with G the true gradient and Sigma the covariance of the gradients of single examples. Both are estimated from the
    norms of a step's gradients at two sizes, the size B of the batch and the size b of its parts:

        |G|^2     ~ (B |g_B|^2 - b |g_b|^2) / (B - b)
        tr(Sigma) ~ (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)

    Both are averaged over steps, with decaying weights, before they are divided.

    The parts are the step's microbatches. Parts of unequal size are weighted by the terms in their losses: b is then 1
    / mean(1 / b_i), a mean with these weights. In a step without microbatches, the gradient of the first half of the
    batch is computed in addition, at the cost of half a gradient.

    Events: INIT, BEFORE_TRAIN_BATCH, AFTER_BACKWARD (the norm of a part), AFTER_TRAIN_BATCH (the norm of the batch;
    before methods that change gradients). Does not change training; adds `metrics[f"{name}/critical_batch_size"]`
    (B_simple, in examples; infinite if the average of |G|^2 is not above 0, 0 if that of tr(Sigma) is negative),
    `f"{name}/squared_norm"` and `f"{name}/trace"`, which may be negative. All three are NaN before the first estimate.
    Remembers a `NoiseScale`.

    A step does not change the averages if its gradients are not finite, if it has a single part, or if it has no
    microbatches and fewer than four examples.

    Args:
        decay: The factor by which the weight of an estimate falls with each later one, in [0, 1); 0.95 averages
            over about 20 steps, 0 keeps only the last estimate.
        name: Name of the algorithm, of its slot and of its metrics.

    Example:
        >>> gradient_noise_scale(0.99)
        gradient_noise_scale(decay=0.99)

    References:
        Sam McCandlish et al.: An Empirical Model of Large-Batch Training. 2018, appendix A.1.
        https://arxiv.org/abs/1812.06162
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            is_wide = any(param.dtype == torch.float64 for param in state.params.values())
            zero = torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device=state.device)
            return _remembering(state, name, NoiseScale(zero, zero, zero))
        slot = state.slots[name]
        if event is Event.BEFORE_TRAIN_BATCH:
            return _remembering(state, name, _Parts(slot, *[torch.zeros_like(slot.weight) for _ in range(5)]))
        if event is Event.AFTER_BACKWARD:
            return _remembering(state, name, _with_part(slot, state))
        own, norms = (slot.own, _of_parts(slot, state)) if isinstance(slot, _Parts) else (slot, _of_half(state))
        if norms is not None:
            own = _with_estimate(own, norms, decay)
        squared_norm, trace = own.squared_norm / own.weight, own.trace / own.weight
        found = {
            f"{name}/critical_batch_size": critical_batch_size(squared_norm, trace),
            f"{name}/squared_norm": squared_norm,
            f"{name}/trace": trace,
        }
        return _remembering(state, name, own).replace(metrics={**state.metrics, **found})

    return Algorithm(
        name,
        on(Event.INIT, Event.BEFORE_TRAIN_BATCH, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH),
        apply,
        traits=frozenset({Trait.MEASURES_MICROBATCHES}),
        runs_before=(Trait.RENEWS_GRADIENTS, Trait.COLLECTS_GRADIENTS, Trait.CLIPS_GRADIENTS),
    )


def _remembering(state: State, name: str, slot: NoiseScale | _Parts) -> State:
    return state.replace(slots={**state.slots, name: slot})


def _with_part(slot: NoiseScale | _Parts, state: State) -> NoiseScale | _Parts:
    """Return the sums with one more part. If the batch is not split, drop them, so that AFTER_TRAIN_BATCH halves it."""
    if not isinstance(slot, _Parts) or not state.grads:
        return slot
    if state.first_example is None:
        return slot.own
    like, size = slot.terms, state.num_examples
    terms = as_scalar(num_terms(state), like.dtype, like.device)
    squared_norm = norm_of(state.grads.values()).square().to(like)
    # where(), not a product with 0: the gradient of a part without terms may be NaN.
    return _Parts(
        slot.own,
        slot.num_parts + (terms > 0).to(like),
        slot.terms + terms,
        slot.squared_norm + torch.where(terms > 0, terms * squared_norm, 0),
        slot.share + terms / size,
        slot.squared_share + terms * terms / size,
    )


def _of_parts(parts: _Parts, state: State) -> _Norms | None:
    """Return the norms from the parts; `None` without gradients.

    The gradient of part i is assumed to have mean G and covariance Sigma / b_i; its weight is w_i = t_i / sum t. The
    expectation of the parts' mean squared norm is then |G|^2 + tr(Sigma) sum_i w_i / b_i, and that of the batch's
    squared norm |G|^2 + tr(Sigma) sum_i w_i^2 / b_i. The last sum is 1 / B if parts are weighted by their examples.
    """
    if not state.grads:
        return None
    total = parts.terms
    big = norm_of(state.grads.values()).square().to(total)
    small_size = torch.where(parts.num_parts > 1, total / parts.share, torch.nan)  # one part gives no estimate
    return parts.squared_norm / total, big, small_size, total * total / parts.squared_share


def _of_half(state: State) -> _Norms | None:
    """Return the norms from the gradient g of the first half, of b examples; `None` for too small a batch.

    |g|^2 - |g_B|^2 = |g - g_B|^2 + 2 g_B (g - g_B), where the last term is noise of mean 0. It is left out, as it
    cancels in the mean over both halves.
    """
    num = state.num_examples
    if num < _FEWEST or not state.grads:
        return None
    part = state.context.layout.split(state.batch, 2)[0]
    size = state.context.layout.num_examples(part)
    half = gradient_of_part(state, part, 0 if state.first_example is None else state.first_example)
    grads = {key: state.grads[key] for key in half}
    big = norm_of(grads.values()).square()
    apart = norm_of([half[key] - grads[key] for key in half]).square()
    return big + apart, big, as_scalar(size, big.dtype, big.device), as_scalar(num, big.dtype, big.device)


def _with_estimate(own: NoiseScale, norms: _Norms, decay: float) -> NoiseScale:
    """Return the moving sums with one more estimate, or unchanged if it is not finite."""
    squared_norm, trace = (estimate.to(own.weight) for estimate in estimate_noise(*norms))
    is_good = squared_norm.isfinite() & trace.isfinite()
    # Sums of weights, too: divided by them, the sums are means without a bias to 0.
    latest = squared_norm, trace, torch.ones_like(own.weight)
    pairs = zip(own, latest, strict=True)
    return NoiseScale(*[torch.where(is_good, decay * old + (1 - decay) * new, old) for old, new in pairs])


_UNITS = (TimeUnit.EPOCH, TimeUnit.BATCH)


def _checked_period(reset: Any, where: str) -> Time | None:
    """Require whole epochs or batches, or `None`."""
    if reset is None:
        return None
    period = named_time(reset, where)
    if period.unit not in _UNITS or period.value < 1 or period.value != int(period.value):
        raise ValueError(f"{where}: expected whole epochs or batches, such as '1ep' or '100ba', or None, got {reset!r}")
    return period


@factory
def training_metrics(
    metrics: GivenMetrics = ("accuracy",),
    *,
    reset: Annotated[str | Time | None, _checked_period] = "1ep",
    name: str = "training_metrics",
) -> Algorithm:
    """Measure the outputs of training steps.

    Events: INIT (creates the slot), BATCH_START (resets at the beginning of a period), AFTER_BACKWARD (adds a slice's
    examples), BATCH_END (reports). Reads `outputs` and the batch; adds `metrics[f"train/{metric}"]`, the value over all
    examples since the beginning of the period.

    The outputs are those of the training pass, before the update: with dropout, mixed or augmented inputs and mixed
    targets; examples that a method has left out are not counted.

    Args:
        metrics: Metrics by name, a list of them, or a single one, as for `evaluate`. If empty, the algorithm never
            matches.
        reset: The length of a period, in whole epochs or batches, such as `"1ep"` or `"100ba"`; `None` for the run.
        name: Name of the algorithm and of its slot.

    Raises:
        TypeError, ValueError: As for `metrics.as_metrics`; the loss of the state, or a period of another unit.

    Example:
        >>> training_metrics(["accuracy", "top_5"])
        training_metrics(metrics=('accuracy', 'top_5'), reset='1ep')
        >>> from purecompose.metrics import top_k
        >>> training_metrics({"top_3": top_k(3)}, reset="100ba").events[1].name
        'BATCH_START'
    """
    chosen = _chosen(metrics)
    period = None if reset is None else Time.of(reset)

    def fresh(state: State) -> dict[str, Any]:
        return {key: metric.init(state.device) for key, metric in chosen.items()}

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            return state.replace(slots={**state.slots, name: fresh(state)})
        accs = state.slots[name]
        if event is Event.AFTER_BACKWARD:
            new = {}
            for key, metric in chosen.items():
                own = of_loss(metric, state.context.loss)
                targets, update = targets_of_metric(own, state), counting(own, state.num_examples)
                with torch.no_grad():
                    new[key] = update(accs[key], batches.map_tensors(Tensor.detach, state.outputs), targets)
            return state.replace(slots={**state.slots, name: new})
        if event is Event.BATCH_END:
            values = {f"train/{key}": metric.compute(accs[key]) for key, metric in chosen.items()}
            return state.replace(metrics={**state.metrics, **values})
        assert period is not None
        begins = _begins(state, period)
        new = tree.map(lambda zero, acc: torch.where(begins, zero, acc), fresh(state), accs)
        return state.replace(slots={**state.slots, name: new})

    events = [Event.INIT, Event.AFTER_BACKWARD, Event.BATCH_END, *([] if period is None else [Event.BATCH_START])]
    return Algorithm(
        name,
        on(*events) if chosen else NEVER,
        apply,
        config={"metrics": tuple(chosen), "reset": None if period is None else str(period)},
        reported={f"train/{key}": metric for key, metric in chosen.items()},
    )


def _chosen(given: Any) -> dict[str, Metric]:
    chosen = as_metrics(given)
    for key, metric in chosen.items():
        if metric.takes_loss:
            raise ValueError(
                f"training_metrics: {key}: the training loss of each step is state.loss, and its parts are in "
                "state.metrics; give mean_loss the loss function to average it"
            )
    return chosen


def _begins(state: State, period: Time) -> Tensor:
    """Return whether a period begins with this batch, 0-d bool."""
    clock, length = state.clock, int(period.value)
    assert clock is not None
    if period.unit is TimeUnit.BATCH:
        return clock.batch % length == 0
    return (clock.epoch % length == 0) & (clock.batch_in_epoch == 0)
