"""Laws, the error that a broken law raises, and its text."""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from purecompose.core.algorithm import Algorithm
from purecompose.core.loop import loop_events
from purecompose.core.program import events_in
from purecompose.errors import FormError
from purecompose.testing.case import Case, Subject
from purecompose.testing.process import process_restored
from purecompose.testing.tasks import Task
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER
from purecompose.tree import Difference


Row = tuple[str, str]
"""A label and its text."""

_NARROWEST = 20


def labelled(title: str, rows: Sequence[Row] = (), width: int | None = None) -> str:
    """Return the title with the rows indented below it, labels aligned; with a width longer lines are wrapped."""
    size = max((len(label) for label, _ in rows), default=0)
    lines = [("", title), *((f"  {label.ljust(size)}  ", text) for label, text in rows)]
    if width is None:
        return "\n".join(f"{label}{text}".rstrip() for label, text in lines)
    wrap = textwrap.TextWrapper(break_on_hyphens=False)
    wrapped = []
    for label, text in lines:
        wrap.initial_indent, wrap.subsequent_indent = label, " " * (len(label) or 2)
        wrap.width = max(width, len(label) + _NARROWEST)
        wrapped.append(wrap.fill(text) or label.rstrip())
    return "\n".join(wrapped)


class LawViolation(AssertionError):
    """An algorithm broke a law.

    Attributes:
        law: The law.
        algorithm: The algorithm's `repr`.
        event: The event that breaks the law, if known.
        path: Key path of the first leaf that differs, such as "params['0.weight']"; may be empty.
        values: The compared values by description: {"with 1 microbatch": 0.1, "with 2 microbatches": 0.2}.
        what: Description of the finding.
        line: Place of the algorithm's `apply`, such as "methods.py:12 in apply"; may be empty.
        case: The case that breaks the law.
    """

    def __init__(self, law: Law, subject: Subject, broken: Broken, case: Case) -> None:
        """Create the exception.

        Args:
            law: The law.
            subject: The algorithm under test.
            broken: The first difference.
            case: The case that breaks the law.
        """
        self.law: Law = law
        self.algorithm: str = repr(subject.algorithm)
        self.case: Case = case
        self.event: Event | None = broken.event
        self.path: str = broken.path
        self.what: str = broken.what
        self.values: dict[str, Any] = broken.values
        self.line: str = line_of(subject.algorithm.apply)
        super().__init__(labelled(f"the law {law.name} is broken: {law.promise}", self.rows))

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """The lines below the title, each with a label."""
        found = [
            ("line", self.line),
            ("event", "" if self.event is None else self.event.name),
            ("leaf", self.path),
            ("found", self.what),
        ]
        return (
            ("algorithm", self.algorithm),
            *((label, text) for label, text in found if text),
            *((label, repr(value)) for label, value in self.values.items()),
            ("case", repr(self.case)),
            ("to do", self.law.remedy),
        )


class Broken(Exception):
    """Raised by a law's function at the first difference; `Law` turns it into a `LawViolation`."""

    def __init__(
        self,
        difference: Difference | str,
        labels: tuple[str, str] = ("first", "second"),
        *,
        event: Event | None = None,
        where: str = "",
    ) -> None:
        """Create the exception from a difference or its description.

        Args:
            difference: The first difference, or a description of the fault.
            labels: Descriptions of its two values.
            event: The event at which it happened, if known.
            where: Prefix of the difference's path, such as "params".
        """
        super().__init__(str(difference))
        self.event: Event | None = event
        self.path: str = where
        self.what: str = str(difference)
        self.values: dict[str, Any] = {}
        if not isinstance(difference, str):
            self.path, self.what = f"{where}{difference.path}", difference.what
            for side, label in zip(("the first", "the second"), labels, strict=True):
                self.what = self.what.replace(f"only in {side}", f"only there {label}")
            has_values = difference.first is not None or difference.second is not None
            self.values = dict(zip(labels, (difference.first, difference.second), strict=True)) if has_values else {}


class NotJudged(Exception):
    """Raised by a law's function, with the reason, if it cannot judge a case; reports give the reason.

    A law that can judge none of the cases in which the algorithm acts is skipped.
    """


@dataclass(frozen=True)
class Law:
    """A property that every algorithm must have; call it with an algorithm and a case.

    Args:
        name: Name in reports and tests.
        promise: The property, as a sentence.
        remedy: Advice for the author of an algorithm that breaks it.
        judge: Function `(subject, case) -> bool` that raises `Broken`, or `NotJudged` with a reason, and otherwise
            returns whether there was something to judge (in most laws, whether the algorithm acted after INIT), so that
            a law is not counted as kept if nothing was judged. An algorithm that acts only at INIT has acted in every
            case that has run.
        owns: The library's errors that indicate that this law is broken.
        exempt: Function that returns the reason why the law does not concern an algorithm, or `None`.
        unsuited: Function that returns the reason why it cannot be judged on a task, or `None`.
        idle: For a law about something that an algorithm need not do, such as drawing: the reason to report if that
            happens in no case. The law is then skipped instead of being vacuous.
        most_cases: Maximal number of cases, for slow laws.
    """

    name: str
    promise: str
    remedy: str
    judge: Callable[[Subject, Case], bool]
    owns: tuple[type[Exception], ...] = ()
    exempt: Callable[[Algorithm], str | None] = lambda algorithm: None
    unsuited: Callable[[Task], str | None] = lambda task: None
    idle: str | None = None
    most_cases: int | None = None

    def __call__(self, algorithm: Algorithm | Subject | str, case: Case) -> bool:
        """Try the law on an algorithm, or a text as for `Subject.of`; return whether there was something to judge.

        Raises:
            LawViolation: The law is broken.
            NotJudged: The law cannot judge the case.
        """
        subject = Subject.of(algorithm)
        broken = self.find(subject, case)
        if not isinstance(broken, Broken):
            return broken
        if broken.event is None:
            broken.event = self._guilty_event(subject, case)
        raise LawViolation(self, subject, broken, case) from broken.__cause__

    def find(self, subject: Subject, case: Case) -> bool | Broken:
        """Return the fault, without a search for its event; if there is none, return whether the algorithm acted.

        The algorithm's changes of the process (generators, modes) are undone.
        """
        try:
            with process_restored(), errors_named():
                return self.judge(subject, case)
        except Broken as broken:
            return broken
        except self.owns as error:
            broken = Broken(str(error), event=getattr(error, "event", None))
            broken.__cause__ = error
            return broken

    def _guilty_event(self, subject: Subject, case: Case) -> Event | None:
        """Return the first event at which acting suffices to break the law; `None` if it takes several events."""
        for event in subject.algorithm.events:
            if event is Event.INIT:
                continue
            try:
                if isinstance(self.find(subject.only_at(event), case), Broken):
                    return event
            except Exception:  # one half of a pair may not work without the other
                continue
        return None

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name


def define_law(promise: str, remedy: str, **options: Any) -> Callable[[Callable[[Subject, Case], bool]], Law]:
    """Return a decorator that turns a function `(subject, case) -> bool` into a law of its name; see `Law`.

    Args:
        promise, remedy: Fields of `Law`.
        options: Other fields of `Law`: `owns`, `exempt`, `unsuited`, `idle`, `most_cases`.
    """

    def made(judge: Callable[[Subject, Case], bool]) -> Law:
        new = Law(judge.__name__, promise, remedy, judge, **options)
        object.__setattr__(new, "__doc__", judge.__doc__)
        return new

    return made


@contextlib.contextmanager
def errors_named() -> Iterator[None]:
    """Turn `SystemExit` into an error, and torch's errors about tensors of `inference_mode` into a `FormError`."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"it ended the program: SystemExit({error.code!r})") from error
    except RuntimeError as error:
        if "nference tensor" not in str(error):
            raise
        raise FormError(f"the state holds a tensor that torch.inference_mode has made: {error}") from error


def line_of(function: Callable[..., object]) -> str:
    """Return the place of a function or of an object's `__call__`: "methods.py:12 in apply"; empty if unknown."""
    unwrapped = inspect.unwrap(function)
    code = getattr(unwrapped, "__code__", None) or getattr(type(unwrapped).__call__, "__code__", None)
    return "" if code is None else f"{pathlib.Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}"


def never_acts(algorithm: Algorithm) -> str | None:
    """Return the reason to skip a law if the algorithm never acts; `None` if it may act.

    Args:
        algorithm: An algorithm.

    Example:
        >>> from purecompose import algorithms as alg
        >>> never_acts(alg.mixup()) is None, never_acts(alg.mixup(0)) is None
        (True, False)
    """
    return "its settings are neutral: it never acts" if algorithm.predicate == NEVER else None


def acts_in_step(algorithm: Algorithm) -> bool:
    """Return whether the algorithm may act at an event of `loop_events`; with a plain function for `match` it may.

    Other algorithms, such as surgery at INIT or averages used at EVAL_START, never act within a step.

    Args:
        algorithm: An algorithm.

    Example:
        >>> from purecompose import algorithms as alg
        >>> acts_in_step(alg.mixup()), acts_in_step(alg.blurpool())
        (True, False)
    """
    return any(algorithm.predicate.at(event) != NEVER for event in events_in(loop_events))


def acts_outside(algorithm: Algorithm) -> str | None:
    """Return the events of an algorithm that acts only outside the step, as text; `None` for all other algorithms."""
    if acts_in_step(algorithm) or algorithm.predicate == NEVER:
        return None
    return ", ".join(event.name for event in algorithm.events)
