"""The law of resuming: between steps the state is the checkpoint."""

from collections.abc import Iterable

from purecompose.compose import Step
from purecompose.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.record import Watched, check_equal, compare
from purecompose.testing.snapshot import SnapshotError, from_bytes, to_bytes
from purecompose.testing.subject import Subject
from purecompose.testing.worker import RemoteError, Unportable, resumed, resumed_elsewhere


__all__ = ["resume_exact"]

_LABELS = ("without a break", "resumed")


@define_law(
    "a run that is saved, loaded in a new process and continued ends bit for bit as one without a break",
    "remember in state.slots[name], made at INIT, not in a closure, a list or a global; draw from state.rng(name), not "
    "from a clock, a process number or hash(text); ask state.clock for the time, not a counter of calls; sets iterate "
    "in another order in each process: sorted(...); an optimizer or precision that a host algorithm sets on the way is "
    "not in the checkpoint: set it at INIT, or anew in each step",
    owns=(SnapshotError,),
    exempt=never_acts,
)
def resume_exact(subject: Subject, case: Case) -> bool:
    """Saves in the middle of a run, within an epoch if its length allows, and goes on in another process.

    There the algorithm is made from the subject's source text, in a process in which it has not run before, and the
    state is filled into one with other weights. A subject without such a text, or a case that cannot be pickled (a task
    with a lambda), goes on in this process instead, with a step and a template made anew: what was remembered at the
    first call and never changed, or drawn by the process, is not seen then.
    """
    first, num = case.num_batches, case.num_batches
    if (case.start + first) % case.batches_per_epoch == 0 and case.batches_per_epoch > 1:
        first += 1
    watched = Watched(subject.algorithm)
    step = case.step(watched.algorithm)
    middle = _after(step, step.init(case.state()), case, range(first))
    snapshot = to_bytes(middle)
    end = _after(step, middle, case, range(first, first + num))
    acted = {event for event, _ in watched.applications}
    only = acted.pop() if len(acted) == 1 else None  # then it needs no search, which what is remembered may mislead
    try:
        try:
            resumed_end = from_bytes(resumed_elsewhere(subject, case, snapshot, first, num), like=end)
        except Unportable:
            resumed_end = resumed(subject.algorithm, case, snapshot, first, num)
    except RemoteError as error:
        raise Broken(f"the run goes on here, but fails in a new process: {error}", event=only) from error
    check_equal(vars(end.timestamp), vars(resumed_end.timestamp), _LABELS, "timestamp", event=only)
    compare(end, resumed_end, _LABELS, event=only)
    return watched.acted


def _after(step: Step, state: State, case: Case, indices: Iterable[int]) -> State:
    for index in indices:
        state = step(state, case.batch(index))
    return state
