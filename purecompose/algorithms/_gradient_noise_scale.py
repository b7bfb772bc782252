"""Gradient noise scale: reports from which batch size on more examples would hardly make a better step."""

from typing import NamedTuple

import torch
from torch import Tensor

from purecompose._support.checks import check_number
from purecompose._support.device import as_scalar
from purecompose.algorithms._gradient_norm import norm_of
from purecompose.algorithms._parts.shared import gradient_of_part
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.gradient import num_terms
from purecompose.core.state import State
from purecompose.time.event import Event
from purecompose.time.predicates import on


__all__ = ["NoiseScale", "critical_batch_size", "estimate_noise", "gradient_noise_scale"]

_FEWEST = 4
"""Examples in a batch that is halved: a part of one would be none to a batch normalisation."""


class NoiseScale(NamedTuple):
    """What `gradient_noise_scale` remembers: 0-d, float32, or float64 where a parameter is; see `averaged`."""

    squared_norm: Tensor
    """The sum of the estimates of |G|^2, older ones weighing less; changes at AFTER_TRAIN_BATCH, as do the others."""
    trace: Tensor
    """The same of tr(Sigma)."""
    weight: Tensor
    """The sum of their weights: 1 in the long run, 0 before the first."""


class _Parts(NamedTuple):
    """What is in the slot between BATCH_START and AFTER_TRAIN_BATCH: sums over the parts of t terms and b examples."""

    own: NoiseScale
    num_parts: Tensor
    """How many have terms."""
    terms: Tensor
    squared_norm: Tensor
    """Of t |g|^2."""
    share: Tensor
    """Of t / b."""
    squared_share: Tensor
    """Of t^2 / b."""


class _Norms(NamedTuple):
    """Squared norms at two batch sizes, and whether they are worth anything: all 0-d."""

    small: Tensor
    big: Tensor
    small_size: Tensor
    big_size: Tensor
    is_known: Tensor


def estimate_noise(
    small: Tensor, big: Tensor, small_size: float | Tensor, big_size: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Estimates of |G|^2 and of tr(Sigma), whose means are right, from gradients at two batch sizes.

    Args:
        small: The squared norm of the gradient of a small batch, or the mean of several.
        big: That of a big batch, which may contain the small ones.
        small_size: Examples in the small batch, above 0; of several the harmonic mean.
        big_size: Examples in the big one, more than that.

    Returns:
        Both 0-d; each may be negative.

    Example:
        >>> squared_norm, trace = estimate_noise(torch.tensor(5.0), torch.tensor(2.0), 2, 8)
        >>> squared_norm.item(), trace.item()
        (1.0, 8.0)
    """
    squared_norm = (big_size * big - small_size * small) / (big_size - small_size)
    trace = (small - big) / (1 / small_size - 1 / big_size)
    return squared_norm, trace


def critical_batch_size(squared_norm: Tensor, trace: Tensor) -> Tensor:
    """B_simple, tr(Sigma) / |G|^2, of averaged estimates: infinite where |G|^2 is not above 0, and never below 0.

    Example:
        >>> critical_batch_size(torch.tensor([2.0, -1.0]), torch.tensor([8.0, 8.0]))
        tensor([4., inf])
    """
    is_seen = squared_norm > 0
    found = torch.where(is_seen, trace.clamp(min=0) / torch.where(is_seen, squared_norm, 1), torch.inf)
    return torch.where(squared_norm.isnan() | trace.isnan(), torch.nan, found)


def averaged(old: NoiseScale, squared_norm: Tensor, trace: Tensor, decay: float) -> NoiseScale:
    """Return the moving sums with one more estimate; divided by their weight they are means without a bias to 0."""
    return NoiseScale(
        decay * old.squared_norm + (1 - decay) * squared_norm,
        decay * old.trace + (1 - decay) * trace,
        decay * old.weight + (1 - decay),
    )


@factory
def gradient_noise_scale(decay: float = 0.95, *, name: str = "gradient_noise_scale") -> Algorithm:
    """Report the critical batch size.

        B_simple = tr(Sigma) / |G|^2

    with G the true gradient and Sigma the covariance of the gradients of single examples. A batch much smaller than
    that is mostly noise, one much larger mostly repeats itself. Both are estimated from the norms of a step's gradients
    at two sizes, that of the batch, B, and that of its parts, b:

        |G|^2     ~ (B |g_B|^2 - b |g_b|^2) / (B - b)
        tr(Sigma) ~ (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)

    Each estimate has the right mean, whatever its noise, which is large; so both are averaged over steps, older ones
    weighing less, before they are divided.

    The parts are the step's microbatches, whose gradients are there anyway: `compose(..., microbatches=2)`, or more.
    Parts of unequal size count by the terms in their losses, as they do in the gradient: b is then 1 / mean(1 / b_i), a
    mean with these weights. In a step that is not cut the gradient of the first half of the batch is taken once more,
    at the cost of half a gradient: the other half's follows from it, so that this gives what two microbatches give.
    Several processes have parts of their own anyway.

    Events: INIT (the slot), BATCH_START, AFTER_BACKWARD (a part's norm), AFTER_TRAIN_BATCH (the batch's; before what
    changes gradients, such as `sam` and clipping). Reads gradients, outputs and the batch. Changes nothing of training;
    adds `metrics[f"{name}/critical_batch_size"]` (B_simple, in examples; infinite where the average of |G|^2 is not
    above 0, 0 where that of tr(Sigma) is below), `f"{name}/squared_norm"` and `f"{name}/trace"`, which may be negative.
    All three are NaN before there is an estimate. Remembers a `NoiseScale` in `slots[name]`.

    There is no estimate, and the averages stay, in a step whose gradients are not finite, of a single part, or, where
    the step is not cut, of fewer than four examples. Examples should be drawn independently: those that mixing methods
    blend share partners, and what BatchNorm does to a part depends on the part.

    Args:
        decay: What an estimate weighs beside the one after it, in [0, 1); 0.95 is a mean over about 20 steps, 0 the
            last estimate.
        name: Names its slot and its metrics.

    Raises:
        TypeError, ValueError: No number, or out of range.

    Example:
        >>> gradient_noise_scale(0.99)
        gradient_noise_scale(decay=0.99)

    References:
        Sam McCandlish, Jared Kaplan, Dario Amodei and the OpenAI Dota Team: An Empirical Model of Large-Batch Training.
        2018, appendix A.1. https://arxiv.org/abs/1812.06162
    """
    decay = check_number(decay, "gradient_noise_scale: decay", 0, 1, below=True, hint="0.95 is common")

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            zero = torch.zeros((), dtype=_dtype(state), device=state.device)
            return _remembering(state, name, NoiseScale(zero, zero, zero))
        slot = state.slots[name]
        if event is Event.BATCH_START:
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
        on(Event.INIT, Event.BATCH_START, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH),
        apply,
        traits=frozenset({Trait.MEASURES_MICROBATCHES}),
        runs_before=(Trait.RENEWS_GRADIENTS, Trait.COLLECTS_GRADIENTS, Trait.CLIPS_GRADIENTS),
        config={"decay": decay},
    )


def _dtype(state: State) -> torch.dtype:
    return torch.float64 if any(p.dtype == torch.float64 for p in state.params.values()) else torch.float32


def _remembering(state: State, name: str, slot: NoiseScale | _Parts) -> State:
    return state.replace(slots={**state.slots, name: slot})


def _with_part(slot: NoiseScale | _Parts, state: State) -> NoiseScale | _Parts:
    """Return the sums with one more part; where the batch is not cut, none: that is seen at AFTER_TRAIN_BATCH."""
    if not isinstance(slot, _Parts) or not state.grads:
        return slot
    if state.first_example is None:
        return slot.own
    like, size = slot.terms, state.num_examples
    terms = as_scalar(num_terms(state), like.dtype, like.device)
    squared_norm = norm_of(state.grads.values()).square().to(like)
    # Chosen, not multiplied: the gradient of a part in which nothing counts may be NaN.
    return _Parts(
        slot.own,
        slot.num_parts + (terms > 0).to(like),
        slot.terms + terms,
        slot.squared_norm + torch.where(terms > 0, terms * squared_norm, 0),
        slot.share + terms / size,
        slot.squared_share + terms * terms / size,
    )


def _of_parts(parts: _Parts, state: State) -> _Norms | None:
    """By the model that part i has a gradient of mean G and covariance Sigma / b_i, with weights w_i = t_i / sum t.

    The mean of the parts' squared norms is then |G|^2 + tr(Sigma) sum_i w_i / b_i in expectation, and the batch's
    |G|^2 + tr(Sigma) sum_i w_i^2 / b_i, which is 1 / B where weights are those of the numbers of examples.
    """
    if not state.grads:
        return None
    total = parts.terms
    big = norm_of(state.grads.values()).square().to(total)
    sizes = total / parts.share, total * total / parts.squared_share
    return _Norms(parts.squared_norm / total, big, *sizes, parts.num_parts > 1)


def _of_half(state: State) -> _Norms | None:
    """By the gradient g of the first half, of b examples.

    |g|^2 - |g_B|^2 = |g - g_B|^2 + 2 g_B (g - g_B), whose last term is noise without a mean: it is left out, as it
    falls out of the mean over two halves.
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
    sizes = as_scalar(size, big.dtype, big.device), as_scalar(num, big.dtype, big.device)
    return _Norms(big + apart, big, *sizes, torch.ones_like(big, dtype=torch.bool))


def _with_estimate(own: NoiseScale, norms: _Norms, decay: float) -> NoiseScale:
    """Return the averages with an estimate, if it is one."""
    estimates = estimate_noise(norms.small, norms.big, norms.small_size, norms.big_size)
    squared_norm, trace = (estimate.to(own.weight) for estimate in estimates)
    is_good = norms.is_known.to(own.weight.device) & squared_norm.isfinite() & trace.isfinite()
    new = averaged(own, squared_norm, trace, decay)
    return NoiseScale(*[torch.where(is_good, a, b) for a, b in zip(new, own, strict=True)])
