"""The starts of a run: when it began, where it was resumed, and how long it took in total."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


RUNNING, KILLED, FINISHED = "running", "killed", "finished"


@dataclass
class Start:
    """One part of a run, from a call of `fit` to its end."""

    batch: int
    """Number of batches trained on before it."""
    started: str
    """Date and time in ISO 8601, with the offset from UTC."""
    until: int = 0
    """Number of batches at its end, or at its last known time."""
    seconds: float = 0.0
    """Seconds of wall-clock time; accurate to within some seconds if the process was killed."""
    evaluation_seconds: float = 0.0
    """Seconds of wall-clock time spent in evaluations."""
    outcome: str = RUNNING
    """"finished" (also with what is missing), "running" (the last start may also have been killed), "killed", or the
    reason why it was stopped."""
    command: str | None = None
    """The command that started it, if known."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Differences to the previous start: the old and the new value of each changed setting or version."""

    @property
    def training_seconds(self) -> float:
        """Seconds of wall-clock time without evaluations."""
        return self.seconds - self.evaluation_seconds

    @property
    def batches(self) -> int:
        """Number of batches trained on."""
        return self.until - self.batch

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        return dataclasses.asdict(self)

    @staticmethod
    def of_plain(plain: Mapping[str, Any]) -> "Start":
        """Return a start from the values of `to_plain`; unknown names are ignored.

        Raises:
            TypeError, KeyError: The values are not a start.
        """
        names = {one.name for one in dataclasses.fields(Start)}
        return Start(**{name: value for name, value in plain.items() if name in names})


def in_words(starts: Sequence[Start]) -> str:
    """Return a sentence about when a run started and where it continued.

    Example:
        >>> in_words([Start(0, "2026-05-01T10:00:00+00:00"), Start(40, "2026-05-01T11:00:00+00:00")])
        'Started 2026-05-01 10:00 (UTC), continued at batch 40.'
    """
    if not starts:
        return "Not started."
    # A start at batch 0 is a new beginning: nothing of the earlier starts remains.
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
