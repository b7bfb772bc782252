"""Context managers: several as one, values of context variables, distributions that do not check their arguments."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

from torch.distributions import Distribution


_T = TypeVar("_T")
NOTHING: AbstractContextManager[None] = nullcontext()
"""A context manager that does nothing."""


def together(*scopes: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return one context manager for several; those that do nothing cost nothing.

    Example:
        >>> together(NOTHING, NOTHING) is NOTHING
        True
    """
    active = [scope for scope in scopes if scope is not NOTHING]
    if len(active) < 2:
        return active[0] if active else NOTHING
    return _nested(active)


@contextmanager
def during(variable: ContextVar[Any], value: _T) -> Iterator[_T]:
    """Return a scope in which a context variable has a value, which it yields."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextmanager
def _nested(scopes: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield


@contextmanager
def unvalidated() -> Iterator[None]:
    """Return a scope in which distributions check their arguments only if they are made with `validate_args=True`.

    The check reads whether all values are valid, which tensors without numbers, or of several members, cannot tell.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
