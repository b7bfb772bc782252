"""The law of resuming: between steps, the state alone is the checkpoint."""

from collections.abc import Iterable

from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.outer import after_batch, begun
from purecompose.testing.record import Watched, check_equal, compare
from purecompose.testing.snapshot import SnapshotError, from_bytes, to_bytes
from purecompose.testing.subject import Subject
from purecompose.testing.worker import RemoteError, Unportable, resumed, resumed_elsewhere


_LABELS = ("without a break", "resumed")


@define_law(
    "a run that is saved, loaded in a new process and continued ends bit for bit as one without a break",
    "remember in state.slots[name], made at INIT, not in a closure, a list or a global; draw from state.rng(name), not "
    "from a clock, a process number or hash(text); ask state.clock for the time, not a counter of calls; sets iterate "
    "in another order in each process: sorted(...); an optimizer or precision that a host algorithm sets on the way is "
    "not in the checkpoint: set it at INIT, or again in each step",
    owns=(SnapshotError,),
    exempt=never_acts,
)
def resume_exact(subject: Subject, case: Case) -> bool:
    """Save in the middle of a run, within an epoch if its length allows, and continue in another process.

    There the algorithm is created from the subject's source text, in a process in which it has not run before, and the
    snapshot is loaded into a state with other weights. A subject without such a text, or a case that cannot be pickled
    (a task with a lambda), continues in this process instead, with a new step and template. This does not detect values
    that were remembered at the first call and never changed, or that depend on the process.
    """
    first, num = case.num_batches + _more(case), case.num_batches
    watched = Watched(subject.algorithm)
    step = case.step(watched.algorithm)
    middle = _after(step, begun(step, case.state()), case, range(first))
    snapshot = to_bytes(middle)
    end = _after(step, middle, case, range(first, first + num))
    acted = {event for event, _ in watched.applications}
    # A single event needs no search for the guilty one, which hidden memory could mislead.
    only = acted.pop() if len(acted) == 1 else None
    try:
        try:
            resumed_end = from_bytes(resumed_elsewhere(subject, case, snapshot, first, num), like=end)
        except Unportable:
            resumed_end = resumed(subject.algorithm, case, snapshot, first, num)
    except RemoteError as error:
        raise Broken(f"the run continues here, but fails in a new process: {error}", event=only) from error
    try:
        check_equal(vars(end.timestamp), vars(resumed_end.timestamp), _LABELS, "timestamp", event=only)
        compare(end, resumed_end, _LABELS, event=only)
    except Broken as broken:
        broken.cause = _cause(subject, case, snapshot, end)
        raise
    return watched.acted


def _cause(subject: Subject, case: Case, snapshot: bytes, end: State) -> str:
    """Return the cause of a difference as text: the process, or the algorithm's hidden memory; empty if unknown."""
    if subject.source is None:
        return ""
    try:
        compare(
            end, resumed(subject.made_anew(), case, snapshot, case.num_batches + _more(case), case.num_batches), _LABELS
        )
    except Exception:
        return "what it has kept outside of the state (a closure, an attribute, a counter), which a new one lacks"
    return (
        "the process: the same algorithm, made again in this one, agrees. Look for hash(text), id(), the order "
        "of a set, a process number, a clock, or a global of the module that its first run fills"
    )


def _more(case: Case) -> int:
    """Return 1 if the break would otherwise be between two epochs, to take one more step before it; else 0."""
    return int((case.start + case.num_batches) % case.batches_per_epoch == 0 and case.batches_per_epoch > 1)


def _after(step: Step, state: State, case: Case, indices: Iterable[int]) -> State:
    for index in indices:
        state = after_batch(step, state, case.batch(index))
    return state
