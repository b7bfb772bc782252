"""Several context managers as one."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any


__all__ = ["NOTHING", "together"]

NOTHING: AbstractContextManager[None] = nullcontext()
"""A context manager that does nothing."""


def together(*scopes: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return one context manager for several, to be entered at once; those that do nothing cost nothing.

    Example:
        >>> together(NOTHING, NOTHING) is NOTHING
        True
    """
    active = [scope for scope in scopes if scope is not NOTHING]
    if len(active) < 2:
        return active[0] if active else NOTHING
    with ExitStack() as stack:
        for scope in active:
            stack.enter_context(scope)
        return stack.pop_all()
