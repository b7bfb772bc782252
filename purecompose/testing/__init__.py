"""The laws of the library, to try on your own algorithms: strategies, laws, and a report on any algorithm.

    from purecompose.testing import check, laws
    print(check(my_algorithm))           # or: python -m purecompose check my_module:my_algorithm

    @laws(my_algorithm)                  # a test for each law
    def test_my_algorithm(): ...

Needs Hypothesis: `pip install "purecompose[testing]"`.
"""

from purecompose.testing import strategies, suite
from purecompose.testing.case import COMPANIONS, Case
from purecompose.testing.checking import CheckOptions, check, check_loss, laws
from purecompose.testing.law import Broken, Law, LawViolation, NotJudged, acts_in_step, define_law, never_acts
from purecompose.testing.order import (
    Commutation,
    Conflicts,
    Meeting,
    OrderOptions,
    OrderWarning,
    commutes,
    conflicts,
    warn_of_conflicts,
)
from purecompose.testing.record import compare, intercepted, run
from purecompose.testing.report import Outcome, Report, Status
from purecompose.testing.shipped import SHIPPED
from purecompose.testing.subject import Subject
from purecompose.testing.suite import LAWS
from purecompose.testing.tasks import TASKS, Task, make_task


__all__ = [
    "Broken",
    "COMPANIONS",
    "Case",
    "CheckOptions",
    "Commutation",
    "Conflicts",
    "LAWS",
    "Law",
    "LawViolation",
    "Meeting",
    "NotJudged",
    "OrderOptions",
    "OrderWarning",
    "Outcome",
    "Report",
    "SHIPPED",
    "Status",
    "Subject",
    "TASKS",
    "Task",
    "acts_in_step",
    "check",
    "check_loss",
    "commutes",
    "compare",
    "conflicts",
    "define_law",
    "intercepted",
    "laws",
    "make_task",
    "never_acts",
    "run",
    "strategies",
    "suite",
    "warn_of_conflicts",
]
