"""Realistic wrong methods: each is detected by the law about its mistake."""

import pytest

from purecompose.testing import LAWS, LawViolation, check
from tests.testing.wrong_methods import WRONG


# The law `memory_bounded`, which needs hundreds of steps, takes as long as all others.
QUICK = [wrong for wrong in WRONG if wrong.breaks != "memory_bounded"][::6]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(wrong, id=f"{wrong.breaks}-{wrong.name}", marks=[] if wrong in QUICK else pytest.mark.slow)
        for wrong in WRONG
    ],
)
def test_a_wrong_method_is_found_by_its_law(wrong):
    outcome = check(wrong.source, laws=[wrong.breaks], tasks=[wrong.task], neutral=wrong.source)[wrong.breaks]
    assert isinstance(outcome.error, LawViolation), outcome
    assert wrong.name in outcome.details and (
        outcome.error.event is None or outcome.error.event.name in outcome.details
    )


def test_the_table_is_large_and_describes_every_mistake():
    assert len({wrong.name for wrong in WRONG}) == len(WRONG) >= 60
    assert all(wrong.make.__doc__ for wrong in WRONG)
    assert {wrong.breaks for wrong in WRONG} <= {law.name for law in LAWS}
