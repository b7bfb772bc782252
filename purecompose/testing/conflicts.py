"""Pairs of algorithms that do not commute, and the rules that decide their order."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

from purecompose._support.tables import table, terminal_width
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.loop import loop_events
from purecompose.core.operation import walk
from purecompose.core.passes import DEFAULT_PASSES, Pass, order_by_constraints, precedes, run_pass
from purecompose.testing.order import Commutation, OrderOptions, commutes, meeting_events
from purecompose.testing.rows import plain
from purecompose.testing.subject import Subject
from purecompose.time.event import Event


if TYPE_CHECKING:
    from rich.text import Text


Composed = TypeVar("Composed", Step, Iterable[Algorithm])

_LEGEND = (
    (".  commute    ", "<  row acts before column", "!  do not commute, and only the order of the list decides"),
    ("-  never meet ", ">  row acts after column ", "?  no generated case gave an answer"),
)


class OrderWarning(UserWarning):
    """Two algorithms do not commute, and only the order of a list decides which acts first."""


class Meeting(NamedTuple):
    """A pair at an event where both may act."""

    event: Event
    """The event."""
    order: tuple[str, str]
    """The names in the order in which they act."""
    decided_by: str | None
    """The constraint or pass that decides the order, whichever is listed first; `None` if the list does."""
    commutation: Commutation
    """The answer to whether the order matters."""

    @property
    def is_open(self) -> bool:
        """True if the order matters and only the list decides it."""
        return self.commutation.commutes is False and self.decided_by is None


@dataclass(frozen=True, repr=False)
class Conflicts:
    """The result of `conflicts`; `str` shows the matrix of pairs and the list of those that do not commute."""

    algorithms: tuple[str, ...]
    """The names, as listed."""
    meetings: tuple[Meeting, ...]
    """Each pair at each event where both may act."""

    @property
    def conflicting(self) -> tuple[Meeting, ...]:
        """The meetings of pairs that do not commute."""
        return tuple(meeting for meeting in self.meetings if meeting.commutation.commutes is False)

    @property
    def undecided(self) -> tuple[Meeting, ...]:
        """The meetings of pairs that do not commute and whose order only the list decides."""
        return tuple(meeting for meeting in self.meetings if meeting.is_open)

    @property
    def unknown(self) -> tuple[Meeting, ...]:
        """The meetings for which no generated case shows whether the pair commutes."""
        return tuple(meeting for meeting in self.meetings if meeting.commutation.commutes is None)

    def cell(self, row: str, column: str) -> str:
        """Return the matrix's entry for two names: one mark, or several where events differ.

        `.`: they commute. `-`: they never meet. `<` or `>`: they do not commute, and the row acts before or after the
        column. `!`: they do not commute, and only the list decides. `?`: no answer. Empty for a name and itself.
        """
        met = [meeting for meeting in self.meetings if set(meeting.order) == {row, column}]
        if row == column:
            return ""
        marks = {_mark(meeting, row) for meeting in met}
        return "".join(mark for mark in "!<>?" if mark in marks) or ("." if met else "-")

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the result as plain text.

        Args:
            width: Number of columns; by default the terminal's, at most 110.
        """
        if not self.algorithms:
            return "no algorithms"
        width = width or terminal_width()
        parts = [table(*self._matrix(), width=width), _legend(width)]
        if self.conflicting:
            parts.append(table(_HEAD, self._decisions(), width=width))
        else:
            parts.append("no conflict found, but some gave no answer" if self.unknown else "they all commute")
        parts += [
            plain(f"{' and '.join(m.order)} do not commute at {m.event.name}", m.commutation.rows, width)
            for m in self.conflicting
        ]
        parts += [plain(str(meeting.commutation), (), width) for meeting in self.unknown]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return f"Conflicts({', '.join(self.algorithms)}; conflicting: {len(self.conflicting)})"

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(str(self))

    def _matrix(self) -> tuple[list[str], list[list[str]]]:
        numbers = [str(number) for number in range(1, len(self.algorithms) + 1)]
        rows = [
            [number, name, *(self.cell(name, other) for other in self.algorithms)]
            for number, name in zip(numbers, self.algorithms, strict=True)
        ]
        return ["", "algorithm", *numbers], rows

    def _decisions(self) -> list[list[str]]:
        return [[m.event.name, " < ".join(m.order), m.decided_by or self._listing(m)] for m in self.conflicting]

    def _listing(self, meeting: Meeting) -> str:
        first, second = map(self.algorithms.index, meeting.order)
        return f"only the list ({'listed so' if first < second else 'listed, reversed'})"


_HEAD = ["event", "order", "decided by"]


def conflicts(
    algorithms: Iterable[Algorithm | Subject | str],
    *,
    passes: Iterable[Pass] = DEFAULT_PASSES,
    **options: Unpack[OrderOptions],
) -> Conflicts:
    """Try all pairs of a list at all events where both may act; see `commutes` for the settings.

    Each pair is tried without the others, with the events in the order of `loop_events`. If the passes drop one of a
    pair, it does not meet.

    Args:
        algorithms: Algorithms, or texts as for `Subject.of`, with different names.
        passes: The passes of the intended step.
        options: `tasks`, `tolerance=1e-6`, `max_examples=25` and `seed=0`, as for `commutes`.

    Raises:
        TypeError, ValueError: Two algorithms have the same name, or there is no such algorithm or task.
        OrderError: Constraints contradict each other.

    Example:
        >>> found = conflicts(["mixup(0)", "label_smoothing(0)"])  # neutral settings: neither ever acts
        >>> print(found.text(width=110))
           algorithm        1  2
        -  ---------------  -  -
        1  mixup               -
        2  label_smoothing  -
        <BLANKLINE>
        .  commute        <  row acts before column    !  do not commute, and only the order of the list decides
        -  never meet     >  row acts after column     ?  no generated case gave an answer
        <BLANKLINE>
        they all commute
    """
    listed, ordering = [Subject.of(given).algorithm for given in algorithms], tuple(passes)
    names = tuple(algorithm.name for algorithm in listed)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"the name {twice[0]!r} is used twice; give one another: mixup(..., name='other')")
    meetings = []
    for a, b in combinations(listed, 2):
        for event in meeting_events(a, b):
            decision = _decide(a, b, event, ordering)
            if decision is not None:
                meetings.append(Meeting(event, *decision, commutes(a, b, event, **options)))
    return Conflicts(names, tuple(meetings))


def warn_of_conflicts(composed: Composed, **settings: Any) -> Composed:
    """Warn of each pair that does not commute and whose order only the list decides, while composing.

    Args:
        composed: A step, or a list of algorithms for a step with the default passes.
        settings: Options of `conflicts`.

    Returns:
        The step or the algorithms, as given.

    Example:
        >>> from purecompose import algorithms as alg, compose, loop_events
        >>> warn_of_conflicts(compose(loop_events, [alg.label_smoothing(0.1)]))
        Step(label_smoothing(smoothing=0.1))
    """
    if isinstance(composed, Step):
        algorithms, settings = composed.algorithms, {"passes": composed.passes, **settings}
        absent = {node for node in walk(loop_events) if isinstance(node, Event)} - set(composed.events)
    else:
        composed = tuple(composed) if not isinstance(composed, Sequence) else composed  # pyright: ignore
        algorithms, absent = composed, set()
    for meeting in conflicts(algorithms, **settings).undecided:
        if meeting.event not in absent:
            warnings.warn(_advice(meeting), OrderWarning, stacklevel=2)
    return composed


def _advice(meeting: Meeting) -> str:
    first, second = meeting.order
    return (
        f"{first} and {second} do not commute at {meeting.event.name}, and only the order of the list decides that "
        f"{first} comes first there. They differ in {meeting.commutation.difference}. Decide it by a constraint, "
        f"runs_before=({second!r},) on {first} or runs_after=({first!r},) on {second} (or the other way round); or by "
        "a pass, a function (algorithms, event) -> algorithms in compose(..., passes=(*DEFAULT_PASSES, my_pass))"
    )


def _decide(
    a: Algorithm, b: Algorithm, event: Event, passes: tuple[Pass, ...]
) -> tuple[tuple[str, str], str | None] | None:
    """Return the order of a pair at an event and the rule that decides it; `None` if the passes drop one of them."""
    listed, reverse = (a, b), (b, a)
    decided_by: str | None = None
    for one_pass in passes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # passes warn when the step itself is composed
            listed, reverse = (_pair(run_pass(one_pass, given, event), a, b) for given in (listed, reverse))
        if len(listed) < 2 or len(reverse) < 2:
            return None
        if listed != reverse:
            decided_by = None
        elif decided_by is None:
            decided_by = getattr(one_pass, "__name__", repr(one_pass))
    first, second = listed
    if decided_by is not None and order_by_constraints in passes and precedes(first, second):
        decided_by = f"constraint: {first.name} before {second.name}"
    return (first.name, second.name), decided_by


def _pair(ordered: Sequence[Algorithm], a: Algorithm, b: Algorithm) -> tuple[Algorithm, ...]:
    """Return the pair from the result of a pass, in its order."""
    return tuple(algorithm for algorithm in ordered if algorithm in (a, b))


def _legend(width: int) -> str:
    """Return the legend in two lines or, if they are too long, with a line for each mark."""
    lines = ["    ".join(row) for row in _LEGEND]
    if max(map(len, lines)) > width:
        lines = [mark.rstrip() for column in zip(*_LEGEND, strict=True) for mark in column]
    return "\n".join(lines)


def _mark(meeting: Meeting, row: str) -> str:
    if meeting.commutation.commutes is None:
        return "?"
    if meeting.commutation.commutes:
        return "."
    if meeting.is_open:
        return "!"
    return "<" if meeting.order[0] == row else ">"
