"""The check that an algorithm works on a task, before any law is tried there."""

from collections.abc import Callable
from typing import NamedTuple

from purecompose import batch as batches, tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events, predict_events
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.faults import first_line, is_refusal, one_line
from purecompose.testing.law import Law, acts_in_step, errors_named
from purecompose.testing.moments import find_moments
from purecompose.testing.process import process_restored, process_settings
from purecompose.testing.record import intercepted
from purecompose.testing.tasks import Task
from purecompose.time.event import Event


class Refusal(NamedTuple):
    """The reason why an algorithm does not work on a task."""

    reason: str
    is_meant: bool
    """True if the algorithm, or the library, raises the error on purpose; see `is_refusal`."""


def refusal(task: Task, algorithm: Algorithm, owner_of: Callable[[Exception], Law | None]) -> Refusal | None:
    """Return the reason why the algorithm does not work on a task; `None` if it works, or breaks a law there."""
    _check_task(task)
    for case in _probes(task, algorithm):
        touched: list[Event] = []
        try:
            with process_restored(), errors_named():
                _use(case.step(_watched(algorithm, touched)), case, algorithm)
        except Exception as error:
            # A broken law is not a refusal, nor is an error that follows from a changed setting of the process.
            if touched or owner_of(error) is not None:
                return None
            return Refusal(one_line(error, algorithm), is_refusal(error))
    return None


def _check_task(task: Task) -> None:
    case = Case(task)
    try:
        state, batch = case.state(), case.batch(0)
        plain = case.step()
        plain(plain.init(state), batch)
    except Exception as error:
        raise ValueError(
            f"the task {task.name!r} does not work, without any algorithm: {first_line(error)}. Its net is a function "
            "of a seed, its batch one of a seed and a number of examples"
        ) from error
    if not (tree.equal(state, case.state()) and tree.equal(batch, case.batch(0))):
        raise ValueError(
            f"the task {task.name!r} makes something else each time from the same seed: draw from a generator that is "
            "made of the seed, torch.Generator().manual_seed(seed)"
        )
    num_examples = state.context.layout.num_examples(batch)
    if num_examples != case.batch_size:
        raise ValueError(
            f"the task {task.name!r} made a batch of {num_examples} examples, asked for {case.batch_size}: "
            "batch(seed, size) makes as many as size says"
        )


def _probes(task: Task, algorithm: Algorithm) -> list[Case]:
    """Return one case each at the first, a middle and the last moment at which the algorithm acts in a run."""
    plain = Case(task)
    found = find_moments(
        algorithm.predicate,
        batches_per_epoch=plain.batches_per_epoch,
        epochs=plain.epochs,
        samples=plain.batch_size,
        tokens=batches.num_tokens(plain.batch(0)),
    )
    acting = found.acting or found.near
    starts = dict.fromkeys((acting[0], acting[len(acting) // 2], acting[-1]))
    return [Case(task, start=s, batches_per_epoch=found.batches_per_epoch, epochs=found.epochs) for s in starts]


def _use(step: Step, case: Case, algorithm: Algorithm) -> None:
    """Take a step; if the algorithm acts only outside steps, also fire its events."""
    state = step(step.init(case.state()), case.batch(0))
    inner = (*eval_events, *predict_events, Event.INIT)
    for event in () if acts_in_step(algorithm) else algorithm.events:
        if event not in inner:
            step.fire(event, state)


def _watched(algorithm: Algorithm, touched: list[Event]) -> Algorithm:
    """Return the algorithm, which also records the events at which it changes settings of the process."""

    def around(event: Event, state: State, act: Callable[[State], State]) -> State:
        before = process_settings()
        after = act(state)
        if process_settings() != before:
            touched.append(event)
        return after

    return intercepted(algorithm, around)
