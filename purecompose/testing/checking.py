"""check: every law that applies to an algorithm, tried on generated cases."""

import inspect
import pathlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed as seeded, settings
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.strategies import SearchStrategy

from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.state import State
from purecompose.testing.case import Case
from purecompose.testing.chosen import chosen
from purecompose.testing.law import Broken, Law, LawViolation, never_acts
from purecompose.testing.process import process_restored, process_settings
from purecompose.testing.record import intercepted
from purecompose.testing.report import Outcome, Report, Status
from purecompose.testing.strategies import cases
from purecompose.testing.subject import Subject
from purecompose.testing.suite import LAWS
from purecompose.testing.tasks import TASKS, Task


__all__ = ["Trials", "check", "trials"]

# The only law about another algorithm than the one under test: the same with settings that should do nothing.
_NEUTRAL = "neutral_setting"
# Shrinking ends after so many tries, which is what makes it repeatable; the time is for slow algorithms.
_MAX_SHRINK_TRIES = 120
_MAX_SHRINK_SECONDS = 7.0

Progress = Callable[[str, int, int], None]


def check(
    algorithm: Algorithm | Subject | str,
    *,
    neutral: Algorithm | Subject | str | None = None,
    tasks: Iterable[Task | str] | None = None,
    laws: Iterable[Law | str] | None = None,
    max_examples: int = 25,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Tries every law that applies on an algorithm.

    Nothing is printed or stored. The same seed gives the same cases in the same program. The work runs on one
    thread, which is faster for networks of this size.

    Args:
        algorithm: The algorithm, or a text: `"my_module:my_algorithm"`, `"mixup(0.2)"`. With a text, laws that need
            a new process apply as well.
        neutral: The same algorithm with settings that should change nothing, such as `mixup(0.0)`.
        tasks: The tasks, or their names in `TASKS`; by default all that the algorithm accepts.
        laws: The laws, or their names in `LAWS`; by default all. A law of one's own is made with `testing.define_law`.
        max_examples: Cases for each law.
        seed: Of the cases.
        progress: Told the name of each law before it is tried, its place from 1, and how many there are.

    Returns:
        The report; `report.ok` says whether all is well, and `print(report)` shows it.

    Raises:
        TypeError, ValueError: There is no such algorithm, task or law, or fewer than one case is wanted.

    Example:
        >>> report = check("label_smoothing(0.1)", laws=["deterministic"], tasks=["vectors"], max_examples=3)
        >>> report.ok, report["deterministic"].status.value
        (True, 'kept')
    """
    prepared = trials(algorithm, neutral=neutral, tasks=tasks, laws=laws, max_examples=max_examples, seed=seed)
    return prepared.report(progress)


def trials(
    algorithm: Algorithm | Subject | str,
    *,
    neutral: Algorithm | Subject | str | None = None,
    tasks: Iterable[Task | str] | None = None,
    laws: Iterable[Law | str] | None = None,
    max_examples: int = 25,
    seed: int = 0,
) -> "Trials":
    """What `check` is about to try; the arguments are those of `check`."""
    if not isinstance(max_examples, int) or isinstance(max_examples, bool) or max_examples < 1:
        raise ValueError(f"max_examples={max_examples!r}: expected a positive number of cases")
    known_laws = {law.name: law for law in LAWS}
    return Trials(
        Subject.of(algorithm),
        None if neutral is None else Subject.of(neutral),
        chosen("law", LAWS if laws is None else laws, known_laws, Law),
        chosen("task", TASKS.values() if tasks is None else tasks, TASKS, Task),
        tasks is not None,
        max_examples,
        seed,
    )


class _Probe(NamedTuple):
    tasks: tuple[Task, ...]
    refused: dict[str, str]


@dataclass(frozen=True)
class Trials:
    """An algorithm, and the laws to be tried on it; made by `trials`.

    Args:
        subject: The algorithm.
        neutral: With settings that should change nothing.
        laws: The laws.
        candidates: The tasks, before the algorithm has had its say.
        tasks_were_named: Whether the user named them.
        max_examples: Cases for each law.
        seed: Of the cases.
    """

    subject: Subject
    neutral: Subject | None
    laws: tuple[Law, ...]
    candidates: tuple[Task, ...]
    tasks_were_named: bool
    max_examples: int
    seed: int

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that the algorithm accepts."""
        return self._probe.tasks

    @property
    def refused(self) -> Mapping[str, str]:
        """Why it does not accept others."""
        return self._probe.refused

    def report(self, progress: Progress | None = None) -> Report:
        """Tries all laws; without a task there is nothing to try them on."""
        start, outcomes = time.perf_counter(), []
        for index, law in enumerate(self.laws if self.tasks else (), 1):
            if progress is not None:
                progress(law.name, index, len(self.laws))
            outcomes.append(self.judge(law))
        return Report(
            repr(self.subject.algorithm),
            tuple(outcomes),
            tuple(task.name for task in self.tasks),
            self.refused,
            self.tasks_were_named,
            self.max_examples,
            self.seed,
            time.perf_counter() - start,
        )

    def judge(self, law: Law) -> Outcome:
        """Tries one law."""
        subject = self.subject
        if law.name == _NEUTRAL:
            if self.neutral is None:
                return Outcome(law.name, Status.SKIPPED, _NO_NEUTRAL, law.promise)
            subject = self.neutral
        exempt = law.exempt(subject.algorithm)
        if exempt:
            return Outcome(law.name, Status.SKIPPED, exempt, law.promise)
        unsuited = {task: why for task in self.tasks if (why := law.unsuited(task)) is not None}
        if len(unsuited) == len(self.tasks):
            return Outcome(law.name, Status.SKIPPED, f"on no task: {'; '.join(set(unsuited.values()))}", law.promise)
        start = time.perf_counter()
        search = _Search(law, subject, self._owner_of)
        tasks = [task for task in self.tasks if task not in unsuited]
        with _one_thread():
            search.run(_cases(tasks, self.subject.algorithm), self.max_examples, self.seed)
            found = search.outcome()
        return Outcome(
            law.name,
            found.status,
            found.reason,
            law.promise,
            search.examples,
            search.acted,
            found.details,
            found.error,
            round(time.perf_counter() - start, 3),
        )

    @cached_property
    def _probe(self) -> _Probe:
        with _one_thread():
            answers = {task: self._refusal(task) for task in self.candidates}
        return _Probe(
            tuple(task for task, why in answers.items() if why is None),
            {task.name: why for task, why in answers.items() if why is not None},
        )

    def _refusal(self, task: Task) -> str | None:
        """Why the algorithm does not work on a task; `None` if it does, or breaks a law there.

        Raises whatever the plain step raises: then the task is wrong.
        """
        for start in (0, 4, 7):  # the beginning, the middle and the last of 8 batches: an algorithm may start late
            case = Case(task, start=start)
            plain = case.step()
            plain(plain.init(case.state()), case.batch(0))
            touched: list[Event] = []
            try:
                with process_restored():
                    step = case.step(_watched(self.subject.algorithm, touched))
                    step(step.init(case.state()), case.batch(0))
            except Exception as error:
                # What breaks a law is no refusal, nor is what comes of a switch that it has left in the process.
                return None if touched or self._owner_of(error) is not None else _first_line(error)
        return None

    def _owner_of(self, error: Exception) -> Law | None:
        """The law that an error of the library means; one that is tried comes first."""
        return next((law for law in (*self.laws, *LAWS) if law.owns and isinstance(error, law.owns)), None)


def _watched(algorithm: Algorithm, touched: list[Event]) -> Algorithm:
    """The algorithm; notes the events at which it changes what belongs to the process."""

    def around(event: Event, state: State, act: Callable[[State], State]) -> State:
        before = process_settings()
        after = act(state)
        if process_settings() != before:
            touched.append(event)
        return after

    return intercepted(algorithm, around)


_NO_NEUTRAL = "no neutral settings given, such as neutral=mixup(0.0) in Python or --neutral 'mixup(0.0)'"


def _cases(tasks: Sequence[Task], algorithm: Algorithm) -> SearchStrategy[Case]:
    return cases(tasks=tasks, algorithm=algorithm)


class _Found(Exception):
    """Tells Hypothesis that a case is a failing one."""


class _Enough(BaseException):
    """Ends shrinking; Hypothesis takes an `Exception` for a failing case."""


class _Verdict(NamedTuple):
    status: Status
    reason: str = ""
    details: str = ""
    error: Exception | None = None


class _Search:
    """One law over generated cases, and what was found.

    The failing case and its error are kept here, not taken from what Hypothesis raises: an algorithm that
    remembers in a closure fails differently when it is tried once more.
    """

    def __init__(self, law: Law, subject: Subject, owner_of: Callable[[Exception], Law | None]) -> None:
        self.law, self.subject, self._owner_of = law, subject, owner_of
        self.examples = self.acted = 0
        self._blocked: tuple[Law, Exception] | None = None
        self._case: Case | None = None
        self._failure: Exception | None = None
        self._tries_left, self._deadline = _MAX_SHRINK_TRIES, 0.0

    def run(self, strategy: SearchStrategy[Case], max_examples: int, seed: int) -> None:
        """Tries the law until a case fails, and then finds a simpler one."""
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
            seeded(seed)(quietly(given(strategy)(lambda case: self._try(case))))()
        except (Exception, _Enough):
            if self._failure is None:
                raise

    def outcome(self) -> _Verdict:
        """What the cases came to."""
        if self._failure is not None and self._case is not None:
            if isinstance(self._failure, Broken):
                violation = self._violation(self._case, self._failure)
                return _Verdict(Status.BROKEN, _summed_up(violation), str(violation), violation)
            details = _described(self._failure, self.law, self._case, self.subject.algorithm)
            return _Verdict(Status.ERROR, _first_line(self._failure), details, self._failure)
        if self._blocked is not None:
            law, error = self._blocked
            return _Verdict(Status.BLOCKED, f"it breaks {law.name} first, so this cannot be judged", "", error)
        if not self.acted:
            if self.law.name == _NEUTRAL:
                return _Verdict(Status.KEPT, "with these settings it never acts")
            idle = never_acts(self.subject.algorithm)
            return _Verdict(Status.SKIPPED, idle) if idle else _Verdict(Status.VACUOUS, _VACUOUS)
        return _Verdict(Status.KEPT)

    def _try(self, case: Case) -> None:
        if self._failure is not None:
            self._tries_left -= 1
            if self._tries_left < 0 or time.perf_counter() > self._deadline:
                raise _Enough
        failure = self._failure_on(case)
        if failure is None or (self._failure is not None and type(failure) is not type(self._failure)):
            return
        if self._failure is None:
            self._deadline = time.perf_counter() + _MAX_SHRINK_SECONDS
        self._case, self._failure = case, failure
        raise _Found

    def _failure_on(self, case: Case) -> Exception | None:
        acted, failure = True, None
        try:
            found = self.law.find(self.subject, case)
            acted, failure = (True, found) if isinstance(found, Broken) else (found, None)
        except UnsatisfiedAssumption:  # a user's law may call hypothesis.assume
            raise
        except Exception as error:
            owner = self._owner_of(error)
            if owner is None:
                failure = error
            else:
                acted, self._blocked = False, self._blocked or (owner, error)
        if self._failure is None:
            self.examples += 1
            self.acted += acted
        return failure

    def _violation(self, case: Case, broken: Broken) -> LawViolation:
        """The violation, with the guilty event, which is not looked for while shrinking."""
        try:
            self.law(self.subject, case)
        except LawViolation as violation:
            return violation
        except Exception:  # it failed otherwise before: that is what counts
            pass
        return LawViolation(self.law, self.subject, broken, case)


_VACUOUS = (
    "it acted in no case, so nothing was judged: does match say yes at an event of the step, early in a "
    "short run? More cases (max_examples, --examples) or other tasks may help"
)


def _summed_up(violation: LawViolation) -> str:
    where = [] if violation.event is None else [f"at {violation.event.name}"]
    what = violation.path or violation.what.partition(":")[0]
    return ": ".join([*where, *([what] if what else [])]) or "see below"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")


def _described(error: Exception, law: Law, case: Case, algorithm: Algorithm) -> str:
    """An error that is no violation: what was raised, where in the author's file, and the case."""
    notes = "; ".join(dict.fromkeys(getattr(error, "__notes__", ())))
    rows = [("algorithm", repr(algorithm)), ("raised", _first_line(error))]
    rows += [("where", notes)] if notes else []
    rows += [("line", line) for line in _lines(error, algorithm)]
    rows += [("case", repr(case)), ("to do", "make apply work on this case, or name the tasks it is for (tasks=...)")]
    width = max(len(label) for label, _ in rows)
    return "\n".join([f"{law.name} could not be tried", *(f"  {a.ljust(width)}  {b}" for a, b in rows)])


def _lines(error: Exception, algorithm: Algorithm) -> list[str]:
    """The last frames in the algorithm's own file; the innermost of all where it has none."""
    try:
        own = inspect.getsourcefile(inspect.unwrap(algorithm.apply))
    except TypeError:  # an object that can be called
        own = inspect.getsourcefile(type(algorithm.apply))
    frames = traceback.extract_tb(error.__traceback__)
    chosen = [frame for frame in frames if frame.filename == own][-3:] or frames[-1:]
    return [f"{pathlib.Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in chosen]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Networks of this size gain nothing from more, and bits depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
