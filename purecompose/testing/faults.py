"""Reports of errors other than broken laws, so that the algorithm's author can find their cause."""

import inspect
import pathlib
import re
import traceback
from collections.abc import Callable

import torch

from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.process import process_restored
from purecompose.testing.record import intercepted, run
from purecompose.testing.rows import Row
from purecompose.time.event import Event


_IN_COMPANION = re.compile(r"in companion\.(\w+) at (?:Event\.)?(\w+)")


def first_line(error: BaseException) -> str:
    """Return the type and the first line of the message.

    Example:
        >>> first_line(ValueError("expected images\\nof four dimensions"))
        'ValueError: expected images'
    """
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")


def one_line(error: Exception, algorithm: Algorithm) -> str:
    """Describe an error in one line, with its place in the step and the author's line."""
    lines = [line.partition(": ")[0] for line in _author_lines(error, algorithm)[-1:]]
    places = [*_notes(error), *lines]
    return " ".join([first_line(error), *([f"({'; '.join(places)})"] if places else [])])


def is_refusal(error: BaseException) -> bool:
    """Return whether an error is an intended refusal.

    That is a TypeError, ValueError, NotImplementedError, assertion or warning, raised explicitly and not by torch.

    Example:
        >>> try:
        ...     int("a")
        ... except ValueError as error:
        ...     is_refusal(error)
        False
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not isinstance(error, (TypeError, ValueError, NotImplementedError, AssertionError, Warning)):
        return False
    last = frames[-1]
    is_torchs = pathlib.Path(last.filename).is_relative_to(_TORCH)
    return not is_torchs and (last.line or "").startswith(("raise", "assert", "warn"))


_TORCH = pathlib.Path(torch.__file__).parent


def fault_rows(error: Exception, algorithm: Algorithm, case: Case) -> tuple[Row, ...]:
    """Describe an error, its place and case, and what to do about it."""
    own = _author_lines(error, algorithm)
    notes = "; ".join(_notes(error))
    return (
        ("algorithm", repr(algorithm)),
        ("raised", first_line(error)),
        *([("where", notes)] if notes else []),
        *(("line", line) for line in own or _lines(error)[-1:]),
        ("case", repr(case)),
        ("to do", _to_do(error, algorithm, case, bool(own))),
    )


def broken_company(error: BaseException) -> str | None:
    """Describe an error that was raised inside a companion; `None` for others."""
    found = next((match for note in _notes(error) if (match := _IN_COMPANION.search(note))), None)
    return None if found is None else f"broke its company: the companion {found[1]} fails at {found[2]}"


def _to_do(error: Exception, algorithm: Algorithm, case: Case, is_authors: bool) -> str:
    company = broken_company(error)
    if company is not None:
        return f"it {company} on what the algorithm left there; keep the shapes and types that others rely on"
    if is_authors:
        return "make apply work on this case, or name the tasks it is for (tasks=...)"
    if not _works(lambda: run(case.step(), case.state(), case.batches())):
        return "the plain step fails on this case as well: look at the task's network and batches"
    return f"the plain step works on this case; look at what the algorithm returned{_last_event(algorithm, case)}"


def _last_event(algorithm: Algorithm, case: Case) -> str:
    """Return a text with the event at which the algorithm acted last before the failure; empty if nothing fails."""
    acted = [Event.INIT] if Event.INIT in algorithm.events else []

    def note(event: Event, state: State, act: Callable[[State], State]) -> State:
        acted.append(event)
        return act(state)

    step = case.step(intercepted(algorithm, note))
    if _works(lambda: run(step, case.state(), case.batches())) or not acted:
        return ""
    return f" at {acted[-1].name}"


def _works(attempt: Callable[[], object]) -> bool:
    try:
        with process_restored():
            attempt()
    except Exception:
        return False
    return True


def _notes(error: BaseException) -> list[str]:
    return list(dict.fromkeys(getattr(error, "__notes__", ())))


def _author_lines(error: Exception, algorithm: Algorithm) -> list[str]:
    """Return the last frames of the traceback in the file that defines `apply`."""
    try:
        own = inspect.getsourcefile(inspect.unwrap(algorithm.apply))
    except TypeError:  # a callable object
        own = inspect.getsourcefile(type(algorithm.apply))
    return _lines(error, own)[-3:]


def _lines(error: Exception, filename: str | None = None) -> list[str]:
    """Return the frames in a file, by default in all files, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    chosen = [frame for frame in frames if filename in (None, frame.filename)]
    return [f"{pathlib.Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in chosen]
