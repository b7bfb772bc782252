"""Errors of checkpoints."""

from purecompose._support.messages import escaped


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


def cause_of(error: Exception) -> str:
    """Return an error as text, without the name of the file, so that it is the same for each checkpoint."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class CheckpointWarning(UserWarning):
    """Training continues, but not quite as before: a checkpoint was not written, was skipped, or fits with changes."""


class UploadError(CheckpointError):
    """Files of a run could not be sent to remote storage; they are in a local copy, which the message names."""
