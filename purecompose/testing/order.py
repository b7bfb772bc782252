"""Whether the order of two algorithms matters, decided on generated cases.

Two algorithms commute at an event if a training run ends the same whichever of them comes first there. Both orders
are run with everything else in place, in float64, so that rounding does not look like a conflict.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.testing.case import Case
from purecompose.testing.pair_search import Findings, PairSearch
from purecompose.testing.subject import Subject
from purecompose.testing.tasks import TASKS, Task


__all__ = ["Commutation", "commutes", "meeting_events"]


@dataclass(frozen=True)
class Commutation:
    """The answer of `commutes`; true if the two commute, and as text a reason."""

    algorithms: tuple[str, str]
    """The two names, in alphabetical order."""
    commutes: bool | None
    """`None` where no generated case gave an answer."""
    events: tuple[Event, ...]
    """What the answer is about: all events at which both may act, or the one at which they do not commute."""
    examples: int
    """How many generated cases let both act and gave an answer, up to the first that differs."""
    reason: str = ""
    """Why there is nothing to compare, or no answer."""
    counterexample: Case | None = None
    """The simplest case found in which the order matters."""
    path: str = ""
    """The key path of the first difference, such as "params['0.weight']"."""
    what: str = ""
    """The first difference in words."""
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The two values there, by order: {"a before b": 1.0, "b before a": 2.0}."""

    @property
    def event(self) -> Event | None:
        """The event, if the answer is about a single one."""
        return self.events[0] if len(self.events) == 1 else None

    @property
    def difference(self) -> str:
        """The first difference in one line; empty where there is none."""
        texts = [f"{value:.6g}" if isinstance(value, float) else repr(value) for value in self.values.values()]
        if len(set(texts)) == 1:
            texts = [repr(value) for value in self.values.values()]
        values = ", ".join(f"{text} with {order}" for text, order in zip(texts, self.values, strict=True))
        return ": ".join(part for part in (self.path, self.what, values) if part)

    def __bool__(self) -> bool:
        return self.commutes is True

    def __str__(self) -> str:
        names, where = " and ".join(self.algorithms), ", ".join(event.name for event in self.events)
        cases = f"{self.examples} case{'s' * (self.examples != 1)}"
        if self.commutes is None:
            return f"{names}: undecided at {where}: {self.reason}"
        if self.commutes:
            return f"{names} commute: {self.reason}" if self.reason else f"{names} commute at {where}, in {cases}"
        return f"{names} do not commute at {where}\n  {self.difference}\n  case  {self.counterexample!r}"


def commutes(
    a: Algorithm | Subject | str,
    b: Algorithm | Subject | str,
    event: Event | str | None = None,
    *,
    tasks: Sequence[Task] | None = None,
    tolerance: float = 1e-6,
    max_examples: int = 25,
    seed: int = 0,
) -> Commutation:
    """Decides by generated cases whether it matters which of two algorithms acts first.

    A case is run twice, with the one and with the other first at the event, and the states between steps are
    compared. At all other events the pair keeps one order, the one of the default passes. What fails in one order
    alone is a difference too. The answer is the same whichever algorithm is named first, and in every process.

    Args:
        a: An algorithm, or a text as for `Subject.of`.
        b: The other, under another name.
        event: Where; by default each event at which both may act, up to the first at which they do not commute.
        tasks: The tasks to try; by default all of `TASKS`.
        tolerance: By which share of its largest magnitude a leaf may differ.
        max_examples: How many cases in which both act are tried at an event.
        seed: Another one gives other cases.

    Raises:
        ValueError: Both have one name.
        OrderError: Their constraints contradict each other.

    Example:
        >>> print(commutes("mixup(0.2)", "label_smoothing(0.1)", "after_loss"))
        label_smoothing and mixup commute: they never both act at AFTER_LOSS
    """
    first, second = Subject.of(a).algorithm, Subject.of(b).algorithm
    if first.name == second.name:
        raise ValueError(f"two algorithms called {first.name!r}; give one another name: mixup(..., name='other')")
    names = (min(first.name, second.name), max(first.name, second.name))
    asked = None if event is None else Event(event)
    events = [met for met in meeting_events(first, second) if asked in (None, met)]
    if not events:
        where = "the same event" if asked is None else asked.name
        return Commutation(names, True, () if asked is None else (asked,), 0, f"they never both act at {where}")
    search = PairSearch(
        first, second, tasks=tuple(TASKS.values() if tasks is None else tasks),
        tolerance=tolerance, max_examples=max_examples, seed=seed,
    )  # fmt: skip
    answers: list[Commutation] = []
    for one in events:
        answers.append(_answer(names, one, search.findings(one)))
        if answers[-1].commutes is False:
            return answers[-1]
    undecided = next((answer for answer in answers if answer.commutes is None), None)
    if undecided is not None:
        return undecided
    return Commutation(names, True, tuple(events), sum(answer.examples for answer in answers))


def meeting_events(a: Algorithm, b: Algorithm) -> tuple[Event, ...]:
    """The events at which both may act, INIT first."""
    theirs = set(b.events)
    return tuple(event for event in a.events if event in theirs)


def _answer(names: tuple[str, str], event: Event, found: Findings) -> Commutation:
    """The answer at one event."""
    if found.broken is not None:
        at = {"path": found.broken.path, "what": found.broken.what, "values": found.broken.values}
        return Commutation(names, False, (event,), found.examples, "", found.case, **at)
    if found.examples:
        return Commutation(names, True, (event,), found.examples)
    if not found.errors:
        reason = f"in none of {found.tried} cases did both act there"
    else:
        error = " ".join(f"{type(found.errors[0]).__name__}: {found.errors[0]}".split())
        reason = f"both orders failed in {len(found.errors)} of {found.tried} cases, the first with {error}"
    return Commutation(names, None, (event,), 0, f"{reason}; give tasks on which both act and work")
