"""No law reports a lawful method, and a few cases are enough for a verdict: `check` returns ok."""

import pytest

from purecompose.testing import check
from tests.sampling import one_in
from tests.testing.lawful_methods import LAWFUL


def _blamed(name: str, max_examples: int) -> list[str]:
    factory, tasks = LAWFUL[name]
    report = check(factory(), max_examples=max_examples, tasks=tasks)
    assert report.tasks == tasks, report.refused
    return [
        f"{found.law} {found.status.value}: {found.reason}\n{found.details}"
        for found in report.outcomes
        if not (report.ok or found.status.is_ok)
    ]


@pytest.mark.parametrize("name", one_in(100, LAWFUL))
def test_a_lawful_method_is_ok(name):
    assert _blamed(name, 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWFUL)
def test_a_lawful_method_is_ok_in_many_cases(name):
    assert _blamed(name, 25) == []
