"""Checkpoints of states of which each of several processes holds some rows."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose.errors import CheckpointError
from purecompose.testing.process import in_process_group
from tests.run.saving.together_scenarios import results, step_and_state
from tests.transforms.parallel_scenarios import told


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return the folder of several processes' checkpoints, and what each of them has found."""
    folder = tmp_path_factory.mktemp("together")
    return folder, in_process_group(results, request.param, folder)


def test_states_are_loaded_with_the_same_bits(written: tuple[Path, list[Any]]) -> None:
    folder, results = written
    for found in results:
        assert not any(found["loaded"].values()), found["loaded"]
    assert len([*(folder / "one").glob("*.safetensors")]) == len(results)
    here = told(pc.load(folder / "one", step_and_state(key=1)[1]))  # without a process group
    for name, leaf in results[0]["whole"].items():
        torch.testing.assert_close(here[name], leaf, rtol=0, atol=0, equal_nan=True)


def test_a_run_continues_with_the_same_bits_from_the_newest_that_is_whole_for_all(
    written: tuple[Path, list[Any]],
) -> None:
    _, results = written
    for rank, found in enumerate(results):
        assert found["resumed"]["difference"] == []
        assert [name for name in found["resumed"]["kept"] if "damaged" not in name] == [
            "ep0001-ba00000005",
            "ep0002-ba00000006",
        ]
        assert any("put aside" in text for text in found["resumed"]["warnings"]) is (rank == 0)
        assert "clocks differ" in found["refused"]


def test_the_best_states_are_those_of_all_processes(written: tuple[Path, list[Any]]) -> None:
    """A run that is cut after its fifth batch keeps the same ones, and returns the same best state, in each process."""
    _, results = written
    expected, moment, ranked = results[0]["best"]["best"]
    assert len(ranked) == 3 and ranked[0][0] != "ep0003-ba00000009" and "batch 9" not in moment
    for found in (one["best"] for one in results):
        for state, when, names in (found["best"], found["best and cut"]):
            assert (when, names) == (moment, ranked)
            assert state.keys() == expected.keys()
            for name, leaf in state.items():
                assert torch.equal(leaf, expected[name]), name


def test_a_process_that_fails_lets_no_other_wait(written: tuple[Path, list[Any]]) -> None:
    _, results = written
    every = ["ep0000-ba00000001", "ep0000-ba00000002", "ep0001-ba00000003"]
    for found in (one["failed"] for one in results):
        assert found["kept"] == {
            "full for a while": every,
            "failing": every[:2],
            "first failing": [every[0], every[2]],
            "odd": every[1:],
        }
        assert not found["saved"]
    said = [found["failed"]["said"] for found in results]
    for one in said[:-1]:
        assert "another process has failed" in one["odd"] and "another process has failed" in one["reading"]
    for one in said:
        assert "the last state of the run is in no checkpoint" in one["failing"]
        assert all(one[name].startswith("OSError") for name in ("saving", "looking", "reading"))
        assert not one["full for a while"].startswith("OSError")
    assert said[0]["looking"] == "OSError: unreadable" and "another process has failed" in said[1]["looking"]


def test_the_number_of_processes_is_the_only_difference_of_their_step(written: tuple[Path, list[Any]]) -> None:
    folder, results = written
    step, template = step_and_state()
    with pytest.warns(
        pc.errors.CheckpointWarning, match=f"processes: {len(results)} in the checkpoint, 1 here"
    ) as told_of:
        pc.load(folder / "described", template, step=step)
    (one,) = told_of
    assert len(str(one.message).splitlines()) == 2


def test_a_signal_after_the_last_batch_ends_all_processes(written: tuple[Path, list[Any]]) -> None:
    folder, results = written
    for found in results:
        assert found["ended"] == {"BATCH_END": "SystemExit: 143", "FIT_END": "SystemExit: 143"}
    for event in ("BATCH_END", "FIT_END"):
        assert "ep0001-ba00000003" in [path.name for path in (folder / event).iterdir()]


def test_a_run_that_ends_after_a_checkpoint_was_due_leaves_it(written: tuple[Path, list[Any]]) -> None:
    folder, results = written
    for found in (one["cut off"] for one in results):
        assert found["left"] == ("", ["ep0000-ba00000002"])
        assert found["raising"] == ("ValueError: an observer fails", ["ep0000-ba00000001"])
        assert found["broken"][1] == []
    first, *others, last = [one["cut off"]["broken"][0] for one in results]
    assert "ep0000-ba00000002 was not written: TimeoutError: state-" in first and not any(others)
    assert last.endswith("ep0000-ba00000002 was not written: OSError: broken")
    for name in ("left/ep0000-ba00000002", "raising/ep0000-ba00000001"):
        pc.load(folder / name, step_and_state(key=1)[1])


def test_processes_copy_only_what_they_write(written: tuple[Path, list[Any]]) -> None:
    _, results = written
    first, *others = [one["copied"] for one in results]
    writing = len(results) // 2
    assert "key" in first and any("opt_state" in name for name in first)
    assert all("key" not in names and names < first for names in others)
    assert [bool(names) for names in others] == [rank < writing for rank in range(1, len(results))]


@pytest.mark.parametrize("num", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_damage_is_found(written: tuple[Path, list[Any]], tmp_path: Path, num: int) -> None:
    folder, template, draw = written[0] / "one", step_and_state()[1], random.Random(0)
    files = sorted(folder.iterdir())
    for _ in range(num):
        damaged = shutil.copytree(folder, tmp_path / "damaged", dirs_exist_ok=True)
        file = damaged / draw.choice(files).name
        content = bytearray(file.read_bytes())
        kind = draw.choice(["flip", "cut", "gone", "swap"])
        if kind == "flip":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del content[draw.randrange(len(content)) :]
        elif kind == "swap":
            content = bytearray(
                (damaged / draw.choice([one for one in files if one.name != file.name]).name).read_bytes()
            )
        file.unlink() if kind == "gone" else file.write_bytes(content)
        with pytest.raises(CheckpointError):
            pc.load(damaged, template)
