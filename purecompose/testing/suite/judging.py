"""How the laws about another way to compute a step judge: within rounding, and with a word for who is to blame."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from purecompose import tree
from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.predicate import on
from purecompose.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken
from purecompose.testing.record import compare
from purecompose.testing.subject import Subject


__all__ = ["Judge", "attempted", "compare_rounded", "judged", "rounding"]

Judge: TypeAlias = Callable[[Subject, Case, torch.dtype], bool]
"""Judges a law in float64 or, where an algorithm takes no such numbers, in float32."""


def judged(judge: Judge, subject: Subject, case: Case) -> bool:
    """The judgement at the best precision; False where the case breaks the law without the algorithm, too."""
    try:
        return _at_best_precision(judge, subject, case)
    except Broken:
        try:
            _at_best_precision(judge, Subject(_idle(subject.name)), case)
        except Exception:
            return False
        raise


def _idle(name: str) -> Algorithm:
    """Acts, so that there is something to judge, and does nothing."""
    return Algorithm(name, on(Event.BATCH_START), lambda event, state: state)


def _at_best_precision(judge: Judge, subject: Subject, case: Case) -> bool:
    try:
        return judge(subject, case, torch.float64)
    except Broken:
        raise
    except Exception:  # whatever is wrong with more than float64 is raised again
        return judge(subject, case, torch.float32)


def attempted(doing: str, act: Callable[[], Any]) -> Any:
    """What `act` returns; what it raises, after a plain step has not, breaks the law."""
    try:
        return act()
    except Exception as error:
        message = " ".join(str(error).split())
        raise Broken(f"{doing}: {type(error).__name__}: {message}", event=getattr(error, "event", None)) from error


# Rounding in double precision is far below any mistake. The floors are for numbers that cancel, whose rounding has no
# relative size.
_DOUBLE, _SINGLE = tree.Tolerance(1e-6, 1e-13), tree.Tolerance(1e-3, 1e-6)


def rounding(dtype: torch.dtype) -> tree.Tolerance:
    """How far rounding reaches, by a leaf's own dtype: slots may be float32 in any state."""
    return _DOUBLE if dtype in (torch.float64, torch.complex128) else _SINGLE


def compare_rounded(first: State, second: State, labels: tuple[str, str], fields: Sequence[str]) -> None:
    """Raises `Broken` for the first leaf in which two states differ by more than rounding; integers agree exactly."""
    compare(first, second, labels, fields=fields, tolerance=rounding)
