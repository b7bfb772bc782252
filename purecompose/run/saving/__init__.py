"""Checkpoints: states on disk, complete or absent, verified when read; and the rules for keeping them."""

from purecompose.errors import CheckpointError, CheckpointWarning, DamagedError, MismatchError, UploadError
from purecompose.run.saving.checkpoint import load, save
from purecompose.run.saving.files import Index
from purecompose.run.saving.folder import read_index
from purecompose.run.saving.keeping import Checkpoints, newest
from purecompose.run.saving.remote import mirror
from purecompose.run.saving.weights import export_onnx, load_weights, save_weights


__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "DamagedError",
    "Index",
    "MismatchError",
    "UploadError",
    "export_onnx",
    "load",
    "load_weights",
    "mirror",
    "newest",
    "read_index",
    "save",
    "save_weights",
]
