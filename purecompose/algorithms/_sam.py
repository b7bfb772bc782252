"""SAM, sharpness-aware minimisation: updates with the gradient at the worst point nearby."""

from collections.abc import Mapping
from typing import Annotated

from torch import Tensor

from purecompose import tree
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import wide
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
    batch, microbatches, algorithms and draws, such as the same mixture and dropout. The reported loss and the changes
    to buffers are those of the first pass, so that BatchNorm counts the batch once; other algorithms and the optimizer
    use the second gradient. The parameters are never moved to w + e and back, so there is no rounding, and the
    optimizer is not wrapped: its state is in the checkpoint as usual.

    Events: AFTER_TRAIN_BATCH of one step in `every`, counted from 1, before methods that clip gradients. Reads and
    replaces: the gradients; reports in `metrics` the loss at w + e minus the loss at w, as f"{name}/sharpness".
    Remembers nothing. Under loss scaling both gradients are scaled, and a step in which either overflows is skipped. In
    a program with several `Grad`s, the last one before the event is computed again, at a point moved along all
    gradients.

    Args:
        rho: The distance from w to w + e, at least 0; with 0 the algorithm never matches. An `hparam` or a schedule may
            be given: the default of an hparam is checked; later values are not.
        epsilon: Added to the norm of the gradient, at least 1e-30.
        every: The number of steps from one such step to the next. A rho of 0.05 in each step is common; with every=10
            and a rho of 0.5, a tenth of the extra cost brings most of the gain.
        per_rank: In a step of several processes (`data_parallel`), each process moves along the gradient of its own
            part of the batch instead of the whole batch's, so that each part has its own point (m-sharpness in the
            paper, which found that small parts generalise better). This needs one more gradient, also in a single
            process, where the point is that of the whole batch; edits of other methods to the first gradient are not
            used.
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
