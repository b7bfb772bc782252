"""Samples of long tables for the quick tests; the rest of a table is marked slow."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


__all__ = ["one_in"]


def one_in(rate: int, members: Iterable[Any], name: Callable[[Any], str] | None = None) -> list[Any]:
    """Return parameters for all members, one in `rate` of which is quick.

    Args:
        rate: One member in `rate` is quick.
        members: Members of the table.
        name: Function that returns a member's id; by default pytest makes it.
    """
    return [
        pytest.param(member, id=name(member) if name else None, marks=pytest.mark.slow if number % rate else [])
        for number, member in enumerate(members)
    ]
