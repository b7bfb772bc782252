"""Errors of checkpoints."""

__all__ = ["CheckpointError", "CheckpointWarning", "DamagedError", "MismatchError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used."""


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


class CheckpointWarning(UserWarning):
    """Training continues, but not quite as before: a checkpoint was not written, was skipped, or fits with changes."""
