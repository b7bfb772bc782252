"""SAM, sharpness-aware minimisation: steps by the gradient at the worst point nearby."""

from collections.abc import Mapping

from torch import Tensor

from purecompose import tree
from purecompose._support.checks import check_flag, check_number, check_whole
from purecompose.algorithms._parts.checks import check_scalar
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.schedule import Scalar
from purecompose.surgery.weights import wide
from purecompose.time import predicates
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


__all__ = ["perturb_params", "sam"]

_LEAST_EPSILON = 1e-30
"""In float32 it is not 0 and its inverse is finite, so that a gradient of 0 times rho / epsilon is 0."""


def perturb_params(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], rho: float | Tensor = 0.05, epsilon: float = 1e-12
) -> dict[str, Tensor]:
    """Parameters moved by `rho` along their gradients.

    Args:
        params: All parameters by name, floating.
        grads: Gradients of some of them, by name; the others stay where they are.
        rho: The length of the move; a number or a 0-d tensor.
        epsilon: Added to the norm, so that a gradient of zeros moves nothing.

    Returns:
        Parameters by name, in their order and dtypes.

    Raises:
        KeyError: A gradient without a parameter.

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
    rho: Scalar = 0.05, *, epsilon: float = 1e-12, every: int = 1, per_rank: bool = False, name: str = "sam"
) -> Algorithm:
    """Step by the gradient at the worst point nearby.

        e = rho g(w) / (|g(w)| + epsilon),   then the optimizer's step from w with g(w + e)

    with g the gradient of the step's loss and |g| its norm over all trainable parameters. Both gradients are of the
    same batch, with the same microbatches, algorithms and draws: the same mixture, the same dropout. Of the first one
    stay the loss that is reported and what the pass did to buffers, so that BatchNorm counts the batch once; the second
    one is what other algorithms and the optimizer see. The parameters are never moved to w + e and back, so nothing is
    rounded, and the optimizer is not wrapped: its state is in the checkpoint as usual.

    Events: AFTER_TRAIN_BATCH of one step in `every`, counted from 1, before what clips gradients. Reads and
    replaces: the gradients; reports in `metrics` the loss at w + e less the loss at w, as f"{name}/sharpness".
    Remembers nothing. Under loss scaling both gradients are scaled, and a step of which either overflows is left out.
    Of a program with several `Grad`s the last one before the event is taken again; its loss is at a point moved along
    all gradients there.

    Args:
        rho: How far that point is, at least 0; 0 never matches. An `hparam` or a schedule may be given: its default is
            checked; what becomes of it later is not.
        epsilon: Added to the norm of the gradient, at least 1e-30.
        every: The number of steps from one such step to the next. A rho of 0.05 in each step is common; with every=10
            a rho of 0.5 costs a tenth, and gains most of it.
        per_rank: In a step of several processes (`data_parallel`): each moves along the gradient of its own part of the
            batch, and not along the whole batch's. The point is then another one for each part (m-sharpness in the
            paper, which found small parts to generalise better). It takes one more gradient, alone as well, where the
            point is the whole batch's; what others have edited in the first one is not seen.
        name: Names its metric.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range.

    Example:
        >>> sam(0.5, every=10)
        sam(rho=0.5, epsilon=1e-12, every=10)
        >>> sam(0).match
        never

    References:
        Pierre Foret, Ariel Kleiner, Hossein Mobahi, Behnam Neyshabur: Sharpness-Aware Minimization for Efficiently
        Improving Generalization. ICLR 2021. https://arxiv.org/abs/2010.01412
    """
    check_scalar(rho, "sam: rho", 0, hint="it is how far the second gradient's point is")
    epsilon = check_number(epsilon, "sam: epsilon", _LEAST_EPSILON, hint="1e-12 is common")
    every = check_whole(every, "sam: every", 1, hint="it counts steps")
    check_flag(per_rank, "sam: per_rank")

    def apply(event: Event, state: State) -> State:
        del event
        if not state.grads:
            return state
        uphill = state.gradient(state.params, "own")[0] if per_rank else state.grads
        there = perturb_params(state.params, uphill, state.scalar(rho), epsilon)
        grads, loss = state.gradient(there)
        assert state.loss is not None
        metrics = {**state.metrics, f"{name}/sharpness": loss.detach() - state.loss.detach()}
        return state.replace(grads=grads, metrics=metrics)

    is_neutral = isinstance(rho, (int, float)) and rho == 0
    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.AFTER_TRAIN_BATCH) & predicates.every(every),
        apply,
        traits=frozenset({Trait.RENEWS_GRADIENTS}),
        runs_before=(Trait.CLIPS_EXAMPLES, Trait.CLIPS_GRADIENTS),
        config={"rho": rho, "epsilon": epsilon, "every": every, **({"per_rank": True} if per_rank else {})},
    )
