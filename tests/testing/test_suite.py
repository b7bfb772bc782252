"""What all laws have in common."""

import pytest

from purecompose.core.algorithm import Algorithm, identity
from purecompose.testing.case import COMPANIONS, Case
from purecompose.testing.law import Law
from purecompose.testing.suite import LAWS, absent_when_unmatched, neutral_setting
from purecompose.testing.tasks import TASKS


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_an_algorithm_that_never_acts_is_exempt_or_gives_no_evidence(law: Law) -> None:
    assert (law.exempt(identity()) is None) == (law is neutral_setting)
    if law not in (absent_when_unmatched, neutral_setting):
        assert law(Algorithm("idle", lambda event, state: False, lambda event, state: state), Case()) is False


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("name", COMPANIONS)
def test_the_companions_keep_all_laws(name: str, law: Law) -> None:
    algorithm = COMPANIONS[name](name)
    if law.exempt(algorithm) is None and law is not neutral_setting:
        law(algorithm, Case(TASKS["images"], num_batches=2))
