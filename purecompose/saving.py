"""Checkpoints: states on disk, complete or absent, verified when read; and the rules for keeping them."""

from purecompose._support import publish
from purecompose.errors import (
    CheckpointError as CheckpointError,
    CheckpointWarning as CheckpointWarning,
    DamagedError as DamagedError,
    MismatchError as MismatchError,
    UploadError as UploadError,
)
from purecompose.run.saving.checkpoint import load as load, save as save
from purecompose.run.saving.files import Index as Index
from purecompose.run.saving.folder import read_index as read_index
from purecompose.run.saving.remote import mirror as mirror
from purecompose.run.saving.selection import (
    Checkpoints as Checkpoints,
    Ranked as Ranked,
    best as best,
    newest as newest,
    ranked as ranked,
)
from purecompose.run.saving.weights import (
    export_onnx as export_onnx,
    export_program as export_program,
    load_weights as load_weights,
    save_weights as save_weights,
)


publish(__name__)
