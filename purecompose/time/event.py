"""The named points of the training loop, and spans of training with a unit, such as "90ep", "0.5dur" or "1h30m".

Every algorithm acts at events, and every loop program contains events. An event's properties are derived from its name.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeAlias

from purecompose._support.specs import check_number, check_whole, did_you_mean, is_number


class Event(enum.Enum):
    """A named point of the loop; the value is the name in lower case.

    `Event(text)` looks a member up by its name in any case. Members are hashable, and not to be compared with strings.
    INIT and the two checkpoint events have no partner; each other event opens or closes something, and the two halves
    of a pair share a `canonical_name`.

    Raises:
        ValueError: No event has that name; close ones are listed.
        TypeError: The argument is neither a string nor an event, or an event was compared with a string.

    Example:
        >>> Event("Batch_End")
        <Event.BATCH_END: 'batch_end'>
        >>> str(Event.INIT), Event.INIT == Event("init")
        ('Event.INIT', True)
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    FIT_END = "fit_end"

    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"

    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            raise TypeError(
                f"{self} == {other!r}: an event is not a string; compare with a member, or with Event({other!r})"
            )
        return self is other

    __hash__ = enum.Enum.__hash__

    @classmethod
    def _missing_(cls, value: object) -> Event:
        if not isinstance(value, str):
            raise TypeError(f"expected an Event or the name of one, got {value!r} ({type(value).__name__})")
        for event in cls:
            if event.value == value.lower():
                return event
        hint = did_you_mean(value.lower(), [event.value for event in cls])
        raise ValueError(f"no event is called {value!r};{hint or ' list(Event) shows them all'}")

    @property
    def is_before_event(self) -> bool:
        """True if the event opens something: BEFORE_* and *_START, in training, evaluation and prediction."""
        return "BEFORE_" in self.name or self.name.endswith("_START")

    @property
    def is_after_event(self) -> bool:
        """True if the event closes something: AFTER_* and *_END, in training, evaluation and prediction."""
        return "AFTER_" in self.name or self.name.endswith("_END")

    @property
    def is_reversed(self) -> bool:
        """True if algorithms run in reverse order here, so that the first one in is the last one out.

        This applies to every AFTER_* event. *_END events keep the listed order.
        """
        return "AFTER_" in self.name

    @property
    def canonical_name(self) -> str:
        """The name shared by the two halves of a pair: 'epoch' for EPOCH_START and EPOCH_END.

        A checkpoint event is not half of a pair and keeps its whole name.
        """
        name = self.value
        for part in ("before_", "after_", "_start", "_end"):
            name = name.replace(part, "")
        return name

    @property
    def is_eval(self) -> bool:
        """True if the event belongs to evaluation."""
        return self.name.startswith("EVAL_")

    @property
    def is_predict(self) -> bool:
        """True if the event belongs to prediction."""
        return self.name.startswith("PREDICT_")

    def lower(self, place: Any) -> Any:
        """Return the operations of the algorithms that act here; see `purecompose.core.operation.Place`."""
        return place.at(self, place.pass_name(self.name), place.turn(self.name))

    @property
    def sees_new_time(self) -> bool:
        """True if the timestamp has advanced past the batch or epoch that the event is about.

        Evaluation and prediction do not advance the time of training, so it is False for their events.
        """
        if self.is_eval or self.is_predict:
            return False
        return self.name.endswith(("_END", "_CHECKPOINT"))


_CLOCK = re.compile(r"\s*(?=\d)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\s*", re.IGNORECASE | re.ASCII)
# Exponents have at most three digits: "1e999999999sp" would otherwise be a number with a billion digits.
_NUMBER_AND_UNIT = re.compile(
    r"\s*(?P<number>[+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,3})?)\s*(?P<unit>[a-z]*)\s*",
    re.IGNORECASE | re.ASCII,
)


class UnitError(RuntimeError):
    """Two times of different units met in an operation that needs one unit."""


class TimeUnit(enum.Enum):
    """The unit of a time. `TimeUnit(text)` finds a member by value or name, in any case.

    Example:
        >>> TimeUnit("ep")
        <TimeUnit.EPOCH: 'ep'>
    """

    EPOCH = "ep"
    BATCH = "ba"
    UPDATE = "up"  # of the optimizer, each after one batch, or several under gradient accumulation
    SAMPLE = "sp"  # summed over ranks
    TOKEN = "tok"  # summed over ranks
    DURATION = "dur"  # fraction of the run's duration
    SECOND = "sec"  # wall-clock

    @classmethod
    def _missing_(cls, value: object) -> TimeUnit:
        if not isinstance(value, str):
            raise TypeError(f"expected a TimeUnit or the name of one, got {value!r} ({type(value).__name__})")
        for unit in cls:
            if value.lower() in (unit.value, unit.name.lower()):
                return unit
        raise ValueError(
            f"no unit of time is called {value!r}; there are ep (epochs), ba (batches, one step each), up (updates of "
            "the optimizer), sp (samples), tok (tokens), dur (fraction of the run) and sec (seconds)"
        )


_UNITS = ", ".join(unit.value for unit in TimeUnit)


@dataclasses.dataclass(frozen=True, init=False)
class Time:
    """A span of training: a value and a unit, as in `Time(5, "ep")` or `Time.parse("5ep")`.

    The value is an int, or a float for `dur`. Times of one unit are ordered; a bare number gets the unit of the time
    that it is compared with, and a string is parsed. `time * number` is rounded toward zero if it must be whole. A time
    of value 0 is false.

    Args:
        value: An int, or a float for `dur`.
        unit: A `TimeUnit` or its short name: "ep", "ba", "up", "sp", "tok", "dur" or "sec".

    Raises:
        TypeError: The value is not whole, in another unit than `dur`.
        ValueError: The unit is unknown, or a `dur` is not finite.
        UnitError: Two times that are compared have different units.

    Example:
        >>> Time.parse("2ep") * 1.5, Time(3, "ep") < "4ep"
        (Time(3, TimeUnit.EPOCH), True)
    """

    value: int | float
    unit: TimeUnit

    def __init__(self, value: float, unit: TimeUnit | str) -> None:
        unit = unit if isinstance(unit, TimeUnit) else TimeUnit(unit)
        is_share = unit is TimeUnit.DURATION
        checked = check_number(value, "dur") if is_share else check_whole(value, unit.value, hint=_share_hint(value))
        object.__setattr__(self, "value", checked)
        object.__setattr__(self, "unit", unit)

    @classmethod
    def parse(cls, text: str) -> Time:
        """Read "90ep", "3e4tok", "0.5dur" or "1h20m40s" (seconds), in any case, with blanks around the parts.

        Raises:
            ValueError: The text has none of these forms, or no unit.
            TypeError: The number is not whole, as in "1.5ep", or `text` is not a string.

        Example:
            >>> Time.parse("1h30m"), Time.parse("4_000 tok")
            (Time(5400, TimeUnit.SECOND), Time(4000, TimeUnit.TOKEN))
        """
        if not isinstance(text, str):
            raise TypeError(f"expected a string such as '90ep', got {text!r} ({type(text).__name__})")
        if match := _CLOCK.fullmatch(text):
            hours, minutes, seconds = (int(part or 0) for part in match.groups())
            return cls(3600 * hours + 60 * minutes + seconds, TimeUnit.SECOND)
        match = _NUMBER_AND_UNIT.fullmatch(text)
        if match is None:
            raise ValueError(f"cannot read the time {text!r}; write a number and a unit ({_UNITS}) or '1h20m40s'")
        if not match["unit"]:
            raise ValueError(f"the time {text!r} has no unit; add one of {_UNITS}, as in '5ep'")
        unit = TimeUnit(match["unit"])
        if unit is TimeUnit.DURATION:
            return cls(float(match["number"]), unit)
        number = Decimal(match["number"])
        if number != number.to_integral_value():
            raise TypeError(f"{text!r}: expected a whole number of {unit.value}; only dur can be a fraction")
        return cls(int(number), unit)

    @classmethod
    def of(cls, time: TimeLike | float, default_unit: TimeUnit | str | None = None) -> Time:
        """Return a time from a Time, a string, or a number of `default_unit`.

        Raises:
            TypeError: `time` is none of these, or a number without a `default_unit`.

        Example:
            >>> Time.of("5ep") == Time.of(5, "ep")
            True
        """
        if isinstance(time, Time):
            return time
        if isinstance(time, str):
            return cls.parse(time)
        if default_unit is not None and is_number(time):
            return cls(time, default_unit)  # pyright: ignore[reportArgumentType]
        is_whole = is_number(time) and not time % 1
        hint = _share_hint(time) or (f"give it a unit, as in '{time}ep' or '{time}ba'" if is_whole else "")
        came = f"{time!r} ({type(time).__name__})"
        raise TypeError(f"expected a Time or a string such as '90ep', got {came}{'; ' * bool(hint)}{hint}")

    def __repr__(self) -> str:
        return f"Time({self.value!r}, {self.unit})"

    def __str__(self) -> str:
        return f"{self.value}{self.unit.value}"

    def __bool__(self) -> bool:
        return self.value != 0

    def __lt__(self, other: TimeLike | float) -> bool:
        return self._ordered(operator.lt, "<", other)

    def __le__(self, other: TimeLike | float) -> bool:
        return self._ordered(operator.le, "<=", other)

    def __gt__(self, other: TimeLike | float) -> bool:
        return self._ordered(operator.gt, ">", other)

    def __ge__(self, other: TimeLike | float) -> bool:
        return self._ordered(operator.ge, ">=", other)

    def __mul__(self, factor: float) -> Time:
        if not is_number(factor):
            return NotImplemented
        value = self.value * factor
        is_exact = self.unit is TimeUnit.DURATION or isinstance(value, int)
        return Time(value if is_exact else int(snapped(value)), self.unit)

    __rmul__ = __mul__

    def _ordered(self, compare: Callable[[Any, Any], bool], sign: str, other: TimeLike | float) -> bool:
        if not (is_number(other) or isinstance(other, Time | str)):
            return NotImplemented
        other = Time.of(other, self.unit)
        if other.unit is not self.unit:
            raise UnitError(
                f"{self} {sign} {other}: {self.unit.value} and {other.unit.value} cannot be converted "
                "without a run; write both in one unit, or ask Timestamp.reached or RunLength.in_batches"
            )
        return compare(self.value, other.value)


TimeLike: TypeAlias = Time | str
"""A time: `Time(5, "ep")` or "5ep"."""


def named_time(value: Any, where: str, default_unit: TimeUnit | None = None, *, share: str = "") -> Time:
    """Return a time, as `Time.of` reads it, with errors that begin with `where`, such as "ema: half_life".

    `share` replaces the words before a number between 0 and 1 in the hint about it, by default about a share of a run.
    """
    try:
        return Time.of(value, default_unit)
    except (TypeError, ValueError) as error:
        text, hint = str(error), _share_hint(value)
        text = text.replace(hint, f"{share}{value}") if share and hint else text
        raise type(error)(f"{where}={value!r}: {text}") from error


def named_point(value: Any, where: str) -> Time:
    """Return a point of a run, a share in [0, 1] or a time of at least 0, with errors that name the argument."""
    time = named_time(value, where, TimeUnit.DURATION)
    if time.unit is TimeUnit.SECOND:
        raise ValueError(
            f"{where}={value!r}: wall-clock time is not part of a state; use batches, epochs or a share of the run "
            "(only fit(duration=...) takes seconds)"
        )
    if not 0 <= time.value <= (1 if time.unit is TimeUnit.DURATION else time.value):
        raise ValueError(
            f"{where}={value!r}: expected a share of the run in [0, 1], or a time from 0 on such as '10ba'"
        )
    return time


def _share_hint(value: Any) -> str:
    """Return a hint about the likely meaning of a number between 0 and 1."""
    return f"a share of the run is '{value}dur'" if isinstance(value, float) and 0 < value < 1 else ""


def snapped(value: float) -> float:
    """Return the nearest whole number if `value` differs by a rounding error only: 0.07 * 100 is 7.000000000000001."""
    nearest = round(value)
    return float(nearest) if math.isclose(value, nearest, rel_tol=1e-15) else value
