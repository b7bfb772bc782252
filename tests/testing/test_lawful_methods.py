"""No law reports a lawful method, and a few cases are enough for a verdict: `check` returns ok."""

import pytest

from purecompose.testing import LAWS, check
from tests.sampling import one_in
from tests.testing.lawful_methods import LAWFUL


WHOLE = ("adversarial_inputs",)
"""Methods that compute whole tensors, which torch refuses to mix with divided ones, as `shards_agree` says."""


def _blamed(name: str, max_examples: int) -> list[str]:
    _, tasks = LAWFUL[name]
    laws = [law for law in LAWS if name not in WHOLE or law.name != "shards_agree"]
    report = check(f"tests.testing.lawful_methods:{name}", max_examples=max_examples, tasks=tasks, laws=laws)
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
