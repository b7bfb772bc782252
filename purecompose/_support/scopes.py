"""Context managers: of several as one, and of the values of context variables."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar


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
