"""The search for the simplest case that fails; `check` and `commutes` differ in what they try in a case."""

import time
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, Verbosity, given, seed as seeded, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from purecompose.testing.case import Case


__all__ = ["SHRINK_SECONDS", "SHRINK_TRIES", "Search", "Stop", "Tried", "search"]

SHRINK_TRIES = 120
"""Shrinking ends after so many tries, which is what makes it repeatable."""
SHRINK_SECONDS = 7.0
"""Shrinking ends after this time too, for slow algorithms."""


class Tried(NamedTuple):
    """What came of a case."""

    acted: bool = True
    """Whether there was something to judge."""
    failure: Exception | None = None
    """What is wrong."""


class Search(NamedTuple):
    """What came of all cases."""

    num_cases: int = 0
    """How many were tried up to the first that fails, without those that an assumption rejects."""
    num_acted: int = 0
    """In how many of them there was something to judge."""
    case: Case | None = None
    """The simplest case that fails."""
    failure: Exception | None = None
    """What is wrong there."""


class Stop(BaseException):
    """Raised by an attempt where more cases would tell nothing; Hypothesis takes an `Exception` for a failing case."""


class _Failed(Exception):
    """Tells Hypothesis that a case is a failing one."""


def search(strategy: SearchStrategy[Case], attempt: Callable[[Case], Tried], *, max_examples: int, seed: int) -> Search:
    """Try cases until one fails, and then looks for a simpler one.

    What an attempt raises ends the search, but for `Stop`, and for what `hypothesis.assume` rejects.

    Args:
        strategy: The cases.
        attempt: What to do with one. A failure of another type than the first one is not taken for the same.
        max_examples: How many are tried.
        seed: The same one gives the same cases.
    """
    searching = _Searching(attempt)
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
        seeded(seed)(quietly(given(strategy)(lambda case: searching.step(case))))()
    except (Stop, Unsatisfiable):
        pass
    except Exception:
        if searching.found.failure is None:
            raise
    return searching.found


class _Searching:
    """What has been found so far.

    The failing case and its failure are kept here, not taken from what Hypothesis raises: an algorithm that remembers
    in a closure fails differently when it is tried once more.
    """

    def __init__(self, attempt: Callable[[Case], Tried]) -> None:
        self.attempt, self.found = attempt, Search()
        self._tries_left, self._deadline = SHRINK_TRIES, 0.0

    def step(self, case: Case) -> None:
        """Try a case; raise where it fails."""
        is_shrinking = self.found.failure is not None
        if is_shrinking:
            self._tries_left -= 1
            if self._tries_left < 0 or time.perf_counter() > self._deadline:
                raise Stop
        acted, failure = self.attempt(case)
        if not is_shrinking:
            self.found = Search(self.found.num_cases + 1, self.found.num_acted + acted)
            self._deadline = time.perf_counter() + SHRINK_SECONDS
        if failure is None or (is_shrinking and type(failure) is not type(self.found.failure)):
            return
        self.found = self.found._replace(case=case, failure=failure)
        raise _Failed
