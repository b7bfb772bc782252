"""The laws as tests of pytest: one decorator, and a research repository has the whole suite."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Unpack

from purecompose.core.algorithm import Algorithm
from purecompose.testing.checking import CheckOptions, Trials, trials
from purecompose.testing.law import Law
from purecompose.testing.report import Outcome, Status
from purecompose.testing.subject import Subject


__all__ = ["LawTest", "laws"]

_PARAMETER = "law"


class LawTest:
    """A law about to be tried on an algorithm, within one test; call it.

    Attributes:
        name: The law's name.
        outcome: What came out, once it has been called.
    """

    def __init__(self, prepared: Trials, law: Law) -> None:
        self._trials, self._law, self.name = prepared, law, law.name
        self.outcome: Outcome | None = None

    def __call__(self) -> Outcome:
        """Try the law; a second call repeats the first one's result.

        Raises:
            LawViolation: The law is broken. Skips the test where the law does not apply; fails it where the law
                could not be judged.
        """
        __tracebackhide__ = True
        import pytest

        if self._trials.failed_tasks:
            pytest.fail(_refusals(self._trials), pytrace=False)
        if self.outcome is None:
            self.outcome = self._trials.judge(self._law)
        outcome = self.outcome
        if outcome.status is Status.SKIPPED:
            pytest.skip(outcome.reason)
        if outcome.status is Status.BROKEN and outcome.error is not None:
            # Without the frames of Hypothesis and of the law, none of which the author wrote.
            raise outcome.error.with_traceback(None) from None
        if not outcome.status.is_ok:
            pytest.fail(f"{self.name}: {outcome.status.value}: {outcome.details or outcome.reason}", pytrace=False)
        return outcome

    def __repr__(self) -> str:
        return self.name


def laws(
    algorithm: Algorithm | Subject | str, **options: Unpack[CheckOptions]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test function a test of each law, with ids such as `test_my_algorithm[deterministic]`::

        from purecompose.testing import laws

        @laws(my_algorithm)
        def test_my_algorithm(law):
            law()

    The body may call `law()` where it wants it tried, within a `with` statement or after its own preparations.
    A law that the body has not called is tried after it, so an empty body tests as much; the parameter `law` may be
    left out. What the decorated function needs besides comes from fixtures, as in any test.

    Args:
        algorithm: As in `check`.
        options: As in `check`: `neutral`, `tasks`, `laws`, `max_examples` and `seed`; see `CheckOptions`.

    Raises:
        TypeError, ValueError: As `check`, when the test module is imported.
    """
    prepared = trials(algorithm, **options)

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        import pytest

        if inspect.isclass(test) or inspect.iscoroutinefunction(test):
            kind = "class: decorate its method" if inspect.isclass(test) else "coroutine: decorate a plain function"
            raise TypeError(f"@laws on {test.__name__}, a {kind}")
        signature = inspect.signature(test)
        takes_law = _PARAMETER in signature.parameters

        @functools.wraps(test)
        def tried(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            one = LawTest(prepared, kwargs.pop(_PARAMETER))  # again for each run: a test may be run again
            test(*args, **kwargs, **({_PARAMETER: one} if takes_law else {}))
            if one.outcome is None:
                one()

        if not takes_law:
            keyword = inspect.Parameter(_PARAMETER, inspect.Parameter.KEYWORD_ONLY)
            parameters = [*signature.parameters.values(), keyword]
            tried.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
        names = [law.name for law in prepared.laws]
        return pytest.mark.parametrize(_PARAMETER, prepared.laws, ids=names)(tried)

    return decorate


def _refusals(prepared: Trials) -> str:
    said = [f"{prepared.subject.algorithm!r} does not work on"]
    return "\n".join([*said, *(f"  {name}: {why}" for name, why in prepared.refused.items())])
