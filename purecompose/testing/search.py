"""The search for the simplest case that fails, for `check` and `commutes`, which try different things in a case."""

import time
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, Verbosity, given, seed as seeded, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from purecompose.testing.case import Case


SHRINK_TRIES = 120
"""Number of tries after which shrinking ends, which makes it reproducible."""
SHRINK_SECONDS = 7.0
"""Seconds after which shrinking ends as well, for slow algorithms."""


class Tried(NamedTuple):
    """The result of a case."""

    acted: bool = True
    """True if there was something to judge."""
    failure: Exception | None = None
    """The failure, if any."""


class Search(NamedTuple):
    """The result of all cases."""

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
    """Try cases until one fails, and then search for a simpler one.

    `Stop` ends the search; other errors that an attempt raises are raised again, except rejections by
    `hypothesis.assume`.

    Args:
        strategy: The cases.
        attempt: Function that tries a case. While shrinking, only failures of the first one's type count.
        max_examples: Number of cases.
        seed: Seed of the cases.
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
    """The result so far.

    The failing case and its failure are stored here, not taken from Hypothesis's exception, because an algorithm with
    hidden state in a closure may fail differently when it is tried again.
    """

    def __init__(self, attempt: Callable[[Case], Tried]) -> None:
        self.attempt, self.found = attempt, Search()
        self._tries_left, self._deadline = SHRINK_TRIES, 0.0

    def step(self, case: Case) -> None:
        """Try a case; raise if it fails."""
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
