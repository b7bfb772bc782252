"""Every shipped algorithm keeps every law; `purecompose.testing.SHIPPED` is the table."""

import functools

import pytest

from purecompose.testing import LAWS, SHIPPED, Status
from purecompose.testing.checking import trials


EXAMPLES = [(row.name, source) for row in SHIPPED.values() for source in row.examples]
each_example = pytest.mark.parametrize(("name", "source"), EXAMPLES, ids=[source for _, source in EXAMPLES])
each_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)


@functools.cache  # which tasks an algorithm accepts is tried out once, not for each law
def trials_of(name, source, max_examples, seed):
    row = SHIPPED[name]
    return trials(source, neutral=row.neutral, tasks=row.accepted, max_examples=max_examples, seed=seed)


def check_kept(law, prepared):
    assert not prepared.failed_tasks, prepared.refused
    outcome = prepared.judge(law)
    assert outcome.status in (Status.KEPT, Status.SKIPPED), f"{outcome.reason}\n{outcome.details}"


@each_example
@each_law
def test_a_shipped_algorithm_keeps_a_law(name, source, law):
    check_kept(law, trials_of(name, source, max_examples=3, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize(("max_examples", "seed"), [(25, 0), (100, 1)], ids=["as by default", "more"])
@each_example
@each_law
def test_a_shipped_algorithm_keeps_a_law_in_many_cases(name, source, law, max_examples, seed):
    check_kept(law, trials_of(name, source, max_examples, seed))
