"""Gradient clipping: bounds the gradients by their global norm, element by element, or relative to the weights."""

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor

from purecompose import tree
from purecompose.algorithms._parts.checks import Patterns, Where
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.base import match_or_raise, matched
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import wide
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


Grads = Mapping[str, Tensor]

_SLACK = 1e-6


@checked
def clip_by_norm(grads: Grads, threshold: float | Tensor) -> dict[str, Tensor]:
    """Return the gradients, all multiplied by one number, so that their global norm is at most the threshold.

    Args:
        grads: Floating gradients of any shapes, by name.
        threshold: The threshold T, positive; a number or a 0-d tensor.

    Returns:
        New tensors of the same shapes and dtypes.

    Example:
        >>> clip_by_norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)
        {'w': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    share = (threshold / (tree.global_norm(list(grads.values())) + _SLACK)).clamp(max=1.0)
    return {name: (wide(grad) * share).to(grad.dtype) for name, grad in grads.items()}


@checked
def clip_by_value(grads: Grads, threshold: float | Tensor) -> dict[str, Tensor]:
    """Return the gradients with each element clipped to [-threshold, threshold].

    A threshold above the largest finite number of a gradient's dtype is replaced by this number; infinity clips
    nothing.

    Args:
        grads: Gradients by name.
        threshold: A number above 0, or a 0-d tensor.

    Example:
        >>> clip_by_value({"w": torch.tensor([-3.0, 0.5])}, 1.0)["w"]
        tensor([-1.0000,  0.5000])
    """

    def clipped(grad: Tensor) -> Tensor:
        if not isinstance(threshold, Tensor):
            most = threshold if threshold == math.inf else min(threshold, torch.finfo(grad.dtype).max)
            return grad.clamp(-most, most)
        most = threshold.to(grad.dtype)
        most = torch.where(threshold.isinf(), most, most.clamp(max=torch.finfo(grad.dtype).max))
        return grad.clamp(-most, most)

    return {name: clipped(grad) for name, grad in grads.items()}


@checked
def clip_adaptively(
    grads: Grads, params: Mapping[str, Tensor], threshold: float | Tensor, *, floor: float = 1e-3
) -> dict[str, Tensor]:
    """Return the gradients, scaled so that each unit's norm is at most `threshold` times the norm of its weights.

    Args:
        grads: Floating gradients, by name.
        params: The weights, by the same names and of the same shapes.
        threshold: The threshold T, positive; a number or a 0-d tensor.
        floor: Lower bound on the norm of weights, at least 0; with 0 a unit of zeros has no gradient.

    Returns:
        New tensors of the same shapes and dtypes.

    Example:
        >>> weights = torch.tensor([[3.0, 4.0], [9.0, 40.0]])
        >>> clip_adaptively({"w": torch.tensor([[7.0, 24.0], [5.0, 12.0]])}, {"w": weights}, 0.5)["w"]
        tensor([[ 0.7000,  2.4000],
                [ 5.0000, 12.0000]])
    """

    def clipped(grad: Tensor, weight: Tensor) -> Tensor:
        most, length = threshold * _unit_norm(weight).clamp(min=floor), _unit_norm(grad)
        is_long = length > most
        share = torch.where(is_long, most / torch.where(is_long, length, 1.0), 1.0)
        return (wide(grad) * share).to(grad.dtype)

    return {name: clipped(grad, params[name]) for name, grad in grads.items()}


@factory
def gradient_clipping(
    clipping_type: Literal["norm", "value", "adaptive"],
    clipping_threshold: Annotated[Scalar, Within(0, above=True, or_infinite=True, hint="infinity clips nothing")],
    *,
    where: Where = None,
    exclude: Patterns = (),
    name: str = "gradient_clipping",
) -> Algorithm:
    """Bound the gradients.

    With the threshold T, gradients g and weights W:

        "norm"       g <- g min(1, T / (|g| + 1e-6)), |g| the Euclidean norm of all gradients together
        "value"      g <- min(max(g, -T), T), each element
        "adaptive"   g_u <- g_u min(1, T max(|W_u|, 1e-3) / |g_u|), for each unit u

    A unit consists of the weights of one output: all dimensions but the first of a matrix or a kernel, and the whole of
    a vector or a number (a bias or a gain). "norm" preserves the direction of the whole gradient, "adaptive" the
    direction of each unit, "value" neither.

    Events: AFTER_TRAIN_BATCH, after all other methods that set gradients, such as `sam`. Reads and replaces: the
    gradients of the whole batch; "adaptive" reads the parameters.

    NaN is never replaced by a number: with "norm" one NaN makes all gradients NaN, with "adaptive" all of its unit,
    with "value" only itself. "value" clips infinite elements like others; with "norm" and "adaptive" they become NaN,
    and the other elements 0, as they do if the norm overflows float32 (from elements of 1.8e19 on).

    Args:
        clipping_type: "norm", "value" or "adaptive".
        clipping_threshold: T, a number above 0; with infinity the algorithm never matches. An hparam or a schedule may
            be given. Common values are 0.1 to 2 for "norm", 15 for "value" and 0.01 for "adaptive" with batches of 1024
            to 4096, up to 0.16 with smaller ones.
        where: Pattern or patterns (`fnmatch`) of the names of parameters whose gradients are clipped, such as
            "student.*", and of which the norm is taken; by default all.
        exclude: Patterns of the names of parameters whose gradients are not clipped and not included in the
            norm, such as `("head.*",)`.
        name: Name of the algorithm.

    Raises:
        TypeError, ValueError: In the step: a pattern that matches no parameter.

    Example:
        >>> gradient_clipping("norm", 1.0)
        gradient_clipping(clipping_type='norm', clipping_threshold=1.0)
        >>> gradient_clipping("value", float("inf")).match
        never

    References:
        Razvan Pascanu et al.: On the Difficulty of Training Recurrent Neural Networks. ICML 2013.
        https://arxiv.org/abs/1211.5063
        Tomas Mikolov: Statistical Language Models Based on Neural Networks. PhD thesis, Brno 2012.
        Andrew Brock et al.: High-Performance Large-Scale Image Recognition Without Normalization. ICML 2021.
        https://arxiv.org/abs/2102.06171
    """

    def apply(event: Event, state: State) -> State:
        del event
        if not state.grads:
            return state
        names = _chosen(name, ("*",) if where is None else tuple(where), tuple(exclude), tuple(state.params))
        chosen = {key: grad for key, grad in state.grads.items() if key in names}
        threshold = state.scalar(clipping_threshold)
        if clipping_type == "norm":
            clipped = clip_by_norm(chosen, threshold)
        elif clipping_type == "value":
            clipped = clip_by_value(chosen, threshold)
        else:
            clipped = clip_adaptively(chosen, state.params, threshold)
        return state.replace(grads={**state.grads, **clipped})

    return Algorithm(
        name,
        NEVER if clipping_threshold == math.inf else on(Event.AFTER_TRAIN_BATCH),
        apply,
        traits=frozenset({Trait.CLIPS_GRADIENTS}),
        runs_after=(Trait.RENEWS_GRADIENTS, Trait.COLLECTS_GRADIENTS),
    )


def _unit_norm(tensor: Tensor) -> Tensor:
    """Return the norm of each unit, with reduced dimensions kept as 1; at least float32."""
    dims = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    return torch.linalg.vector_norm(wide(tensor), dim=dims, keepdim=tensor.ndim > 1)


@functools.lru_cache(maxsize=64)
def _chosen(name: str, where: tuple[str, ...], exclude: tuple[str, ...], names: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the parameters that are clipped."""
    for role, patterns in (("where", where), ("exclude", exclude)):
        for pattern in patterns:
            match_or_raise(pattern, names, f"{name}: {role}: {pattern!r}")
    return matched(where, names) - matched(exclude, names)
