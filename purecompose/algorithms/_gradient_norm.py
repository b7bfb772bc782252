"""Gradient norm: reports the norm of the gradient that the optimizer received."""

from collections.abc import Iterable

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.shards import whole
from purecompose.core.algorithm import Algorithm, factory
from purecompose.core.state import State
from purecompose.surgery.weights import wide
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements together: 0-d, float64 if any tensor is, else float32.

    Example:
        >>> norm_of([torch.tensor([3.0], dtype=torch.float16), torch.tensor([0.0, 4.0])])
        tensor(5.)
    """
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
