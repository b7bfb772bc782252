"""The laws as pytest tests: one decorator adds the whole suite to a research repository."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Unpack

from purecompose.core.algorithm import Algorithm
from purecompose.testing.checking import CheckOptions, Trials, trials
from purecompose.testing.law import Law
from purecompose.testing.report import Outcome, Status
from purecompose.testing.subject import Subject


_PARAMETER = "law"


class LawTest:
    """A function that tries a law on an algorithm, within one test.

    Attributes:
        name: The law's name.
        outcome: The outcome, once it has been called.
    """

    def __init__(self, prepared: Trials, law: Law) -> None:
        self._trials, self._law, self.name = prepared, law, law.name
        self.outcome: Outcome | None = None

    def __call__(self) -> Outcome:
        """Try the law; a second call repeats the result of the first one."""
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
            # Without the frames of Hypothesis and of the law, which are not the author's code.
            raise outcome.error.with_traceback(None) from None
        if not outcome.status.is_ok:
            pytest.fail(f"{self.name}: {outcome.status.value}: {outcome.details or outcome.reason}", pytrace=False)
        return outcome

    def __repr__(self) -> str:
        return self.name


def laws(
    algorithm: Algorithm | Subject | str, **options: Unpack[CheckOptions]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that turns a test function into tests of all laws, `test_my_algorithm[deterministic]` etc.::

        from purecompose.testing import laws

        @laws(my_algorithm)
        def test_my_algorithm(law):
            law()

    The body may call `law()` itself, for example within a `with` statement or after its own preparations. If it does
    not, the law is tried after the body, so an empty body is enough, and the parameter `law` may be left out. Other
    parameters of the decorated function are fixtures, as in any test.

    Args:
        algorithm: As in `check`.
        options: As in `check`: `neutral`, `tasks`, `laws`, `max_examples` and `seed`; see `CheckOptions`.

    Raises:
        TypeError, ValueError: As in `check`, when the test module is imported.
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
            one = LawTest(prepared, kwargs.pop(_PARAMETER))  # a new one each time, because a test may be run again
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
