"""Scale schedule: shortens or prolongs a run, scaling its length and all of its schedules together."""

from dataclasses import replace
from typing import Annotated

from purecompose._support.checks import shown
from purecompose.core.state import State
from purecompose.schedule import Schedule, collect, scaled
from purecompose.schedule.declared import Within, checked
from purecompose.time import Time


@checked
def scale_schedule(
    state: State,
    ratio: Annotated[float, Within(0, above=True, hint="0.5 is for half the time")],
    *,
    scale_warmup: bool = False,
) -> State:
    """Return a state whose run length and optimizer schedules are scaled; see `purecompose.schedule.scaled`.

        D' = int(D r)        alpha'(t) = alpha(t / r)

    A run of length D with the multipliers alpha becomes one of length D', whose multipliers follow the same curve from
    the first value to the last one. Halving the time in this way costs less accuracy than stopping the run halfway,
    with its learning rate still high.

    This is a function from a state to a state, not an algorithm with a `match` and an `apply`: the length of a run and
    its schedules are set when the state is created, and are scaled at the same point. INIT would be too late: other
    methods read the run's length there, before or after this one depending on their order; a length passed to `fit` may
    be set before or after INIT; and a resumed run must not be scaled a second time.

    Events: none. Replaces: the optimizer's schedules and the run's length. Remembers nothing: a checkpoint contains the
    scaled length, and a run is resumed from it with a state that was created in the same way.

    Absolute times are multiplied by the ratio and not rounded; the run's length is rounded down, since a run ends with
    a whole epoch (or batch, sample, token), which cuts the schedules off there. Times in fractions of the run change
    with it. A schedule with a warm-up always uses the scaled length for both.

    Args:
        state: A state at its start, before `step.init` (and `fit`, which calls it), where methods may read the run's
            length. The state of a population is accepted.
        ratio: The factor, above 0: 0.5 for half the time. With 1 the state itself is returned.
        scale_warmup: Scale warm-ups with absolute times (`warmup="500ba"`), too; those in fractions of the run always
            change.

    Returns:
        The state, with the run length int(D * ratio), in the same unit, and scaled schedules. Everything else is
        shared. A length passed to `fit(duration=...)` is used as the length of the whole run, without scaling.

    Schedules and times in the settings of other methods are not scaled: those in fractions of the run change with it,
    and others can be scaled where they are defined, with `purecompose.schedule.scaled`.

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
