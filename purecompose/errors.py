"""The errors and warnings that callers may want to catch."""

from typing import Any

from purecompose._support import publish
from purecompose._support.messages import escaped


publish(__name__)


# Composition and order


class OrderError(ValueError):
    """Constraints contradict each other."""


class MixedLossWarning(UserWarning):
    """Two algorithms each replace the loss, so that the second undoes the first."""


class UnsupportedError(ValueError):
    """Two features do not work together; the message says why, and what to do instead."""


class MatchError(RuntimeError):
    """A `match` failed, or read something that is not known before the step.

    Attributes:
        event: The `Event` for which it was evaluated.
    """

    def __init__(self, message: str, event: Any) -> None:
        super().__init__(message)
        self.event = event


# Purity


class ContractError(RuntimeError):
    """User code violated the contract of a step or an evaluation; the subclasses say how.

    Attributes:
        event: The `Event` at which it happened, if known.
    """

    def __init__(self, message: str, event: Any = None) -> None:
        super().__init__(message)
        self.event = event


class FormError(ContractError):
    """A value that outlives a step changed its structure, shape or dtype, or has the wrong type."""


class InPlaceError(ContractError):
    """Code wrote into the values that it was given, which belong to the caller."""


class UnkeyedRandomError(RuntimeError):
    """Error for a random function that would use hidden state: it has no key, or its key cannot be replayed."""


class GlobalDrawError(ContractError, UnkeyedRandomError):
    """Code drew from the global generator of Python's random or of NumPy."""


# Compiled steps and several processes


class TraceError(RuntimeError):
    """A part of a step cannot be compiled: it reads a number, or does something else that a graph cannot express, or
    the compiler fails on its graph.
    """

    algorithm: Any = None
    """The `Algorithm` that cannot be traced, if it is known."""


class VariantLimitError(RuntimeError):
    """A step needs more compiled variants than its limit."""


class SpentStateError(RuntimeError):
    """A later step has overwritten the memory of the state that was read."""


class RankTimeoutError(RuntimeError):
    """A process has not answered within the process group's timeout, or has ended."""


# Runs and checkpoints


class SkippingWarning(UserWarning):
    """Warning that a run resumes in the middle of an epoch by reading the epoch from its start."""


class CheckpointWarning(UserWarning):
    """Training continues, but not quite as before: a checkpoint was not written, was skipped, or fits with changes."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used."""

    def __str__(self) -> str:
        return escaped(super().__str__())  # it may contain texts of the checkpoint


class DamagedError(CheckpointError):
    """It is incomplete, or not a checkpoint: a file is missing, cut off, changed, or of another program."""


class MismatchError(CheckpointError):
    """It is complete, but the checkpoint of another model, optimizer or set of algorithms.

    Attributes:
        differences: One line for each thing that differs.
    """

    def __init__(self, message: str, differences: list[str]) -> None:
        super().__init__(message)
        self.differences = differences


class UploadError(CheckpointError):
    """Files of a run could not be sent to remote storage; they are in a local copy, which the message names."""
