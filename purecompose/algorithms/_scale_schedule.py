"""Scale schedule: the same run in less time, or in more: its length and all of its schedules stretched together."""

from purecompose._support.checks import check_flag, check_number, shown
from purecompose._support.warnings import warn
from purecompose.core.state import State
from purecompose.schedule import Schedule, collect, scaled
from purecompose.time import RunLength, Time, TimeUnit
from purecompose.time.units import snapped


__all__ = ["scale_schedule"]


def scale_schedule(state: State, ratio: float, *, scale_warmup: bool = False) -> State:
    """Return a state whose run takes another time, with all schedules of its optimizer; see
    `purecompose.schedule.scaled`.

        D' = int(D r)        alpha'(t) = alpha(t / r)

    A run of length D with the multipliers alpha becomes one of length D', whose multipliers take the same way from the
    first value to the last one. Half the time costs less accuracy so than a run that is cut off halfway, with its
    learning rate still high.

    This is a function from a state to a state, and no algorithm with a `match` and an `apply`: the length of a run and
    its schedules are given when the state is created, and so is this. At INIT it would come too late: others read the
    run's length there, before it or after it by their order in the list; a length that `fit` is given may come before
    INIT or after it; and what has been stretched once must not be stretched again where a run is taken up.

    Events: none. Replaces: the optimizer's schedules and the run's length. Remembers nothing: a checkpoint holds the
    length that the run has, and a run continues from it with a state that was made in the same way.

    Absolute times are multiplied by the ratio and not rounded; the run's own length is, since a run ends with a whole
    epoch (or batch, sample, token). Fractions of the run follow it. A schedule with a warm-up never sees one length
    without the other.

    Args:
        state: A state at its start, before `step.init` (and `fit`, which calls it): methods may read the run's length
            there. A population's, too.
        ratio: The factor, above 0: 0.5 for half the time. At 1 the state itself comes back.
        scale_warmup: Whether warm-ups (`warmup="500ba"`) get longer or shorter, too; those in fractions of the run
            always do.

    Returns:
        The state, with the run's length int(D * ratio), in the unit that it has, and stretched schedules. Everything
        else is shared. `fit(duration=...)` is the whole run's length, as it is given: it is not stretched.

    Schedules and times among the settings of other methods stay: those in fractions of the run follow it, and others
    can be stretched where they are written, with `purecompose.schedule.scaled`.

    Raises:
        TypeError: No state, or a setting of the wrong type.
        ValueError: A ratio out of range; a length that would be less than 1; a run that has begun or is initialised;
            nothing to stretch; a schedule around a plain function.

    Warns:
        UserWarning: The length had to be rounded, and the optimizer has schedules with absolute times: at the end of
            the run they are not quite where they would be.

    Example:
        >>> import torch, purecompose as pc
        >>> net, optimizer = torch.nn.Linear(2, 2), pc.optim.sgd(0.1 * pc.schedule.multi_step(["30ep", "60ep"]))
        >>> state = State.create(net, loss=pc.losses.mse, optimizer=optimizer, duration="90ep")
        >>> half = scale_schedule(state, 0.5)
        >>> str(half.timestamp.run.duration), half.optimizer.lr
        ('45ep', 0.1 * multi_step(milestones=['30ep', '60ep'], gamma=0.1, warmup='0ba').scaled(0.5))

    References:
        Eric Arazo, Diego Ortego, Paul Albert, Noel E. O'Connor, Kevin McGuinness: How Important is Importance Sampling
        for Deep Budgeted Training? BMVC 2021. https://github.com/EricArazo/ImportanceSampling
    """
    ratio = check_number(ratio, "scale_schedule: ratio", 0, above=True, hint="0.5 is for half the time")
    check_flag(scale_warmup, "scale_schedule: scale_warmup")
    if not isinstance(state, State):
        raise TypeError(f"scale_schedule: expected a State, got {shown(state)}")
    if ratio == 1:
        return state
    _check_at_start(state)
    run, optimizer = state.timestamp.run, scaled(state.optimizer, ratio, scale_warmup=scale_warmup)
    if run.duration is None and optimizer is state.optimizer:
        raise ValueError(
            f"scale_schedule: ratio={ratio:g} has no effect: the state has no duration, and its optimizer no schedule "
            "with absolute times; give State.create(..., duration='20ep')"
        )
    duration = None if run.duration is None else _scaled_duration(run.duration, ratio, optimizer)
    length = RunLength(duration, run.batches_per_epoch, run.iteration_length)
    # The old ones go: they are not evaluated any more, and in a run of another length they may have no value.
    schedules = collect(optimizer, Schedule)
    return state.replace(optimizer=optimizer, schedules=schedules, timestamp=state.timestamp.replace(run=length))


def _check_at_start(state: State) -> None:
    if state.timestamp.batch > 0:
        raise ValueError(
            f"scale_schedule: the run stands at batch {state.timestamp.batch}: expected a state at its start; a run "
            "that is taken up continues with the length and the schedules that it began with"
        )
    if state.context.initialised:
        raise ValueError(
            f"scale_schedule: INIT is over for {', '.join(state.context.initialised)}, which may have read the run's "
            "length: stretch the state as State.create makes it, before step.init(state)"
        )


def _scaled_duration(duration: Time, ratio: float, optimizer: object) -> Time:
    shorter = duration * ratio
    if not shorter:
        unit = duration.unit.value
        raise ValueError(
            f"scale_schedule: {ratio:g} * {duration} is less than 1{unit}, and a run of length 0 trains nothing; give "
            "a larger ratio, or the duration in a smaller unit"
        )
    exact = snapped(duration.value * ratio)
    times = collect(collect(optimizer, Schedule), Time)
    if shorter.value != exact and any(time and time.unit is not TimeUnit.DURATION for time in times):
        warn(
            f"scale_schedule: {ratio:g} * {duration} is {exact:g}{duration.unit.value}, and the run ends after "
            f"{shorter}: at its end, schedules in absolute times are not where they would be after all of it"
        )
    return shorter
