"""Changes of the optimizer's settings: decoupled weight decay, a method, and schedules scaled with the run's length."""

from dataclasses import replace
from typing import Annotated, Any

from purecompose._support.checks import shown
from purecompose._support.messages import warn
from purecompose.algorithms._parts.checks import Patterns, Where
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.optim.base import match_or_raise
from purecompose.optim.wrapping import Decaying, DecayRule, leaves, map_leaves, settings_of
from purecompose.schedule import Scalar, Schedule, collect, scaled
from purecompose.schedule.declared import Within, checked
from purecompose.time import Time
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
    duration = None if run.duration is None else _scaled_duration(run.duration, ratio)
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


def _scaled_duration(duration: Time, ratio: float) -> Time:
    shorter = duration * ratio
    if not shorter:
        unit = duration.unit.value
        raise ValueError(
            f"scale_schedule: {ratio:g} * {duration} is less than 1{unit}, and a run of length 0 trains nothing; give "
            "a larger ratio, or the duration in a smaller unit"
        )
    return shorter
