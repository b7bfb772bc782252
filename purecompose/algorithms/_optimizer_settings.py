"""Methods around the optimizer: gradient clipping (by the global norm, element by element, or relative to the weights),
decoupled weight decay, and schedules scaled with the run's length.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.messages import warn
from purecompose._support.specs import shown
from purecompose.algorithms._parts import Patterns, Where
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.base import matched_or_raise
from purecompose.optim.wrapping import Decaying, DecayRule, leaves, map_leaves, settings_with_groups
from purecompose.schedule import Scalar, Schedule, collect, scaled
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
    return matched_or_raise(where, names, f"{name}: where") - matched_or_raise(exclude, names, f"{name}: exclude")


@factory
def decoupled_weight_decay(
    weight_decay: Annotated[Scalar, Within(0, 1, below=True)] = 1e-5,
    min_dims: Annotated[int, Within(0)] = 0,
    exclude: Patterns = (),
    *,
    where: Where = None,
    name: str = "decoupled_weight_decay",
) -> Algorithm:
    """Shrink each weight by a share in every step.

        theta <- theta - s_t weight_decay theta,   s_t = lr_t / lr_0

    s_t is the current value of the learning rate's schedules, 1 if there are none. The rate itself is not a factor.
    With `sgd` and `adam` the result is that of `optim.decoupled_sgdw` and `optim.decoupled_adamw`, element by element.

    At INIT the optimizer is wrapped in an `optim.wrapping.Decaying`, so weights do not decay in a step that is skipped
    or whose gradients are kept for later, nor do parameters without a gradient.

    Events: INIT. Replaces: the optimizer. Remembers nothing.

    Args:
        weight_decay: The share removed in a step at the full learning rate, in [0, 1); may be an hparam or a schedule.
            It equals the weight decay of `torch.optim.AdamW` times the learning rate.
        min_dims: The least number of dimensions of parameters that decay: 2 excludes biases and the scales of norms.
        exclude: Patterns (`fnmatch`) of names of other parameters that do not decay, such as `("embedding.*",)`.
        where: Pattern or patterns of the names of parameters that decay, such as "student.*"; by default all.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the optimizer itself has a weight decay.

    Example:
        >>> decoupled_weight_decay(5e-4, min_dims=2)
        decoupled_weight_decay(weight_decay=0.0005, min_dims=2)

    References:
        Ilya Loshchilov, Frank Hutter: Decoupled Weight Decay Regularization. ICLR 2019.
        https://arxiv.org/abs/1711.05101
    """
    rule = DecayRule(name, weight_decay, min_dims, tuple(exclude), tuple(where or ("*",)))

    def with_rule(optimizer: Any) -> Any:
        if not isinstance(optimizer, Decaying):
            return Decaying(optimizer, (rule,))
        return Decaying(optimizer.inner, (*(one for one in optimizer.rules if one.name != name), rule))

    def apply(event: Event, state: State) -> State:
        del event
        matched_or_raise(where or (), state.params, f"{name}: where")
        matched_or_raise(exclude, state.params, f"{name}: exclude")
        for leaf in leaves(state.optimizer):
            if any(settings.get("weight_decay") for settings in settings_with_groups(leaf)):
                warn(f"{name}: {leaf!r} also has a weight decay, and both are applied; set its weight_decay=0.0")
        return state.replace(optimizer=map_leaves(with_rule, state.optimizer, up_to=Decaying))

    match = NEVER if weight_decay == 0 else on(Event.INIT)
    # Runs after surgery, so that names are those of the final network.
    return Algorithm(name, match, apply, runs_after=(Trait.REQUIRED_ON_LOAD,))


@checked
def scale_schedule(
    state: State,
    ratio: Annotated[float, Within(0, above=True, hint="0.5 is for half the time")],
    *,
    scale_warmup: bool = False,
) -> State:
    """Return a state whose run length and optimizer schedules are scaled; see `purecompose.schedule.scaled`.

        D' = int(D r)        alpha'(t) = alpha(t / r)

    A run of length D with the multipliers alpha becomes one of length D', whose multipliers follow the same curve.

    This is a function of a state, not an algorithm: at INIT other methods read the run's length, and a resumed run must
    not be scaled a second time.

    A run is resumed from a checkpoint with a state that was created in the same way.

    Absolute times are multiplied by the ratio and not rounded; the run's length is rounded down. Times in the settings
    of other methods are not scaled.

    Args:
        state: A state at its start, before `step.init`. The state of a population is accepted.
        ratio: The factor, above 0: 0.5 for half the time. With 1 the state itself is returned.
        scale_warmup: Scale warm-ups with absolute times (`warmup="500ba"`), too; those in fractions of the run always
            change.

    Returns:
        The state, with the run length int(D * ratio), in the same unit, and scaled schedules. A length passed to
        `fit(duration=...)` is used without scaling.

    Raises:
        TypeError: `state` is not a State, or a setting has the wrong type.
        ValueError: A ratio out of range; a length that would be less than 1; a run that has begun or is initialised;
            nothing to scale; or a schedule around a plain function.

    Example:
        >>> import torch, purecompose as pc
        >>> net, optimizer = torch.nn.Linear(2, 2), pc.optim.sgd(0.1 * pc.schedule.multi_step(["30ep", "60ep"]))
        >>> state = State.create(net, loss=pc.losses.mse, optimizer=optimizer, duration="90ep")
        >>> half = scale_schedule(state, 0.5)
        >>> str(half.timestamp.run.duration), half.optimizer.lr
        ('45ep', 0.1 * multi_step(milestones=['30ep', '60ep'], gamma=0.1, warmup='0ba').scaled(0.5))

    References:
        Eric Arazo et al.: How Important is Importance Sampling for Deep Budgeted Training? BMVC 2021.
        https://github.com/EricArazo/ImportanceSampling
    """
    if not isinstance(state, State):
        raise TypeError(f"scale_schedule: expected a State, got {shown(state)}")
    if ratio == 1:
        return state
    _check_at_start(state)
    run, optimizer = state.timestamp.run, scaled(state.optimizer, ratio, scale_warmup=scale_warmup)
    if run.duration is None and optimizer is state.optimizer:
        raise ValueError(
            f"scale_schedule: ratio={ratio:g} has no effect: the state has no duration, and its optimizer has no "
            "schedule with absolute times; give State.create(..., duration='20ep')"
        )
    duration = None if run.duration is None else run.duration * ratio
    if duration is not None and not duration:
        raise ValueError(
            f"scale_schedule: {ratio:g} * {run.duration} is less than 1{duration.unit.value}, and a run of length 0 "
            "trains nothing; give a larger ratio, or the duration in a smaller unit"
        )
    length = replace(run, duration=duration)
    # Drop the old schedules: they are no longer used, and may have no value in a run of another length.
    schedules = collect(optimizer, Schedule)
    return state.replace(optimizer=optimizer, schedules=schedules, timestamp=state.timestamp.replace(run=length))


def _check_at_start(state: State) -> None:
    if state.timestamp.batch > 0:
        raise ValueError(
            f"scale_schedule: expected a state at the start of its run, got one at batch {state.timestamp.batch}; a "
            "resumed run continues with the length and the schedules that it began with"
        )
    if state.context.initialised:
        raise ValueError(
            f"scale_schedule: INIT is over for {', '.join(state.context.initialised)}, which may have read the run's "
            "length: scale the state returned by State.create, before step.init(state)"
        )
