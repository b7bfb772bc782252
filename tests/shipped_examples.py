"""Examples of the shipped methods for tests: the first of each on its first task is quick, the others are slow."""

from typing import Any

import pytest
import torch

from purecompose.testing.tasks import TASKS
from tests.shipped import SHIPPED


__all__ = ["computes_in_half", "examples", "examples_on_tasks"]


def examples() -> list[Any]:
    """Return parameters (row, text) for every example."""
    return [
        pytest.param(row, text, id=text, marks=[] if text == row.examples[0] else pytest.mark.slow)
        for row in SHIPPED.values()
        for text in row.examples
    ]


def computes_in_half(task: str) -> bool:
    """Return whether a task's weights or its forward pass are in half precision."""
    return TASKS[task].is_half or TASKS[task].dtype in (torch.bfloat16, torch.float16)


def examples_on_tasks(*, quick: int = 1) -> list[Any]:
    """Return parameters (text, task) for every example on every task of its row.

    Args:
        quick: One in `quick` methods is among the quick tests.
    """
    return [
        pytest.param(
            text,
            task,
            id=f"{text}-{task}",
            marks=[] if number % quick == 0 and (text, task) == (row.examples[0], row.tasks[0]) else pytest.mark.slow,
        )
        for number, row in enumerate(SHIPPED.values())
        for text in row.examples
        for task in row.tasks
    ]
