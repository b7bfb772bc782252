"""The named points of the training loop.

Every algorithm acts at events, and every loop program contains events. An event's properties are derived from its name.
"""

import enum
from typing import Any

from purecompose._support.specs import did_you_mean


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
    def _missing_(cls, value: object) -> "Event":
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
