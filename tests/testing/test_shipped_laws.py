"""Every shipped algorithm keeps every law; `purecompose.testing.SHIPPED` is the table."""

import pytest

from purecompose.testing import LAWS, SHIPPED, Status, check


EXAMPLES = [(row, source) for row in SHIPPED.values() for source in row.examples]
each_example = pytest.mark.parametrize(("row", "source"), EXAMPLES, ids=[source for _, source in EXAMPLES])
each_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)


@each_law
@each_example
def test_a_shipped_algorithm_keeps_a_law(row, source, law):
    report = check(source, neutral=row.neutral, tasks=row.tasks, laws=[law], max_examples=5)
    assert report.ok, str(report)


@pytest.mark.slow
@each_law
@each_example
def test_a_shipped_algorithm_keeps_a_law_in_many_cases(row, source, law):
    report = check(source, neutral=row.neutral, tasks=row.tasks, laws=[law], max_examples=100, seed=1)
    assert report.ok, str(report)
    assert report[law.name].status in (Status.KEPT, Status.SKIPPED)
