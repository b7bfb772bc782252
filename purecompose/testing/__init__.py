"""The laws of the library, to try on your own algorithms: strategies, laws, and a report on any algorithm.

    from purecompose.testing import check, laws
    print(check(my_algorithm))           # or: python -m purecompose check my_module:my_algorithm

    @laws(my_algorithm)                  # a test for each law
    def test_my_algorithm(): ...

Needs Hypothesis: `pip install "purecompose[testing]"`.
"""

from purecompose._support import publish
from purecompose.testing import strategies as strategies, suite as suite
from purecompose.testing.case import COMPANIONS as COMPANIONS, Case as Case, Subject as Subject
from purecompose.testing.checking import check as check, check_loss as check_loss, laws as laws
from purecompose.testing.law import (
    Broken as Broken,
    Law as Law,
    LawViolation as LawViolation,
    NotJudged as NotJudged,
    acts_in_step as acts_in_step,
    define_law as define_law,
    never_acts as never_acts,
)
from purecompose.testing.record import compare as compare, run as run
from purecompose.testing.report import Outcome as Outcome, Report as Report, Status as Status
from purecompose.testing.suite import LAWS as LAWS
from purecompose.testing.tasks import TASKS as TASKS, Task as Task, make_task as make_task


publish(__name__)
