"""The starts of a run: when it began, where it was resumed, and how long it took in all."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


__all__ = ["KILLED", "RUNNING", "Start", "in_words"]

RUNNING, KILLED = "running", "killed"


@dataclass
class Start:
    """One stretch of a run, from a call of `fit` to where it ended."""

    batch: int
    """The number of batches trained on before it."""
    started: str
    """Date and time in ISO 8601, with the offset from UTC."""
    until: int = 0
    """The number of batches at its end, or when it was last heard of."""
    seconds: float = 0.0
    """Wall-clock time, as far as it is known: to within some seconds where the process was killed."""
    evaluation_seconds: float = 0.0
    """The part of it that evaluations took."""
    outcome: str = RUNNING
    """"finished", "running" (or killed, if nothing came after it), "killed", or what it was stopped by."""
    command: str | None = None
    """The command that was given."""
    changed: dict[str, Any] = field(default_factory=dict)
    """What differs from the start before: for each setting or version the old and the new value."""

    @property
    def training_seconds(self) -> float:
        """Wall-clock time without evaluations."""
        return self.seconds - self.evaluation_seconds

    @property
    def batches(self) -> int:
        """How many batches were trained on."""
        return self.until - self.batch

    def to_plain(self) -> dict[str, Any]:
        """As JSON can say it."""
        return dataclasses.asdict(self)

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> "Start":
        """Return the inverse of `to_plain`; what it does not know is left out.

        Raises:
            TypeError, KeyError: It is not a start.
        """
        names = {one.name for one in dataclasses.fields(Start)}
        return Start(**{name: value for name, value in plain.items() if name in names})


def in_words(starts: Sequence[Start]) -> str:
    """When a run started and where it continued.

    Example:
        >>> in_words([Start(0, "2026-05-01T10:00:00+00:00"), Start(40, "2026-05-01T11:00:00+00:00")])
        'Started 2026-05-01 10:00 (UTC), continued at batch 40.'
    """
    if not starts:
        return "Not started."
    # A start at batch 0 is a new beginning: what was there before it has come to nothing.
    first = max(i for i, start in enumerate(starts) if start.batch == 0 or i == 0)
    later = starts[first + 1 :]
    text = f"Started {_moment(starts[first].started)}"
    if starts[first].batch:
        text += f" at batch {starts[first].batch:,}"
    if not later:
        return f"{text}."
    places = [f"{start.batch:,}" for start in later]
    reported = places[0] if len(places) == 1 else f"{', '.join(places[:-1])} and {places[-1]}"
    times = f" ({len(places)} times)" if len(places) > 1 else ""
    return f"{text}, continued at batch {reported}{times}."


def _moment(iso: str) -> str:
    day, _, rest = iso.partition("T")
    zone = rest[8:].removeprefix(".")
    return f"{day} {rest[:5]} ({'UTC' if zone in ('+00:00', 'Z', '') else f'UTC{zone}'})"
