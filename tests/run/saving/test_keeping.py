"""A run's checkpoints: when they are written, which are kept, and what happens if the disk fails."""

import errno
import os
import pathlib
import shutil
import threading
import warnings
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import purecompose as pc
from purecompose import Checkpoints, Evaluator, State, compose, fit, loop_events, training
from purecompose.run.saving import folder as disk
from purecompose.run.saving.files import Index
from purecompose.run.saving.keeping import Keeper
from purecompose.run.saving.selection import surplus
from purecompose.saving import newest
from tests.helpers import assert_same, changing, counter, make_batches, make_mlp, make_state, noise


BATCHES = make_batches(4)


def step() -> Any:
    return compose(loop_events, [noise(), counter()])


def start(**options: Any) -> State:
    return make_state(make_mlp(dropout=0.3), key=3, duration="3ep", **options)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the run wait for the writing thread: small runs are faster than a disk and would skip checkpoints."""
    enqueue = Keeper._enqueue

    def wait(self: Keeper, *arguments: Any) -> None:
        enqueue(self, *arguments)
        self._waiting[-1][0].result()

    monkeypatch.setattr(Keeper, "_enqueue", wait)


# When, and which


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    "every, batches",
    [("1ep", [4, 8, 12]), ("5ba", [5, 10, 12]), ("0.5dur", [6, 12]), ("16sp", [2, 4, 6, 8, 10, 12]), ("1h", [12])]
    + [(lambda now: now.batch in (3, 5), [3, 5, 12])],
)
@pytest.mark.parametrize("background", [True, False])
def test_checkpoints_are_written_when_due_and_at_the_end(
    every: Any, batches: list[int], background: bool, tmp_path: pathlib.Path
) -> None:
    settings = Checkpoints(tmp_path, every=every, keep=None, background=background)
    fit(step(), start(), BATCHES, checkpoints=settings)
    assert [int(name.partition("-ba")[2]) for name in names(tmp_path)] == batches


def found(batch: int, **metrics: float) -> disk.Found:
    time = {"batch": batch}
    return disk.Found(pathlib.Path(f"ba{batch}"), Index(time, {}, {}, {}, {}, {}, metrics=metrics))


@pytest.mark.parametrize(
    "settings, left",
    [
        (Checkpoints("x", keep=2), [5, 4]),
        (Checkpoints("x", keep=None), [5, 4, 3, 2, 1]),
        (Checkpoints("x", keep=1, best="accuracy"), [5, 2]),
        (Checkpoints("x", keep=1, best="accuracy", mode="min"), [5, 1]),
        (Checkpoints("x", keep=1, best="loss"), [5, 3]),
        (Checkpoints("x", keep=5), [5, 4, 3, 2, 1]),
        (Checkpoints("x", keep=1, best="unknown"), [5]),
    ],
)
def test_the_newest_and_the_best_are_kept(settings: Checkpoints, left: list[int]) -> None:
    nan = float("nan")
    all_of_them = [
        found(5, accuracy=0.5, loss=nan),
        found(4, accuracy=0.9),
        found(3, accuracy=nan, loss=0.1),
        found(2, accuracy=0.9, loss=0.2),  # as good as batch 4, and earlier
        found(1, accuracy=0.1, loss=0.3),
    ]
    gone = surplus(all_of_them, settings)
    assert [one.index.batch for one in all_of_them if one not in gone] == left


# Resuming


@pytest.mark.parametrize("stop", range(1, 13))
def test_a_run_resumed_from_any_batch_ends_with_the_same_bits(stop: int, tmp_path: pathlib.Path) -> None:
    whole = fit(step(), start(), BATCHES)
    settings = Checkpoints(tmp_path, every="2ba", background=False)
    for state in training(step(), start(), BATCHES, checkpoints=settings):
        if state.timestamp.batch == stop:
            break
    assert_same(fit(step(), start(), BATCHES, checkpoints=settings, resume="auto"), whole)
    # The run is finished by now.
    assert_same(fit(step(), start(), BATCHES, checkpoints=settings, resume="auto"), whole)


def test_a_run_can_resume_from_a_folder_and_end_later(tmp_path: pathlib.Path) -> None:
    short = fit(step(), start(), BATCHES, duration="1ep", checkpoints=Checkpoints(tmp_path, background=False))
    path = newest(tmp_path)
    assert path is not None and short.timestamp.batch == 4
    assert_same(fit(step(), start(), BATCHES, resume=path), fit(step(), start(), BATCHES))


def test_resuming_without_checkpoints_is_an_error_or_a_new_run(tmp_path: pathlib.Path) -> None:
    settings = Checkpoints(tmp_path / "none", background=False)
    assert_same(fit(step(), start(), BATCHES, checkpoints=settings, resume="auto"), fit(step(), start(), BATCHES))
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        fit(step(), start(), BATCHES, resume=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="say where, checkpoints="):
        fit(step(), start(), BATCHES, resume="auto")


@pytest.mark.usefixtures("patience")
def test_a_requested_damaged_checkpoint_is_refused_with_an_earlier_one_offered(tmp_path: pathlib.Path) -> None:
    fit(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path, background=False))
    first, second, last = sorted(tmp_path.iterdir())
    (second / "state.safetensors").write_bytes(b"half")
    (last / "index.json").write_bytes(b"{")
    for path in (second, last):
        with pytest.raises(pc.errors.DamagedError, match=f"the next older whole one is .*{first.name}"):
            fit(step(), start(), BATCHES, resume=path)


def test_a_folder_of_checkpoints_is_not_called_damaged_and_its_newest_is_offered(tmp_path: pathlib.Path) -> None:
    kept = tmp_path / "run" / "checkpoints"
    state = fit(step(), start(), BATCHES, checkpoints=Checkpoints(kept, background=False))
    last = pc.saving.newest(kept)
    for folder in (kept, tmp_path / "run"):
        said = rf"{folder} is a folder of 3 checkpoints, .*the newest is {last}"
        with pytest.raises(pc.errors.CheckpointError, match=said) as caught:
            fit(step(), start(), BATCHES, resume=folder)
        assert not isinstance(caught.value, pc.errors.DamagedError)
        with pytest.raises(pc.errors.CheckpointError, match=said):
            pc.load(folder, step().init(start()))
    assert last is not None
    assert_same(pc.load(last, step().init(start())), state)


def test_another_runs_folder_is_not_touched(tmp_path: pathlib.Path) -> None:
    fit(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path, background=False))
    before = names(tmp_path)
    with pytest.raises(FileExistsError, match="resume='auto', or give this run a folder of its own"):
        fit(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path, background=False))
    assert names(tmp_path) == before


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: pathlib.Path) -> None:
    settings = Checkpoints(tmp_path, every="2ba", background=False)
    whole = fit(step(), start(), BATCHES, checkpoints=settings)
    newest_ones = sorted(tmp_path.iterdir())
    (newest_ones[-1] / "state.safetensors").write_bytes(b"half")
    (newest_ones[-2] / "index.json").write_bytes(b"{")
    found = rf"not whole.*continuing from .*{newest_ones[-3].name}|not valid JSON"
    with pytest.warns(pc.errors.CheckpointWarning, match=found):
        assert_same(fit(step(), start(), BATCHES, checkpoints=settings, resume="auto"), whole)
    for path in tmp_path.iterdir():
        (path / "index.json").unlink()
    with pytest.raises(pc.errors.DamagedError, match="no whole checkpoint is left"):
        fit(step(), start(), BATCHES, checkpoints=settings, resume="auto")


def test_a_checkpoint_of_another_run_is_a_mismatch_not_a_gap(tmp_path: pathlib.Path) -> None:
    fit(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path, background=False))
    with pytest.raises(pc.errors.MismatchError):
        fit(compose(loop_events), start(), BATCHES, checkpoints=Checkpoints(tmp_path, background=False), resume="auto")


def test_files_that_are_not_checkpoints_of_the_run_are_kept(tmp_path: pathlib.Path) -> None:
    mine = pc.save(step().init(start()), tmp_path / "before-finetuning")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("text")
    with pytest.raises(FileExistsError, match="is not a checkpoint, and would be lost"):
        pc.save(start(), tmp_path / "thesis")
    with pytest.raises(FileExistsError, match="would be lost"):
        pc.save(start(), tmp_path / "thesis" / "chapter.txt")
    fit(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path, keep=1, background=False))
    assert names(tmp_path) == [mine.name, "ep0003-ba00000012", "thesis"]
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "text"


def test_damaged_checkpoints_are_put_aside_and_new_ones_are_kept(tmp_path: pathlib.Path) -> None:
    settings = Checkpoints(tmp_path, every="1ba", keep=1, background=False)
    for state in training(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path, "1ba", None, background=False)):
        if state.timestamp.batch == 7:
            break
    (tmp_path / "ep0001-ba00000007" / "state.safetensors").write_bytes(b"half")
    with pytest.warns(pc.errors.CheckpointWarning, match="put aside, and continuing from .*ba00000006"):
        fit(step(), start(), BATCHES, checkpoints=settings, resume="auto")
    kept = names(tmp_path)
    assert len(kept) == 2 and kept[0].startswith("ep0001-ba00000007.damaged-") and kept[1] == "ep0003-ba00000012"


def test_the_best_is_written_whenever_it_occurs(tmp_path: pathlib.Path) -> None:
    """Also between two due checkpoints and at the end; its metric is never from an evaluation of another state."""

    def rising(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -torch.nn.functional.cross_entropy(outputs, targets)

    evaluator = Evaluator(BATCHES, {"score": rising}, every="5ba")
    settings = Checkpoints(tmp_path, every="3ba", keep=None, best="eval/score", mode="max", background=False)
    fit(step(), start(), BATCHES, evaluate=evaluator, checkpoints=settings)
    measured = {
        pc.saving.read_index(path).batch: pc.saving.read_index(path).metrics.get("eval/score")
        for path in tmp_path.iterdir()
    }
    assert {3, 5, 6, 9, 12} <= measured.keys()
    assert measured[5] is not None and measured[12] is not None
    assert measured[3] is measured[6] is measured[9] is None


def test_data_of_another_length_are_an_error(tmp_path: pathlib.Path) -> None:
    settings = Checkpoints(tmp_path, every="1ba", background=False)
    next(training(step(), start(), BATCHES, checkpoints=settings))
    with pytest.raises(pc.errors.MismatchError, match="batches_per_epoch: 4 in the checkpoint, 3 here"):
        fit(step(), start(), BATCHES[:3], checkpoints=settings, resume="auto")


def test_files_left_by_a_killed_process_are_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Checkpoints(tmp_path, every="2ba", background=False)
    whole = fit(step(), start(), BATCHES, checkpoints=settings)
    last = sorted(tmp_path.iterdir())[-1]
    left = tmp_path / f".{last.name}.00000000.writing"
    shutil.copytree(last, left)
    last.rename(tmp_path / f".{last.name}.00000000.old")  # killed between two renamings
    (tmp_path / ".notes.old").mkdir()  # a user's folder
    assert pc.saving.read_index(last).batch == 12  # restored by the first reader
    assert_same(fit(step(), start(), BATCHES, checkpoints=settings, resume="auto"), whole)
    assert last.name in names(tmp_path)
    assert left.exists()  # another process may still be writing
    monkeypatch.setattr(disk, "_LONG", -1.0)
    fit(step(), start(), BATCHES, checkpoints=settings, resume="auto", duration="4ep")
    assert [name for name in names(tmp_path) if name.startswith(".")] == [".notes.old"]


# Disk failures


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_of_safetensors(*_: Any, **__: Any) -> None:
    # It raises SafetensorError, not OSError, with the error number only in the message.
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    "place, full", [("purecompose.run.saving.folder.sync", full), ("safetensors.torch.save_file", full_of_safetensors)]
)
def test_on_a_full_disk_training_continues_and_older_checkpoints_are_kept(
    place: str, full: Any, background: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(step(), start(), BATCHES)
    settings = Checkpoints(tmp_path, every="2ba", background=background)
    state, kept = start(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for state in training(step(), start(), BATCHES, checkpoints=settings):
            if state.timestamp.batch == 6:
                kept = names(tmp_path)
                monkeypatch.setattr(place, full)
    assert_same(state, whole)
    assert names(tmp_path) == kept and len(kept) == 3
    told = [str(one.message) for one in caught]
    assert sum("No space left on device" in text and "training continues" in text for text in told) == 1
    assert sum("attempts to write a checkpoint failed: No space left" in text for text in told) == 1
    assert sum("the last state of the run is in no checkpoint" in text for text in told) == 1
    monkeypatch.undo()
    settings = Checkpoints(tmp_path, every="2ba", background=False)
    assert_same(fit(step(), start(), BATCHES, checkpoints=settings, resume="auto"), whole)


def test_a_file_in_the_folders_place_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").write_text("a file")
    with (
        pytest.warns(pc.errors.CheckpointWarning, match="training continues without it"),
        pytest.warns(pc.errors.CheckpointWarning, match="attempts to write a checkpoint failed"),
        pytest.warns(pc.errors.CheckpointWarning, match="the last state of the run is in no checkpoint"),
    ):
        found = fit(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path / "run", background=False))
    assert found.timestamp.batch == 12


def test_a_slow_disk_skips_checkpoints_and_does_not_delay_the_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, write = threading.Event(), disk.write

    def slow(*arguments: Any) -> None:
        release.wait()
        write(*arguments)

    monkeypatch.setattr(disk, "write", slow)
    with pytest.warns(pc.errors.CheckpointWarning, match="skipped.*writing takes longer"):
        for state in training(step(), start(), BATCHES, checkpoints=Checkpoints(tmp_path, every="1ba")):
            if state.timestamp.batch == 12:
                release.set()
    assert names(tmp_path)[-1].endswith("ba00000012")


def test_a_state_that_cannot_be_saved_is_an_error_before_the_run(tmp_path: pathlib.Path) -> None:
    log: list[Any] = []
    with pytest.raises(TypeError, match=r"state.slots\['odd'\]"):
        odd = start().replace(slots={"odd": object()})
        fit(compose(loop_events), odd, BATCHES, checkpoints=Checkpoints(tmp_path), observers=lambda *a: log.append(a))
    assert not log


def test_values_that_cannot_be_saved_later_only_skip_checkpoints(tmp_path: pathlib.Path) -> None:
    def tell(state: State) -> State:
        odd: Any = {"odd": {1, 2}}
        is_first = state.timestamp.batch <= 9  # the first step is checked
        return state if is_first else state.replace(metrics=odd)

    hiding = changing("hiding", pc.Event.BATCH_END, tell, host=True)
    settings = Checkpoints(tmp_path, background=False)
    with pytest.warns(pc.errors.CheckpointWarning, match=r"state.metrics/odd holds set, which no checkpoint can"):
        end = fit(compose(loop_events, [hiding]), start(), BATCHES, checkpoints=settings)
    assert end.timestamp.batch == 12
    assert [name.partition("-")[0] for name in names(tmp_path)] == ["ep0001", "ep0002"]


@pytest.mark.usefixtures("patience")
def test_a_donating_step_saves_complete_states(tmp_path: pathlib.Path) -> None:
    whole = fit(step(), start(), BATCHES)
    settings = Checkpoints(tmp_path, every="1ba", keep=None)
    fast = pc.compile(step(), backend="eager", quiet=True)
    for state in training(fast, start(), BATCHES, checkpoints=settings):
        if state.timestamp.batch == 7:
            break
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.errors.CheckpointWarning)  # it was compiled then, and is not now
        again = fit(step(), start(), BATCHES, checkpoints=settings, resume="auto")
    torch.testing.assert_close(again.params, whole.params)
