"""Every mutant is found out by the law named for it, and every law has mutants: else it would be no law."""

from collections import Counter

import pytest

from purecompose.testing import LAWS, MUTANTS, check


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.breaks}-{mutant.name}")
def test_a_mutant_is_found_out_by_its_law(mutant):
    report = check(mutant.source, laws=[mutant.breaks], tasks=[mutant.task], neutral=mutant.source)
    outcome = report[mutant.breaks]
    assert [broken.law for broken in report.broken] == [mutant.breaks], outcome
    # Enough for its author to go on: what was promised, whose algorithm, where or what, and the way out.
    for part in ("is broken:", "algorithm", "case", "to do"):
        assert part in outcome.details
    assert any(part in outcome.details for part in ("leaf", "found"))


def test_every_law_has_mutants_and_every_mutant_has_a_law_and_a_name():
    assert {mutant.breaks for mutant in MUTANTS} == {law.name for law in LAWS}
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert all(mutant.make.__doc__ for mutant in MUTANTS)
