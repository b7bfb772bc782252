"""The result of `check`: a table, the violations below it, and the same as plain data."""

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from purecompose._support.messages import fragment, preformatted, table, terminal_width
from purecompose.testing.law import Row, labelled


class Status(enum.Enum):
    """The status of a law after its trial."""

    KEPT = "kept"
    """The law held in every case, and the algorithm acted in some of them."""
    BROKEN = "broken"
    """The law did not hold."""
    VACUOUS = "vacuous"
    """The algorithm acted in none of the cases, so nothing was judged."""
    ERROR = "error"
    """An error was raised, such as that the algorithm breaks another law."""
    SKIPPED = "skipped"
    """The law does not concern the algorithm, cannot judge it, or needs something that was not given."""

    @property
    def is_ok(self) -> bool:
        """True if a report with this outcome may be ok."""
        return self in (Status.KEPT, Status.SKIPPED)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one law.

    Args:
        law: Name of the law.
        status: Status of the law.
        reason: Reason for the status, in a line; for a law that was kept, why it could not judge some of the cases.
        promise: The law as a sentence.
        num_cases: Number of cases that were tried, without those of shrinking.
        num_acted: Number of these cases in which the algorithm acted.
        rows: Details of a violation or an error, each with a label.
        error: The `LawViolation`, or another error.
        seconds: Duration of the trial in seconds.
    """

    law: str
    status: Status
    reason: str = ""
    promise: str = ""
    num_cases: int = 0
    num_acted: int = 0
    rows: tuple[Row, ...] = ()
    error: Exception | None = None
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """The first line of `details`."""
        if self.status is Status.BROKEN:
            return f"the law {self.law} is broken: {self.promise}"
        return f"{self.law} could not be tried"

    @property
    def details(self) -> str:
        """The full text of a violation or an error; empty for other outcomes."""
        return labelled(self.title, self.rows) if self.rows else ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcomes of all laws for one algorithm; prints as a table with the violations below it.

    Args:
        algorithm: The algorithm's `repr`.
        outcomes: The outcome of each law, in the laws' order.
        tasks: Names of the tasks that the algorithm was tried on.
        refused: Reasons why it was not tried on other tasks, by name.
        failed_tasks: The refused tasks that the user chose, or on which it fails with an unintended error; all if no
            task is left.
        max_examples: Number of cases for each law.
        seed: Seed of the cases.
        seconds: Total duration in seconds.
    """

    algorithm: str
    outcomes: tuple[Outcome, ...] = ()
    tasks: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    failed_tasks: tuple[str, ...] = ()
    max_examples: int = 25
    seed: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if every law that applies was kept, on at least one task and on all that were chosen."""
        return bool(self.tasks) and not self.failed_tasks and all(o.status.is_ok for o in self.outcomes)

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """The laws that were broken."""
        return tuple(outcome for outcome in self.outcomes if outcome.status is Status.BROKEN)

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The laws that are not ok."""
        return tuple(outcome for outcome in self.outcomes if not outcome.status.is_ok)

    @property
    def summary(self) -> str:
        """One line, such as "ok: 15 kept, 3 skipped (12.3 s)"."""
        counts = Counter(outcome.status for outcome in self.outcomes)
        found = [f"{counts[status]} {status.value}" for status in Status if counts[status]]
        num_tasks = len(self.tasks) + len(self.refused)
        found += [f"refuses {len(self.refused)} of {num_tasks} tasks"] if self.refused else []
        found += [f"fails on {', '.join(self.failed_tasks)}"] if self.failed_tasks else []
        said = ", ".join(found) or "nothing was tried"
        return f"{'ok' if self.ok else 'NOT OK'}: {said} ({self.seconds:.1f} s)"

    def __getitem__(self, law: str) -> Outcome:
        """Return the outcome of a law, by its name."""
        for outcome in self.outcomes:
            if outcome.law == law:
                return outcome
        raise KeyError(law)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return str(self)

    def text(self, width: int | None = None) -> str:
        """Return the report as plain text.

        Args:
            width: Number of columns; by default the terminal's, at most 110.
        """
        width = width or terminal_width()
        on = f"on {', '.join(self.tasks)}" if self.tasks else "on no task"
        names: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            names.setdefault(why, []).append(name)
        head = [f"{self.algorithm} {on}", *(f"not on {', '.join(those)}: {why}" for why, those in names.items())]
        # In capitals if it is not ok.
        rows = [
            (
                outcome.law,
                outcome.status.value if outcome.status.is_ok else outcome.status.value.upper(),
                f"{outcome.num_acted}/{outcome.num_cases}" if outcome.num_cases else "",
                outcome.reason,
            )
            for outcome in self.outcomes
        ]
        advice = [_VACUOUS] if any(outcome.status is Status.VACUOUS for outcome in self.outcomes) else []
        if len(self.broken) > 1:
            advice.append(f"Start with {self.broken[0].law}: the others may follow from it.")
        return "\n\n".join(
            [
                "\n".join(labelled(line, width=width) for line in head),
                *([table(("law", "result", "acted", ""), rows, width=width)] if rows else []),
                *(labelled(title, details, width) for title, details in self._details()),
                *(labelled(line, width=width) for line in advice),
                self.summary,
            ]
        )

    def _repr_html_(self) -> str:
        return fragment(preformatted(str(self)))

    def _details(self) -> list[tuple[str, tuple[Row, ...]]]:
        """Return the titles and rows below the table; equal errors are reported once, with the first case."""
        found: dict[Any, tuple[list[str], Outcome]] = {}
        for outcome in self.outcomes:
            is_error = outcome.status is Status.ERROR
            cause = tuple(row for row in outcome.rows if row[0] in ("raised", "line")) if is_error else outcome.law
            if outcome.rows:
                found.setdefault(cause, ([], outcome))[0].append(outcome.law)
        return [(first.title.replace(first.law, ", ".join(laws), 1), first.rows) for laws, first in found.values()]


_VACUOUS = (
    "vacuous: where it never acted nothing was judged. Does match say yes at an event of the step, early in a short "
    "run? More cases (max_examples, --max-examples) or other tasks may help."
)
