"""Methods around the update of the optimizer: SAM, lookahead, and schedule-free training."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.device import as_scalar
from purecompose._support.messages import warn
from purecompose.algorithms._averages import between
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.wrapping import Guarded, all_finite, chosen, leaves, settings_of, settings_with_groups
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import Averages, wide, with_weights
from purecompose.time import predicates
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


_LEAST_EPSILON = 1e-30
"""Least epsilon: in float32 it is not 0 and has a finite inverse, so that 0 times rho / epsilon is 0."""


@checked
def perturb_params(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], rho: float | Tensor = 0.05, epsilon: float = 1e-12
) -> dict[str, Tensor]:
    """Return parameters moved by `rho` along their gradients.

    Args:
        params: All parameters by name, floating.
        grads: Gradients of some of them, by name; the other parameters are not moved.
        rho: The length of the move; a number or a 0-d tensor.
        epsilon: Added to the norm, so that a gradient of zeros moves nothing.

    Returns:
        Parameters by name, in the same order and dtypes.

    Example:
        >>> import torch
        >>> perturb_params({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([0.0, 2.0])}, rho=0.5)["w"]
        tensor([1.0000, 1.5000])
    """
    share = rho / (tree.global_norm(list(grads.values())) + epsilon)
    moves = {name: (share * wide(grad)).to(params[name].dtype) for name, grad in grads.items()}
    return {**params, **{name: params[name] + move for name, move in moves.items()}}


@factory
def sam(
    rho: Annotated[Scalar, Within(0, hint="it is the distance to the second gradient's point")] = 0.05,
    *,
    epsilon: Annotated[float, Within(_LEAST_EPSILON, hint="1e-12 is common")] = 1e-12,
    every: Annotated[int, Within(1, hint="it counts steps")] = 1,
    per_rank: bool = False,
    name: str = "sam",
) -> Algorithm:
    """Update with the gradient at the worst point nearby.

        e = rho g(w) / (|g(w)| + epsilon),   then the optimizer's step from w with g(w + e)

    with g the gradient of the step's loss and |g| its norm over all trainable parameters. Both gradients use the same
    batch, microbatches, algorithms and draws. The reported loss and the changes to buffers are those of the first pass;
    other algorithms and the optimizer use the second gradient.

    Events: AFTER_TRAIN_BATCH of one step in `every`, counted from 1, before methods that clip gradients. Reads and
    replaces: the gradients; reports in `metrics` the loss at w + e minus the loss at w, as f"{name}/sharpness". Under
    loss scaling a step in which either gradient overflows is skipped. In a program with several `Grad`s, the last one
    before the event is computed again, at a point moved along all gradients.

    Args:
        rho: The distance from w to w + e, at least 0; with 0 the algorithm never matches. An `hparam` or a schedule may
            be given.
        epsilon: Added to the norm of the gradient, at least 1e-30.
        every: The number of steps from one such step to the next.
        per_rank: In a step of several processes (`data_parallel`), each part of the batch has its own point
            (m-sharpness in the paper). This needs one more gradient.
        name: Name of the algorithm and of its metric.

    Example:
        >>> sam(0.5, every=10)
        sam(rho=0.5, epsilon=1e-12, every=10, per_rank=False)
        >>> sam(0).match
        never

    References:
        Pierre Foret et al.: Sharpness-Aware Minimization for Efficiently Improving Generalization. ICLR 2021.
        https://arxiv.org/abs/2010.01412
    """

    def apply(event: Event, state: State) -> State:
        del event
        if not state.grads:
            return state
        ascent = state.gradient(state.params, "own")[0] if per_rank else state.grads
        grads, loss = state.gradient(perturb_params(state.params, ascent, state.scalar(rho), epsilon))
        assert state.loss is not None
        metrics = {**state.metrics, f"{name}/sharpness": loss.detach() - state.loss.detach()}
        return state.replace(grads=grads, metrics=metrics)

    return Algorithm(
        name,
        NEVER if rho == 0 else on(Event.AFTER_TRAIN_BATCH) & predicates.every(every),
        apply,
        traits=frozenset({Trait.RENEWS_GRADIENTS}),
        runs_before=(Trait.CLIPS_EXAMPLES, Trait.CLIPS_GRADIENTS),
    )


@checked
def pull_back(slow: Mapping[str, Tensor], fast: Mapping[str, Tensor], alpha: float | Tensor) -> dict[str, Tensor]:
    """Return interpolated weights: `slow + alpha * (fast - slow)`, element by element.

    Args:
        slow: Floating slow weights, by name.
        fast: Fast weights with at least the same names, of the same shapes and dtypes.
        alpha: A number or a 0-d tensor; 0 returns exactly the slow weights, 1 the fast weights.

    Returns:
        New tensors.

    Example:
        >>> import torch
        >>> pull_back({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 0.5)["w"]
        tensor([2.])
    """
    return between(slow, fast, alpha)


@factory
def lookahead(
    alpha: Annotated[Scalar, Within(0, 1, hint="it is the share of the way that is kept")] = 0.5,
    every: Annotated[int, Within(1, hint="it counts steps")] = 5,
    *,
    name: str = "lookahead",
) -> Algorithm:
    """Move the weights part of the way back, once in `every` steps.

        once in `every` steps:   slow <- slow + alpha (fast - slow),   fast <- slow

    with fast the weights that the optimizer updates, and slow the weights after the previous such step. The optimizer's
    state is not changed.

    Events: INIT; BATCH_END of one step in `every`, counted from 1. Reads and replaces: the parameters that were
    trainable at INIT and still are. The slot contains the slow weights, by name, at first those at INIT: load other
    weights before `step.init`.

    Args:
        alpha: The share of the way that is kept, in [0, 1]; with 1 the algorithm never matches. An `hparam` or a
            schedule may be given. 0.5 and 0.8 are common.
        every: k, the number of steps from one move back to the next; 5 and 10 are common.
        name: Name of the algorithm and of its slot.

    Example:
        >>> lookahead(0.8, every=10)
        lookahead(alpha=0.8, every=10)
        >>> lookahead(1.0).match
        never

    References:
        Michael R. Zhang et al.: Lookahead Optimizer: k Steps Forward, 1 Step Back. NeurIPS 2019.
        https://arxiv.org/abs/1907.08610
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            slow = {key: state.params[key].clone() for key in state.context.trainable}
            return state.replace(slots={**state.slots, name: slow})
        own, trained = state.slots[name], set(state.context.trainable)
        slow = {key: value for key, value in own.items() if key in trained}
        params = {**state.params, **pull_back(slow, state.params, state.scalar(alpha))}
        # Parameters frozen since INIT are not moved; their slow weights follow them in case they are trained again.
        return state.replace(params=params, slots={**state.slots, name: {key: params[key] for key in own}})

    return Algorithm(
        name,
        NEVER if alpha == 1 else on(Event.INIT) | on(Event.BATCH_END) & predicates.every(every),
        apply,
        runs_before=(Trait.AVERAGES_WEIGHTS,),
        runs_after=(Trait.REQUIRED_ON_LOAD, Trait.SETS_WEIGHTS),
    )


class ScheduleFree(NamedTuple):
    """Slot of `schedule_free`, whose docstring defines x, z and w."""

    averages: Averages
    """Averages x."""
    base: dict[str, Tensor]
    """Iterates z, by name; like the averages, float32 for parameters in half precision."""
    rate: Tensor
    """Learning rate of the step, 0-d float64; changes at AFTER_TRAIN_BATCH, whereas other fields do at BATCH_END."""
    greatest_rate: Tensor
    """Greatest learning rate so far, 0-d float64."""
    total: Tensor
    """Sum of w, 0-d float64."""


@checked
def schedule_free_step(
    base: Mapping[str, Tensor],
    averages: Mapping[str, Tensor],
    moved: Mapping[str, Tensor],
    beta: float,
    share: float | Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the new z and x after an optimizer has moved y, and the next y.

    Args:
        base: The iterates z, floating, by name.
        averages: The averages x, with the same names, shapes and dtypes.
        moved: y = `(1 - beta) z + beta x` after an optimizer's step, with the same names and shapes; it may be in half
            precision while z and x are in float32.
        beta: The position of y between z (0) and x (1).
        share: The weight c of the new z in x, in [0, 1]; a number or a 0-d tensor. 1 in the first step.

    Returns:
        The new z, the new x, and the next y, which has the dtypes of `moved`.

    Example:
        >>> z, x, y = ({"w": torch.tensor([value])} for value in (1.0, 3.0, 2.0))
        >>> schedule_free_step(z, x, {"w": y["w"] - 1}, beta=0.5, share=0.5)
        ({'w': tensor([0.])}, {'w': tensor([1.5000])}, {'w': tensor([0.7500])})
    """

    def as_moved(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(moved[name].dtype) for name, value in values.items()}

    y = as_moved(between(base, averages, beta))
    z = {name: value + (moved[name].to(value.dtype) - y[name].to(value.dtype)) for name, value in base.items()}
    x = between(averages, z, share)
    return z, x, as_moved(between(z, x, beta))


@factory
def schedule_free(beta: Annotated[float, Within(0, 1, below=True)] = 0.9, *, name: str = "schedule_free") -> Algorithm:
    """Average the weights instead of using a schedule of the learning rate.

        y = (1 - beta) z + beta x            the weights at which gradients are taken: the state's parameters
        z <- z + (the optimizer's update of y)
        x <- x + c (z - x),   c = w / (sum of w so far),   w = (greatest learning rate so far)^2

    x, a running mean of z, is the result of training and is used in evaluation. The step's optimizer should not have
    momentum, since beta replaces it: use `sgd(lr)`, or `adamw(lr, betas=(0.0, 0.999))`. Its weight decay is applied at
    y. Its rate may warm up, but should not decrease. w uses the learning rate of the optimizer, not of its groups; if
    it has none, x is the plain mean.

    The slot contains z, and x as `Averages`. Evaluation and prediction with `step=` use x; `to_module(state,
    weights="schedule_free")` and `with_weights` return it. BatchNorm's statistics are those of y:
    `with_statistics(state, data, weights="schedule_free")` computes those of x.

    A step that is skipped, or whose gradients another method keeps for later, changes nothing; a parameter without a
    gradient is not changed, and neither is its average.

    Events: INIT; AFTER_TRAIN_BATCH, to store the learning rate; BATCH_END; EVAL_START and PREDICT_START, where x
    replaces the weights in a temporary state. Reads and replaces: the trainable parameters.

    Adam's bias correction does not affect w, as in the authors' later code.

    Args:
        beta: The position between the iterates (0) and the averages (1) at which gradients are taken, in [0, 1).
        name: Name of the algorithm, of its slot, and of the weights for `to_module`.

    Warns:
        UserWarning: At INIT: the optimizer has momentum.

    Example:
        >>> schedule_free(0.95)
        schedule_free(beta=0.95)

    References:
        Aaron Defazio et al.: The Road Less Scheduled. NeurIPS 2024. https://arxiv.org/abs/2405.15682
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            _warn_of_momentum(name, state.optimizer)
            # Separate copies for x and z: a compiled step overwrites the tensors of its arguments.
            x, z = ({key: wide(state.params[key]).clone() for key in state.context.trainable} for _ in range(2))
            zeros = (torch.zeros((), dtype=torch.float64, device=state.device) for _ in range(3))
            own = ScheduleFree(Averages.empty(state)._replace(params=x), z, *zeros)
            return state.replace(slots={**state.slots, name: own})
        if event in (Event.EVAL_START, Event.PREDICT_START):
            return with_weights(state, name)
        own = state.slots[name]
        if event is Event.AFTER_TRAIN_BATCH:
            # Read the rate here, since at BATCH_END schedules already have the value of the next step.
            given = settings_of(leaves(state.optimizer)[0]).get("lr")
            rate = as_scalar(1.0 if given is None else state.scalar(given), torch.float64, state.device)
            return state.replace(slots={**state.slots, name: own._replace(rate=rate)})
        if not state.grads:
            return state
        params, new = _moved(own, state, beta)
        if isinstance(state.optimizer, Guarded):  # may have skipped the update
            params, new = chosen(all_finite(state.grads.values()), (params, new), (state.params, own))
        return state.replace(params=params, slots={**state.slots, name: new})

    return Algorithm(
        name,
        on(Event.INIT, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_START, Event.PREDICT_START),
        apply,
        traits=frozenset({Trait.READS_OPTIMIZER}),
        runs_before=(Trait.AVERAGES_WEIGHTS,),
        runs_after=(Trait.REQUIRED_ON_LOAD, Trait.SETS_WEIGHTS),
    )


def _moved(own: ScheduleFree, state: State, beta: float) -> tuple[dict[str, Tensor], ScheduleFree]:
    """Return the parameters and the slot after the optimizer has updated the parameters that have a gradient."""
    greatest = torch.maximum(own.greatest_rate, own.rate)
    total = own.total + greatest**2
    # While all rates have been 0, total is 0, and x becomes z.
    share = torch.where(total > 0, greatest**2 / torch.where(total > 0, total, 1.0), 1.0)
    z, x, moved = (
        {key: value for key, value in held.items() if key in own.base and key in (state.grads or {})}
        for held in (own.base, own.averages.params, state.params)
    )
    base, average, params = schedule_free_step(z, x, moved, beta, share)
    buffers = {key: state.buffers[key].to(value.dtype) for key, value in own.averages.buffers.items()}
    averages = Averages({**own.averages.params, **average}, buffers, own.averages.num + 1)
    new = ScheduleFree(averages, {**own.base, **base}, own.rate, greatest, total)
    return {**state.params, **params}, new


def _warn_of_momentum(name: str, optimizer: Any) -> None:
    """Warn if the optimizer, or one of its groups, has momentum."""
    for leaf in leaves(optimizer):
        given = settings_with_groups(leaf)
        if any(settings.get("momentum") or (settings.get("betas") or (0,))[0] for settings in given):
            warn(
                f"{name}: beta takes the place of momentum, but {optimizer!r} also has momentum, and both act; "
                "use an optimizer without it: sgd(lr), or adamw(lr, betas=(0.0, 0.999))"
            )
            return
