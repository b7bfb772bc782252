"""Decoupled weight decay: shrinks the weights in every step, independently of gradient and learning rate."""

from typing import Annotated, Any

from purecompose._support.messages import warn
from purecompose.algorithms._parts.checks import Patterns, Where
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.base import match_or_raise
from purecompose.optim.wrapping import Decaying, DecayRule, leaves, map_leaves, settings_of
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


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

    s_t is the current value of the learning rate's schedules, 1 if there are none. The rate itself is not a factor, so
    the decay need not be tuned again for another rate. With `sgd` and `adam` the result is that of
    `optim.decoupled_sgdw` and `optim.decoupled_adamw`, element by element; this method works with any optimizer, and
    can exclude parameters.

    The decay is part of the optimizer's update, before the weights move: at INIT the optimizer is wrapped in an
    `optim.wrapping.Decaying`. So weights do not decay in a step that is skipped or whose gradients are kept for later,
    nor do parameters without a gradient. A weight decay of the optimizer itself acts in addition, with a warning.

    Events: INIT. Replaces: the optimizer. Remembers nothing.

    Args:
        weight_decay: The share removed in a step at the full learning rate, in [0, 1); may be an hparam or a schedule.
            It equals the weight decay of `torch.optim.AdamW` times the learning rate.
        min_dims: The least number of dimensions of parameters that decay: 2 excludes biases and the scales of norms.
        exclude: Patterns (`fnmatch`) of names of other parameters that do not decay, such as `("embedding.*",)`.
        where: Pattern or patterns of the names of parameters that decay, such as "student.*"; by default all.
        name: Name of the algorithm.

    Raises:
        TypeError, ValueError: At INIT: a pattern that matches nothing.

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
        for role, patterns in (("where", where or ()), ("exclude", exclude)):
            for pattern in patterns:
                match_or_raise(pattern, state.params, f"{name}: {role}: {pattern!r}")
        for leaf in leaves(state.optimizer):
            _warn_of_settings(rule, leaf)
        return state.replace(optimizer=map_leaves(with_rule, state.optimizer, up_to=Decaying))

    match = NEVER if weight_decay == 0 else on(Event.INIT)
    # Runs after surgery, so that names are those of the final network.
    return Algorithm(name, match, apply, runs_after=(Trait.REQUIRED_ON_LOAD,))


def _warn_of_settings(rule: DecayRule, leaf: Any) -> None:
    settings = settings_of(leaf)
    if any(one.get("weight_decay") for one in (settings, *[dict(own) for _, own in getattr(leaf, "groups", ())])):
        warn(f"{rule.name}: {leaf!r} also has a weight decay, and both are applied; set its weight_decay=0.0")
