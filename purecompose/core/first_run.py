"""The first run of each schedule of a step, in which it is checked."""

from collections.abc import Collection

from purecompose._support.messages import warn
from purecompose.core.loop import advance
from purecompose.core.operation import Carry, Operation, Purpose, walk
from purecompose.core.program import Program, Update
from purecompose.core.scopes import Grad
from purecompose.core.state import State
from purecompose.nn.keyed.modules import detect
from purecompose.schedule import collect
from purecompose.time import Time, TimeUnit


def run_checked(
    operation: Operation,
    start: State,
    purpose: Purpose,
    *,
    program: Program,
    has_algorithms: bool,
    times: Collection[Time],
) -> State:
    """Run a step and check its contract; warn of programs that train nothing, repeat draws, or do not move time."""
    contract = purpose.watch
    assert contract is not None
    _warn_of_standing_time(start, times)
    with detect():
        end = operation(Carry(start), purpose).state
    contract.check(end)
    nodes = list(walk(program))
    kinds, has_advance, is_trained = {type(node) for node in nodes}, advance in nodes, end.params is not start.params
    # A program without `advance` may exist only for its algorithms, which look at the gradients.
    is_for_training = has_advance or not has_algorithms
    if is_for_training and Grad in kinds and Update not in kinds and not is_trained:
        warn(
            "the step trains nothing: its program has a Grad and no update, and no parameter has changed. Put "
            "`update` after the gradient, as loop_events does"
        )
    if contract.unapplied and Update in kinds:
        warn(
            f"{', '.join(contract.unapplied)} changed the gradients after the program's last update, which does not "
            "apply them: put `update` after the event, as loop_events does"
        )
    if contract.has_drawn and is_trained and not has_advance:
        warn(
            "every step will repeat the draws of this one (dropout, noise, ...): the program has no `advance`, by "
            "which draws are numbered. Put `advance` after the update, as loop_events does"
        )
    return end


def _warn_of_standing_time(start: State, times: Collection[Time]) -> None:
    """Warn if time stands still within an epoch: epochs of unknown length must be ended by the caller."""
    run = start.static.opened(later=False).run
    if run.batches_per_epoch is not None:
        return
    units = {time.unit for time in (*collect(start.context.schedules, Time), *times)}
    in_epochs = run.duration is not None and run.duration.unit is TimeUnit.EPOCH
    if TimeUnit.EPOCH in units or (TimeUnit.DURATION in units and in_epochs):
        warn(
            "epochs have no known length: time moves only when an epoch ends, so schedules and predicates stand "
            "still within it. Give State.create batches_per_epoch=len(batches); or end epochs yourself, as fit "
            "does, with state.replace(timestamp=state.timestamp.advance_epoch())"
        )
