"""What `check` found: a table, the violations below it, and the same as plain data."""

import enum
import importlib.metadata
import json
import platform
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from purecompose._table import table
from purecompose.testing.law import LawViolation


if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Outcome", "Report", "Status"]

_WIDEST = 120


class Status(enum.Enum):
    """How a law came out."""

    KEPT = "kept"
    """It held in every case, and the algorithm acted in some of them."""
    BROKEN = "broken"
    """It did not hold."""
    VACUOUS = "vacuous"
    """The algorithm acted in none of the cases, so nothing was judged."""
    BLOCKED = "blocked"
    """The algorithm breaks another law before this one can be judged."""
    ERROR = "error"
    """Something else was raised."""
    SKIPPED = "skipped"
    """It does not concern the algorithm, or what it needs was not given."""

    @property
    def is_ok(self) -> bool:
        """Whether a report with this outcome may be ok."""
        return self in (Status.KEPT, Status.SKIPPED)


@dataclass(frozen=True)
class Outcome:
    """One law's outcome.

    Args:
        law: The law's name.
        status: How it came out.
        reason: Why, in a line; empty for a law that was kept.
        promise: What the law says.
        examples: Cases that were generated, not counting those of shrinking.
        acted: In how many of them the algorithm acted.
        details: The full text of a violation or an error.
        error: The `LawViolation`, or what else was raised.
        seconds: How long it took.
    """

    law: str
    status: Status
    reason: str = ""
    promise: str = ""
    examples: int = 0
    acted: int = 0
    details: str = ""
    error: Exception | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a violation is given by its parts."""
        names = ("law", "reason", "promise", "examples", "acted", "details", "seconds")
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


@dataclass(frozen=True)
class Report:
    """The outcomes of all laws for one algorithm; prints as a table with the violations below it.

    Args:
        algorithm: The algorithm, as it prints.
        outcomes: One for each law, in the laws' order.
        tasks: The names of the tasks that the algorithm was tried on.
        refused: Why it was not tried on others.
        tasks_were_named: Whether the user named the tasks, so that a refusal is a failure.
        max_examples: Cases for each law.
        seed: Of the cases.
        seconds: How long it took in all.
    """

    algorithm: str
    outcomes: tuple[Outcome, ...]
    tasks: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    tasks_were_named: bool = False
    max_examples: int = 25
    seed: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every law that applies was kept, on at least one task and on all that were named."""
        return bool(self.tasks) and not self._fatal_refusals and all(o.status.is_ok for o in self.outcomes)

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """The laws that were broken."""
        return tuple(outcome for outcome in self.outcomes if outcome.status is Status.BROKEN)

    @property
    def summary(self) -> str:
        """One line, such as "ok: 15 laws kept, 3 skipped (12.3 s)"."""
        counts = Counter(outcome.status for outcome in self.outcomes)
        found = [f"{counts[status]} {_counted(status, counts[status])}" for status in Status if counts[status]]
        refused = [f"refuses {', '.join(self._fatal_refusals)}"] if self._fatal_refusals else []
        said = ", ".join([*found, *refused]) or "nothing was tried"
        return f"{'ok' if self.ok else 'NOT OK'}: {said} ({self.seconds:.1f} s)"

    def __getitem__(self, law: str) -> Outcome:
        """The outcome of a law, by its name."""
        for outcome in self.outcomes:
            if outcome.law == law:
                return outcome
        raise KeyError(law)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The report for any terminal.

        Args:
            width: Columns; by default the terminal's, at most 120.
        """
        width = width or min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
        parts = ["\n".join(_wrapped(line, width) for line in self._head())]
        if self.outcomes:
            rows = [(o.law, _shout(o.status), _acted(o), o.reason) for o in self.outcomes]
            parts.append(table(_HEAD, rows, width=width))
        parts += [_wrapped(text, width) for text in self._details()]
        return "\n\n".join([*parts, self.summary])

    def __rich__(self) -> "Group":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        head = [Text(line) for line in self._head()]
        head[0].stylize("bold")
        grid = Table(*_HEAD, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for outcome in self.outcomes:
            style = _STYLES[outcome.status]
            result = Text(_shout(outcome.status), style=style)
            grid.add_row(outcome.law, result, _acted(outcome), Text(outcome.reason))
        details = [renderable for text in self._details() for renderable in (Text(), *_coloured(text))]
        summary = Text(self.summary, style="bold green" if self.ok else "bold red")
        return Group(*head, Text(), *([grid] if self.outcomes else []), *details, Text(), summary)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, with the versions that it depends on."""
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
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent)

    @property
    def _fatal_refusals(self) -> tuple[str, ...]:
        return tuple(self.refused) if self.tasks_were_named or not self.tasks else ()

    def _head(self) -> list[str]:
        on = f"on {', '.join(self.tasks)}" if self.tasks else "on no task"
        return [f"{self.algorithm} {on}", *(f"not on {name}: {why}" for name, why in self.refused.items())]

    def _details(self) -> list[str]:
        """The texts below the table; what is the same but for the law, such as a plain error, is told once."""
        laws: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            if outcome.details:
                laws.setdefault(outcome.details.replace(outcome.law, "{}", 1), []).append(outcome.law)
        return [text.replace("{}", ", ".join(names), 1) for text, names in laws.items()]


_HEAD = ("law", "result", "acted", "")
_STYLES = {
    Status.KEPT: "green",
    Status.BROKEN: "bold red",
    Status.ERROR: "bold red",
    Status.BLOCKED: "yellow",
    Status.VACUOUS: "yellow",
    Status.SKIPPED: "dim",
}


def _counted(status: Status, count: int) -> str:
    return "errors" if status is Status.ERROR and count > 1 else status.value


def _shout(status: Status) -> str:
    """In capitals where something is to be done: a terminal may have no colours."""
    return status.value if status.is_ok else status.value.upper()


def _acted(outcome: Outcome) -> str:
    return f"{outcome.acted}/{outcome.examples}" if outcome.examples and outcome.status is not Status.BLOCKED else ""


def _parts(line: str) -> tuple[str, str]:
    """A line's label with the space around it, and the rest; the label may be empty."""
    match = re.match(r"  \S.*?\s{2,}", line) or re.match(r"\s*", line)
    assert match is not None
    return match[0], line[match.end() :]


def _wrapped(text: str, width: int) -> str:
    """Long lines broken, and hung under what stands behind their label."""
    lines = []
    for line in text.splitlines():
        label, rest = _parts(line)
        hang = " " * (len(label) or 2)
        wrapped = textwrap.wrap(rest, max(width - len(hang), 20), break_on_hyphens=False) or [""]
        first = f"{label}{wrapped[0]}"
        lines += [first.rstrip(), *(f"{hang}{part}" for part in wrapped[1:])]
    return "\n".join(lines)


def _coloured(text: str) -> Iterable[Any]:
    """A violation for rich: the first line bold, labels dim."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    title, *lines = text.splitlines()
    yield Text(title, style="bold red")
    grid = Table.grid(padding=(0, 2, 0, 0))
    for line in lines:
        label, rest = _parts(line)
        grid.add_row(Text(label.strip(), style="dim"), Text(rest, style="bold" if label.strip() == "to do" else ""))
    yield Padding(grid, (0, 0, 0, 2))


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("purecompose")
    except importlib.metadata.PackageNotFoundError:  # run from a folder that was not installed
        own = "unknown"
    return {"purecompose": own, "torch": str(torch.__version__), "python": platform.python_version()}
