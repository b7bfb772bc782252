"""What a law is, and the error that a broken one raises."""

from __future__ import annotations

import contextlib
import inspect
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from purecompose.core.algorithm import Algorithm
from purecompose.core.contract import FormError
from purecompose.core.loop import loop_events
from purecompose.core.scopes import events_in
from purecompose.testing.case import Case
from purecompose.testing.process import process_restored
from purecompose.testing.subject import Subject
from purecompose.testing.tasks import Task
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER
from purecompose.tree import Difference


__all__ = ["Broken", "Law", "LawViolation", "acts_in_step", "acts_outside", "define_law", "errors_named", "never_acts"]


class LawViolation(AssertionError):
    """An algorithm broke a law.

    Attributes:
        law: The law.
        algorithm: The algorithm, as it prints.
        event: The event at which it goes wrong, as far as that is known.
        path: The key path of the first leaf that differs, such as "params['0.weight']"; may be empty.
        values: What was compared, by what it is: {"with 1 microbatch": 0.1, "with 2 microbatches": 0.2}.
        what: What was found, in words.
        cause: Where it comes from, as far as that is known; may be empty.
        line: Where the algorithm's `apply` is written, such as "methods.py:12 in apply"; may be empty.
        case: The case that shows it.
    """

    def __init__(self, law: Law, subject: Subject, broken: Broken, case: Case) -> None:
        self.law, self.algorithm, self.case = law, repr(subject.algorithm), case
        self.event, self.path, self.what, self.values = broken.event, broken.path, broken.what, broken.values
        self.cause, self.line = broken.cause, line_of(subject.algorithm.apply)
        super().__init__(self._text())

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """What it says below its title, each with a label."""
        found = [
            ("line", self.line),
            ("event", "" if self.event is None else self.event.name),
            ("leaf", self.path),
            ("found", self.what),
            ("cause", self.cause),
        ]
        return (
            ("algorithm", self.algorithm),
            *((label, text) for label, text in found if text),
            *((label, repr(value)) for label, value in self.values.items()),
            ("case", repr(self.case)),
            ("to do", self.law.remedy),
        )

    def _text(self) -> str:
        width = max(len(label) for label, _ in self.rows)
        lines = [f"  {label.ljust(width)}  {value}" for label, value in self.rows]
        return "\n".join([f"the law {self.law.name} is broken: {self.law.promise}", *lines])


def _told(what: str, labels: tuple[str, str]) -> str:
    """Return the difference as text, with the names of the two in place of "the first" and "the second"."""
    for side, label in zip(("the first", "the second"), labels, strict=True):
        what = what.replace(f"only in {side}", f"only there {label}")
    return what


class Broken(Exception):
    """Raised by a law's function at the first difference; `Law` makes it a `LawViolation`.

    Attributes:
        cause: Where it comes from, in words, for laws that can tell.
    """

    def __init__(
        self,
        difference: Difference | str,
        labels: tuple[str, str] = ("first", "second"),
        *,
        event: Event | None = None,
        where: str = "",
    ) -> None:
        """Take what differs, or says it in words.

        Args:
            difference: The first difference, or what is wrong.
            labels: What its two values are.
            event: Where it happened, if known.
            where: Stands before the difference's path, such as "params".
        """
        super().__init__(str(difference))
        self.event, self.cause = event, ""
        if isinstance(difference, str):
            self.path, self.what, self.values = where, difference, {}
        else:
            self.path, self.what = f"{where}{difference.path}", _told(difference.what, labels)
            has_values = difference.first is not None or difference.second is not None
            self.values = dict(zip(labels, (difference.first, difference.second), strict=True)) if has_values else {}


@dataclass(frozen=True)
class Law:
    """Something that every algorithm keeps; call it with an algorithm and a case.

    Args:
        name: What reports and tests call it.
        promise: What holds, in a sentence.
        remedy: What an author whose algorithm breaks it can do.
        judge: `(subject, case) -> bool`: raises `Broken`; tells whether there was something to judge, in most laws
            whether the algorithm acted after INIT, so that a law about nothing is not counted as kept. One that acts
            at INIT only has done what it does when the case has run.
        owns: The library's own errors that mean this law.
        exempt: Says why the law does not concern an algorithm, or `None`.
        unsuited: Says why it cannot be judged on a task, or `None`.
        is_about_option: It is about something that an algorithm need not do, such as acting at INIT: where no case
            had any of it, the law is skipped, and no doubt is cast on the algorithm.
        idle: What no case having had any of it means, as the reason for that.
        most_cases: How many cases are tried at most, of a law that takes long.
    """

    name: str
    promise: str
    remedy: str
    judge: Callable[[Subject, Case], bool]
    owns: tuple[type[Exception], ...] = ()
    exempt: Callable[[Algorithm], str | None] = lambda algorithm: None
    unsuited: Callable[[Task], str | None] = lambda task: None
    is_about_option: bool = False
    idle: str = "it never acted"
    most_cases: int | None = None

    def __call__(self, algorithm: Algorithm | Subject | str, case: Case) -> bool:
        """Try the law.

        Args:
            algorithm: An algorithm, or a text as for `Subject.of`.
            case: The situation.

        Returns:
            Whether the algorithm acted, so that there was something to judge.

        Raises:
            LawViolation: The law is broken.
        """
        subject = Subject.of(algorithm)
        broken = self.find(subject, case)
        if not isinstance(broken, Broken):
            return broken
        if broken.event is None:
            broken.event = self._guilty_event(subject, case)
        raise LawViolation(self, subject, broken, case) from broken.__cause__

    def find(self, subject: Subject, case: Case) -> bool | Broken:
        """Raise what is broken, without a search for the event; else return whether the algorithm acted.

        What the algorithm changes in the process (generators, modes) is set back.
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
        """Return the first event that suffices for the algorithm to break the law; `None` if it takes several."""
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


def define_law(
    promise: str,
    remedy: str,
    *,
    owns: Sequence[type[Exception]] = (),
    exempt: Callable[[Algorithm], str | None] = lambda algorithm: None,
    unsuited: Callable[[Task], str | None] = lambda task: None,
    is_about_option: bool = False,
    idle: str = "it never acted",
    most_cases: int | None = None,
) -> Callable[[Callable[[Subject, Case], bool]], Law]:
    """Make a law, named like the function, of a function `(subject, case) -> bool`; see `Law`."""

    def made(judge: Callable[[Subject, Case], bool]) -> Law:
        concerns = (tuple(owns), exempt, unsuited, is_about_option, idle, most_cases)
        new = Law(judge.__name__, promise, remedy, judge, *concerns)
        object.__setattr__(new, "__doc__", judge.__doc__)
        return new

    return made


@contextlib.contextmanager
def errors_named() -> Iterator[None]:
    """Make an error of what ends the program, and of what torch raises of tensors made by inference_mode."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"it ended the program: SystemExit({error.code!r})") from error
    except RuntimeError as error:
        if "nference tensor" not in str(error):
            raise
        raise FormError(f"the state holds a tensor that torch.inference_mode has made: {error}") from error


def line_of(function: Callable[..., object]) -> str:
    """Return where a function or an object's `__call__` is defined: "methods.py:12 in apply"; empty if unknown."""
    unwrapped = inspect.unwrap(function)
    code = getattr(unwrapped, "__code__", None) or getattr(type(unwrapped).__call__, "__code__", None)
    return "" if code is None else f"{pathlib.Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}"


def never_acts(algorithm: Algorithm) -> str | None:
    """Return the reason why hardly any law concerns an algorithm with neutral settings."""
    return "its settings are neutral: it never acts" if algorithm.predicate == NEVER else None


def acts_in_step(algorithm: Algorithm) -> bool:
    """Return whether the algorithm may act at an event of `loop_events`; a plain function for `match` may anywhere.

    One that may not, such as surgery at INIT or averages used at EVAL_START, cannot be seen to act within a step.
    """
    return any(algorithm.predicate.at(event) != NEVER for event in events_in(loop_events))


def acts_outside(algorithm: Algorithm) -> str | None:
    """Return as text the events of an algorithm that acts only outside the step; `None` if it may act inside."""
    if acts_in_step(algorithm) or algorithm.predicate == NEVER:
        return None
    return ", ".join(event.name for event in algorithm.events)
