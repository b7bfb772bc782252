"""Trials of a law on generated cases: the search for the simplest case that fails, and the outcome."""

import inspect
import pathlib
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed as seeded, settings
from hypothesis.errors import Unsatisfiable, UnsatisfiedAssumption
from hypothesis.strategies import SearchStrategy

from purecompose import batch as batches, tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.loop import eval_events, predict_events
from purecompose.core.state import State
from purecompose.testing.case import Case, Subject, find_moments
from purecompose.testing.law import (
    Broken,
    Law,
    LawViolation,
    NotJudged,
    Row,
    acts_in_step,
    acts_outside,
    errors_named,
    never_acts,
)
from purecompose.testing.process import process_restored, process_settings
from purecompose.testing.record import Act, Watched
from purecompose.testing.report import Outcome, Status
from purecompose.testing.tasks import Task
from purecompose.time.event import Event


SHRINK_TRIES = 120
"""Number of tries after which shrinking ends, which makes it reproducible."""
SHRINK_SECONDS = 7.0
"""Seconds after which shrinking ends as well, for slow algorithms."""


class Tried(NamedTuple):
    acted: bool = True
    """True if there was something to judge."""
    failure: Exception | None = None
    """The failure, if any."""


class Search(NamedTuple):
    num_cases: int = 0
    """Number of cases up to the first that fails, without those that an assumption rejects."""
    num_acted: int = 0
    """Number of these cases in which there was something to judge."""
    case: Case | None = None
    """The simplest case that fails."""
    failure: Exception | None = None
    """The failure in that case."""


class Stop(BaseException):
    """Raised by an attempt to end the search. A BaseException, because an `Exception` would mean a failing case."""


class _Failed(Exception):
    """Raised to report a failing case to Hypothesis."""


def search(strategy: SearchStrategy[Case], attempt: Callable[[Case], Tried], *, max_examples: int, seed: int) -> Search:
    """Try cases until one fails, and then search for a simpler one that fails with an error of the same type.

    `Stop` ends the search; other errors that an attempt raises are raised again, except rejections by
    `hypothesis.assume`.
    """
    found, tries_left, deadline = Search(), SHRINK_TRIES, 0.0

    def step(case: Case) -> None:
        nonlocal found, tries_left, deadline
        is_shrinking = found.failure is not None
        if is_shrinking:
            tries_left -= 1
            if tries_left < 0 or time.perf_counter() > deadline:
                raise Stop
        acted, failure = attempt(case)
        if not is_shrinking:
            found = Search(found.num_cases + 1, found.num_acted + acted)
            deadline = time.perf_counter() + SHRINK_SECONDS
        if failure is not None and (not is_shrinking or type(failure) is type(found.failure)):
            # Kept here, because an algorithm with hidden state in a closure may fail differently when tried again.
            found = found._replace(case=case, failure=failure)
            raise _Failed

    quietly = settings(
        max_examples=max_examples,
        derandomize=False,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    try:
        seeded(seed)(quietly(given(strategy)(step)))()
    except (Stop, Unsatisfiable):
        pass
    except Exception:
        if found.failure is None:
            raise
    return found


def first_line(error: BaseException) -> str:
    """Return the type and the first line of the message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")


def is_refusal(error: BaseException) -> bool:
    """Return whether an error is an intended refusal, raised explicitly and not by torch."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not isinstance(error, (TypeError, ValueError, NotImplementedError, AssertionError, Warning)):
        return False
    last = frames[-1]
    is_torchs = pathlib.Path(last.filename).is_relative_to(_TORCH)
    return not is_torchs and (last.line or "").startswith(("raise", "assert", "warn"))


_TORCH = pathlib.Path(inspect.getfile(torch)).parent


def _places(error: Exception, algorithm: Algorithm) -> tuple[list[str], list[str]]:
    """Return an error's notes, which name its place in the step, and its last lines in the file of `apply`."""
    apply = inspect.unwrap(algorithm.apply)
    own = inspect.getsourcefile(apply if inspect.isroutine(apply) else type(apply))
    frames = traceback.extract_tb(error.__traceback__)
    chosen = [frame for frame in frames if frame.filename == own][-3:] or frames[-1:]
    lines = [f"{pathlib.Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in chosen]
    return list(dict.fromkeys(getattr(error, "__notes__", ()))), lines


NEUTRAL = "neutral_setting"
"""Name of the only law that is tried on another algorithm: the one under test, with settings that do nothing."""


class Attempt:
    """A function that tries a law in a case.

    A case whose error is that of another law, by `owner_of`, is reported if no case breaks this one.
    """

    def __init__(self, law: Law, subject: Subject, owner_of: Callable[[Exception], Law | None]) -> None:
        self.law, self.subject, self._owner_of = law, subject, owner_of
        self._other: tuple[Law, Exception, Case] | None = None
        self._not_judged: list[str] = []
        # An algorithm that acts only at INIT has acted in every case that has run.
        self._is_over = law.idle is None and subject.algorithm.events == (Event.INIT,)

    def __call__(self, case: Case) -> Tried:
        try:
            found = self.law.find(self.subject, case)
        except UnsatisfiedAssumption:  # a user's law may call hypothesis.assume
            raise
        except NotJudged as reason:
            self._not_judged.append(str(reason))
            return Tried(False)
        except Exception as error:
            owner = self._owner_of(error)
            if owner is None:
                return Tried(True, error)
            self._other = self._other or (owner, error, case)
            return Tried(False)
        return Tried(True, found) if isinstance(found, Broken) else Tried(found or self._is_over)

    def outcome(self, found: Search, start: float) -> Outcome:
        """Return the outcome of the cases tried since `start`, a time of `time.perf_counter`."""
        outcome = partial(
            Outcome,
            law=self.law.name,
            promise=self.law.promise,
            num_cases=found.num_cases,
            num_acted=found.num_acted,
            seconds=round(time.perf_counter() - start, 3),
        )
        case, failure = found.case, found.failure
        if case is not None and isinstance(failure, Broken):
            violation = self._violation(case, failure)
            event = "" if violation.event is None else f"at {violation.event.name}: "
            reason = event + (violation.path or violation.what.partition(": ")[0].partition(". ")[0])
            return outcome(status=Status.BROKEN, reason=reason, rows=violation.rows, error=violation)
        if case is not None and failure is not None:
            advice = "make apply work on this case, or name the tasks it is for (tasks=...)"
            rows = self._rows(failure, case, advice)
            return outcome(status=Status.ERROR, reason=first_line(failure), rows=rows, error=failure)
        if self._other is not None:
            law, error, case = self._other
            reason = f"it breaks {law.name} first, so this cannot be judged"
            return outcome(status=Status.ERROR, reason=reason, error=error, rows=self._rows(error, case, law.remedy))
        if found.num_acted:
            return outcome(status=Status.KEPT, reason=self._gaps(found.num_cases))
        status, reason = self._without_acting(found.num_cases)
        return outcome(status=status, reason=reason)

    def _rows(self, error: Exception, case: Case, advice: str) -> tuple[Row, ...]:
        """Describe an error, its place and case, and what to do about it."""
        notes, lines = _places(error, self.subject.algorithm)
        return (
            ("algorithm", repr(self.subject.algorithm)),
            ("raised", first_line(error)),
            *([("where", "; ".join(notes))] if notes else []),
            *(("line", line) for line in lines),
            ("case", repr(case)),
            ("to do", advice),
        )

    def _without_acting(self, num_cases: int) -> tuple[Status, str]:
        if self.law.name == NEUTRAL:
            return Status.KEPT, "with these settings it never acts"
        idle = never_acts(self.subject.algorithm)
        if idle is not None:
            return Status.SKIPPED, idle
        if self._not_judged:
            return Status.SKIPPED, self._gaps(num_cases)
        outside = acts_outside(self.subject.algorithm)
        if outside is not None and num_cases:
            return Status.SKIPPED, f"it acts at {outside} only, and at none of them in this law's cases"
        if self.law.idle is not None:
            return Status.SKIPPED, f"{self.law.idle} in {num_cases} case{'s' * (num_cases != 1)}"
        return Status.VACUOUS, "it never acted" if num_cases else "the law assumes what no case has"

    def _gaps(self, num_cases: int) -> str:
        """Return why the law could not judge some cases; empty if there is none."""
        reasons, num = "; ".join(dict.fromkeys(self._not_judged)), len(self._not_judged)
        return f"not judged in {num} of {num_cases} cases: {reasons}" if num else ""

    def _violation(self, case: Case, broken: Broken) -> LawViolation:
        """Return the violation, with the guilty event, which is not searched for while shrinking."""
        try:
            self.law(self.subject, case)
        except LawViolation as violation:
            return violation
        except Exception:  # the earlier, different failure counts
            pass
        return LawViolation(self.law, self.subject, broken, case)


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

        def around(event: Event, state: State, act: Act, touched: list[Event] = touched) -> State:
            before = process_settings()
            after = act(state)
            if process_settings() != before:
                touched.append(event)
            return after

        try:
            with process_restored(), errors_named():
                _use(case.step(Watched(algorithm, around).algorithm), case, algorithm)
        except Exception as error:
            # A broken law is not a refusal, nor is an error that follows from a changed setting of the process.
            if touched or owner_of(error) is not None:
                return None
            notes, lines = _places(error, algorithm)
            places = "; ".join([*notes, lines[-1].partition(": ")[0]])
            return Refusal(f"{first_line(error)} ({places})", is_refusal(error))
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
