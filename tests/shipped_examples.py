"""Examples of the shipped methods for tests: the first of each method; the others are for the slow tests."""

from collections.abc import Callable
from typing import Any

import pytest

from purecompose.testing.shipped import SHIPPED
from purecompose.testing.shipped.row import Row


__all__ = ["examples", "examples_on_tasks"]


def examples() -> list[Any]:
    """Parameters (row, text) for every example."""
    return [
        pytest.param(row, text, id=text, marks=[] if text == row.examples[0] else pytest.mark.slow)
        for row in SHIPPED.values()
        for text in row.examples
    ]


def examples_on_tasks(is_quick: Callable[[Row, str], bool] = lambda row, task: True) -> list[Any]:
    """Parameters (text, task) for every example on every task of its row.

    Args:
        is_quick: Whether a method's first example is tried on a task among the quick tests.
    """
    return [
        pytest.param(
            text,
            task,
            id=f"{text}-{task}",
            marks=[] if text == row.examples[0] and is_quick(row, task) else pytest.mark.slow,
        )
        for row in SHIPPED.values()
        for text in row.examples
        for task in row.tasks
    ]
