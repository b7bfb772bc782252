"""Damaged checkpoints: every mutation is harmless or an explained error; none gives a wrong state or runs code."""

import collections
import copy
import json
import os
import pathlib
import random
import shutil
import warnings
from collections.abc import Iterator

import pytest
import torch

import purecompose as pc
from purecompose import compose, loop_events
from purecompose.run.saving.checkpoint import resumed_from_newest
from purecompose.run.saving.files import _checksum
from tests.helpers import make_batch, make_state


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Return the content with bits flipped, bytes replaced, cut off, inserted or repeated, or parts exchanged."""
    data, at = bytearray(content), draw.randrange(len(content))
    match draw.randrange(7):
        case 0:
            data[at] ^= 1 << draw.randrange(8)
        case 1:
            data[at] = draw.randrange(256)
        case 2:
            del data[at:]
        case 3:
            data[at:at] = draw.randbytes(draw.randrange(1, 9))
        case 4:
            del data[at : at + draw.randrange(1, 9)]
        case 5:
            data += data[at:]
        case _:
            digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
            place = draw.choice(digits) if digits else at
            data[place] = ord(str((data[place] - ord("0") + draw.randrange(1, 10)) % 10))
    return bytes(data)


@pytest.mark.parametrize("num", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_mutation_gives_a_wrong_state(num: int, tmp_path: pathlib.Path) -> None:
    step = compose(loop_events, [pc.algorithms.mixup(0.2)])
    like = step.init(make_state())
    state = step(like, make_batch())
    whole = pc.save(state, tmp_path / "whole", step=step)
    draw, refused = random.Random(num), 0
    for i in range(num):
        one = tmp_path / f"{i}"
        shutil.copytree(whole, one)
        file = one / draw.choice(["index.json", "state.safetensors"])
        file.write_bytes(mutated(file.read_bytes(), draw))
        try:
            found = pc.load(one, like, step=step)
        except pc.errors.CheckpointError as error:
            assert str(one) in str(error)
            refused += 1
        else:
            assert pc.tree.equal(found, state) and found.timestamp == state.timestamp
        shutil.rmtree(one)
    assert refused > 0.9 * num


def test_a_forged_index_runs_no_code_and_says_what_is_wrong(tmp_path: pathlib.Path) -> None:
    """The checksum only detects accidents; a forged index still contains nothing but numbers and strings."""
    from purecompose.run.saving.files import Index, to_json

    like = make_state()
    whole = pc.save(like, tmp_path / "one")
    index = pc.saving.read_index(whole)
    forged = {
        "no time": {"time": {}},
        "odd time": {"time": {**index.time, "batch": -1}},
        "odd duration": {"time": {**index.time, "duration": "__import__('os')"}},
        "odd dtype": {"tensors": {**index.tensors, "key": "load[2]"}},
        "odd form": {"tensors": {**index.tensors, "key": "__import__('os')"}},
        "other dtype": {"tensors": {**index.tensors, "key": "int32[2]"}},
        "other files": {"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}},
        "no model": {"description": {}},
        "lists": {"tensors": [], "values": []},
    }
    for name, changes in forged.items():
        (whole / "index.json").write_text(to_json(Index(**{**vars(index), **changes})))
        with pytest.raises((pc.errors.CheckpointError, pc.errors.MismatchError)) as caught:
            pc.load(whole, like)
        assert str(caught.value), name


def places_in(value: object, place: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the places of all values in plain ones."""
    yield place
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield from places_in(member, (*place, key))


FORGED = [None, True, -1, 0, 2**70, 1.5, "", "x", "-1ep", [], [None], [[-1, 2**40]], {}, {"float": "x"}, {"!tuple": 1}]
FORMS = [
    "float32[4, 8] by [1, 1]",
    "float32[4, 8] by [9, 1]",
    "float32[4, 8] by [8]",
    "float32[99999999999, 9999999999]",
]


def test_every_forged_value_of_an_index_is_damage_or_harmless(tmp_path: pathlib.Path) -> None:
    step = compose(loop_events, [pc.algorithms.mixup(0.2)])
    state = like = step.init(make_state(duration="1ep"))
    batches = [make_batch(0), make_batch(1)]
    kept = pc.Checkpoints(tmp_path, "1ba", extra=torch.nn.Linear(2, 1), background=False)
    pc.fit(step, state, batches, checkpoints=kept)
    newest = pc.saving.newest(tmp_path)
    assert newest is not None
    index = json.loads((newest / "index.json").read_text())
    outcomes = collections.Counter[str]()
    for place in places_in(index):
        for value in FORGED + (FORMS if place[:1] == ("tensors",) else []):
            if not place or place[0] in ("sha256", "format", "version", "environment"):
                continue
            forged = copy.deepcopy(index)
            inner = forged
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            content = {name: member for name, member in forged.items() if name != "sha256"}
            (newest / "index.json").write_text(json.dumps({**content, "sha256": _checksum(content)}))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", pc.errors.CheckpointWarning)
                    resumed = resumed_from_newest(tmp_path, like, step)
            except pc.errors.CheckpointError as error:  # it does not fit, which is no damage
                outcomes[type(error).__name__] += 1
                continue
            assert resumed is not None
            outcomes[resumed.path.name.partition("-")[2]] += 1
            for damaged in tmp_path.glob("*.damaged-*"):
                damaged.rename(newest)
    assert outcomes.keys() <= {"MismatchError", "ba00000001", "ba00000002"}, outcomes


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
