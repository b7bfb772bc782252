"""Every wrong method is detected by the law about its mistake; and every law has some that break it."""

import pytest

from purecompose.testing import LAWS, LawViolation, check
from tests.testing.mutants import MUTANTS
from tests.testing.wrong_methods import WRONG


LAW = {law.name: law for law in LAWS}
LONG = "root_of_what_is_left averages_in_closure"
QUICK = [*{wrong.breaks: wrong for wrong in reversed(MUTANTS) if wrong.name not in LONG}.values(), *WRONG[::6]]
"""The first mutant of each law, without two that take seconds, and some of the others."""


@pytest.mark.filterwarnings("ignore:forward changed:UserWarning")  # a mutant registers hooks on purpose
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(wrong, id=f"{wrong.breaks}-{wrong.name}", marks=[] if wrong in QUICK else pytest.mark.slow)
        for wrong in [*MUTANTS, *WRONG]
    ],
)
def test_a_mutant_is_detected_by_its_law_at_an_event_of_the_mistake(wrong):
    report = check(wrong.source, laws=[wrong.breaks], tasks=[wrong.task], neutral=wrong.source)
    outcome = report[wrong.breaks]
    violation = outcome.error
    assert isinstance(violation, LawViolation), outcome
    assert violation.event in (None, *wrong().events)
    # The author needs the algorithm's name, the case, the values or the reason why there are none, and the remedy.
    assert violation.values or violation.what
    event = violation.event.name if violation.event else ""
    for part in (wrong.name, event, violation.path, repr(violation.case), LAW[wrong.breaks].remedy):
        assert part in outcome.details


def test_every_law_has_mutants_and_every_mutant_describes_its_mistake():
    every = [*MUTANTS, *WRONG]
    assert {wrong.breaks for wrong in every} == LAW.keys()
    assert len({wrong.name for wrong in every}) == len(every)
    assert all(wrong.make.__doc__ for wrong in every)
