"""Maliciously prepared checkpoints: each is refused quickly, with an explanation."""

import os
import pathlib

import pytest

import purecompose as pc
from tests.helpers import make_state


def put_pipe(file: pathlib.Path) -> None:
    os.mkfifo(file)


def put_link_to_zero(file: pathlib.Path) -> None:
    file.symlink_to("/dev/zero")


def put_sparse(file: pathlib.Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(2**36)


def put_nested(file: pathlib.Path) -> None:
    # Shallow enough for Python's parser, too deep for a recursive walk.
    file.write_text('{"format": "purecompose checkpoint", "version": 1, "time": ' + "[" * 900 + "]" * 900 + "}")


@pytest.mark.parametrize(
    "name, put, words",
    [
        ("index.json", put_pipe, "not a regular file"),
        ("index.json", put_link_to_zero, "not a regular file"),
        ("index.json", put_sparse, "larger than the"),
        ("index.json", put_nested, "nested more than 64 levels deep"),
        ("state.safetensors", put_pipe, "not a regular file"),
        ("state.safetensors", put_link_to_zero, "not a regular file"),
        ("state.safetensors", put_sparse, "it is not whole"),
    ],
)
def test_a_prepared_checkpoint_is_refused(tmp_path: pathlib.Path, name: str, put: object, words: str) -> None:
    state = make_state()
    path = pc.save(state, tmp_path / "one")
    (path / name).unlink()
    assert callable(put)
    put(path / name)
    with pytest.raises(pc.errors.DamagedError, match=words):
        pc.load(path, state)


def test_prepared_weights_are_refused(tmp_path: pathlib.Path) -> None:
    put_pipe(tmp_path / "pipe.safetensors")
    with pytest.raises(pc.errors.DamagedError, match="not a regular file"):
        pc.saving.load_weights(tmp_path / "pipe.safetensors", make_state())
