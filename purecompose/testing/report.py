"""The result of `check`: a table, the violations below it, and the same as plain data."""

import enum
import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from purecompose._support.tables import Toned, columns, fragment, note, preformatted, table, terminal_width
from purecompose.testing.law import LawViolation, Row, labelled


if TYPE_CHECKING:
    from rich.text import Text


class Status(enum.Enum):
    """The status of a law after its trial."""

    KEPT = "kept"
    """The law held in every case, and the algorithm acted in some of them."""
    BROKEN = "broken"
    """The law did not hold."""
    VACUOUS = "vacuous"
    """The algorithm acted in none of the cases, so nothing was judged."""
    BLOCKED = "blocked"
    """The algorithm breaks another law before this one can be judged."""
    ERROR = "error"
    """Another error was raised."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; a violation is represented by its parts."""
        names = ("law", "reason", "promise", "num_cases", "num_acted", "details", "seconds")
        found = {"status": self.status.value, **{name: getattr(self, name) for name in names}}
        violation = self.error
        if isinstance(violation, LawViolation):
            found["violation"] = {
                "event": None if violation.event is None else violation.event.name,
                "path": violation.path,
                "what": violation.what,
                "values": {label: repr(value) for label, value in violation.values.items()},
                "case": repr(violation.case),
                "remedy": violation.law.remedy,
            }
        return found


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
        """The laws to look at first: those that were broken or raised an error, or else all that are not ok."""
        wrong = tuple(o for o in self.outcomes if o.status in (Status.BROKEN, Status.ERROR))
        return wrong or tuple(outcome for outcome in self.outcomes if not outcome.status.is_ok)

    @property
    def summary(self) -> str:
        """One line, such as "ok: 15 laws kept, 3 skipped (12.3 s)"."""
        counts = Counter(outcome.status for outcome in self.outcomes)
        found = [
            f"{num} {status.value}{'s' * (status is Status.ERROR and num > 1)}"
            for status in Status
            if (num := counts[status])
        ]
        num_tasks = len(self.tasks) + len(self.refused)
        refused = [f"refuses {len(self.refused)} of {num_tasks} tasks"] if self.refused else []
        refused += [f"fails on {', '.join(self.failed_tasks)}"] if self.failed_tasks else []
        said = ", ".join([*found, *refused]) or "nothing was tried"
        return f"{'ok' if self.ok else 'NOT OK'}: {said} ({self.seconds:.1f} s)"

    def __getitem__(self, law: str) -> Outcome:
        """Return the outcome of a law, by its name."""
        for outcome in self.outcomes:
            if outcome.law == law:
                return outcome
        raise KeyError(law)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the report as plain text.

        Args:
            width: Number of columns; by default the terminal's, at most 110.
        """
        width = width or terminal_width()
        parts = ["\n".join(labelled(line, width=width) for line in self._head())]
        parts += [table(_HEAD, self._table(), width=width)] if self.outcomes else []
        parts += [labelled(title, rows, width) for title, rows in self._details()]
        return "\n\n".join([*parts, *(labelled(line, width=width) for line in self._advice()), self.summary])

    def __rich__(self) -> "Text":
        from rich.text import Text

        text = Text(str(self))
        for status in Status:
            text.highlight_regex(rf"(?<=  ){_shout(status)}(?=  )", _STYLES[status])
        text.highlight_words([self.summary], "bold green" if self.ok else "bold red")
        return text

    def _repr_html_(self) -> str:
        rows = [
            (name, Toned(result, _TONES[outcome.status]), acted, reason)
            for outcome, (name, result, acted, reason) in zip(self.outcomes, self._table(), strict=True)
        ]
        return fragment(
            *map(note, self._head()),
            *([columns(_HEAD, rows)] if rows else []),
            *(preformatted(labelled(title, rows, _WIDTH)) for title, rows in self._details()),
            *map(note, self._advice()),
            note(self.summary, "good" if self.ok else "bad"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, with the versions that it depends on."""
        return {
            "algorithm": self.algorithm,
            "ok": self.ok,
            "tasks": list(self.tasks),
            "refused": dict(self.refused),
            "max_examples": self.max_examples,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "versions": _versions(),
            "laws": [outcome.to_dict() for outcome in self.outcomes],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent)

    def _head(self) -> list[str]:
        on = f"on {', '.join(self.tasks)}" if self.tasks else "on no task"
        reasons = _grouped((why, name) for name, why in self.refused.items())
        return [f"{self.algorithm} {on}", *(f"not on {', '.join(names)}: {why}" for why, names in reasons.items())]

    def _table(self) -> list[tuple[str, str, str, str]]:
        return [(o.law, _shout(o.status), _acted(o), o.reason) for o in self.outcomes]

    def _details(self) -> list[tuple[str, tuple[Row, ...]]]:
        """Return the titles and rows below the table; equal errors are reported once, with the first case."""
        reported = [outcome for outcome in self.outcomes if outcome.rows and not self._is_reported_elsewhere(outcome)]
        laws = _grouped((_cause(outcome), outcome.law) for outcome in reported)
        first = {_cause(outcome): outcome for outcome in reversed(reported)}
        titles = {cause: o.title.replace(o.law, ", ".join(laws[cause]), 1) for cause, o in first.items()}
        return [(titles[cause], first[cause].rows) for cause in laws]

    def _is_reported_elsewhere(self, outcome: Outcome) -> bool:
        """Return whether the cause that blocks a law is reported with another law."""
        return outcome.status is Status.BLOCKED and bool(self.broken)

    def _advice(self) -> list[str]:
        vacuous = [_VACUOUS] if any(outcome.status is Status.VACUOUS for outcome in self.outcomes) else []
        follows = [f"Start with {self.broken[0].law}: the others may follow from it."] if len(self.broken) > 1 else []
        return [*vacuous, *follows]


_HEAD = ("law", "result", "acted", "")
_STYLES = {
    Status.KEPT: "green",
    Status.BROKEN: "bold red",
    Status.ERROR: "bold red",
    Status.BLOCKED: "yellow",
    Status.VACUOUS: "yellow",
    Status.SKIPPED: "dim",
}
_TONES = {status: "faint" if status is Status.SKIPPED else "good" if status.is_ok else "bad" for status in Status}
_WIDTH = 110
_VACUOUS = (
    "vacuous: where it never acted nothing was judged. Does match say yes at an event of the step, early in a short "
    "run? More cases (max_examples, --max-examples) or other tasks may help."
)


def _grouped(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """Return the names that belong to each key, in order."""
    found: dict[Any, list[str]] = {}
    for key, name in pairs:
        found.setdefault(key, []).append(name)
    return found


def _cause(outcome: Outcome) -> Any:
    """Return a key that is equal for equal errors in the same lines, independent of the case and law."""
    if outcome.status not in (Status.ERROR, Status.BLOCKED):
        return outcome.law
    return tuple(row for row in outcome.rows if row[0] in ("raised", "line", "breaks"))


def _shout(status: Status) -> str:
    """Return a status as text, in capitals if it is not ok, because a terminal may have no colours."""
    return status.value if status.is_ok else status.value.upper()


def _acted(outcome: Outcome) -> str:
    has_acted = outcome.num_cases and outcome.status is not Status.BLOCKED
    return f"{outcome.num_acted}/{outcome.num_cases}" if has_acted else ""


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("purecompose")
    except importlib.metadata.PackageNotFoundError:  # run from a folder that was not installed
        own = "unknown"
    return {"purecompose": own, "torch": str(torch.__version__), "python": platform.python_version()}
