import errno
import json
import math
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from purecompose import (
    Algorithm,
    Event,
    State,
    compose,
    fit,
    loop_events,
    losses,
    optim,
    population,
    stack_states,
    tree,
)
from purecompose.algorithms import label_smoothing
from purecompose.errors import CheckpointWarning, MismatchError
from purecompose.observers import read_records, records as files
from purecompose.records import RunFolder, folder, read_run
from tests.records.run_helpers import STEP, make_batches, make_state, train, uninterrupted


CONFIG = {"lr": 0.5, "model": {"name": "linear", "widths": [4, 3]}, "note": None}


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("[!.]*")}


def test_a_run_writes_all_files(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "first", CONFIG, command=["python", "a b.py", "--lr", "0.5"]) as run:
        state = train(run)
        run.finish({"checksum": "abc", "norm": torch.tensor(2.0), "worst": math.inf})
    assert names_in(run.path) == {
        *("config.toml", "command.txt", "versions.json", "plan.txt", "history.json", "records.jsonl"),
        *("checkpoints", "result.json", "report.html"),
    }
    assert tree.equal(state.params, uninterrupted().params)  # recording did not change the run
    assert tomllib.loads((run.path / "config.toml").read_text()) == {
        "lr": 0.5,
        "model": {"name": "linear", "widths": [4, 3]},
    }
    assert (run.path / "command.txt").read_text() == "python 'a b.py' --lr 0.5\n"
    assert (run.path / "plan.txt").read_text() == f"{STEP.plan(make_state())}\n"
    versions = json.loads((run.path / "versions.json").read_text())
    assert {**versions, "torch": torch.__version__, "device": "cpu", "threads": torch.get_num_threads()} == versions
    assert {"purecompose", "optree", "python", "platform", "processor"} <= set(versions)

    records = read_records(run.path / "records.jsonl")
    assert [record["batch"] for record in records if "loss" in record] == list(range(1, 13))
    assert {"lr", "memory/peak", "speed/batches", "time/seconds"} <= set(records[-2])
    result = json.loads((run.path / "result.json").read_text())
    assert (result["batches"], result["epochs"], result["samples"]) == (12, 3, 96)
    assert result["metrics"] == {"loss": records[-2]["loss"], "eval/accuracy": records[-1]["eval/accuracy"]}
    assert (result["checksum"], result["norm"], result["worst"]) == ("abc", 2.0, "inf")
    assert 0 < result["evaluation_seconds"] < result["seconds"]


def test_a_killed_run_resumes_in_its_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", CONFIG, command="train.py")
    assert run.resume is None and not run.is_resumed
    train(run, until=6)  # in the middle of the second epoch: the checkpoint is that of batch 4
    del run
    with RunFolder(tmp_path / "run", {**CONFIG, "lr": 0.6}, command="train.py --resume", resume=True) as run:
        assert run.resume == "auto" and run.is_resumed
        state = train(run)
    assert tree.equal(state.params, uninterrupted().params)
    found = read_run(run.path)
    assert [record["batch"] for record in found.records if "loss" in record] == list(range(1, 13))
    first, second = found.starts
    assert (first.batch, first.outcome, second.batch, second.until) == (0, "killed", 4, 12)
    assert first.until == 6  # from the records, in which batches 5 and 6 have been replaced
    assert first.seconds > max(one["time/seconds"] for one in found.records if one["batch"] <= 4 and "lr" in one)
    assert second.outcome == "finished"
    assert second.changed == {"lr": [0.5, 0.6]} and first.changed == {}
    assert (found.config["lr"], found.command) == (0.6, "train.py")
    assert found.result is not None and found.result["seconds"] == pytest.approx(first.seconds + second.seconds)
    times = [record["time/seconds"] for record in found.records if "time/seconds" in record]
    assert times == sorted(times)
    assert "continued 1 time" in (run.path / "report.html").read_text()


def test_a_finished_run_can_be_prolonged_without_new_settings(tmp_path: Path) -> None:
    with RunFolder(tmp_path, CONFIG) as run:
        train(run)
    run = RunFolder(tmp_path, resume=True)
    assert read_run(tmp_path).result is not None  # until the longer run begins
    with run:
        train(run, duration="5ep")
    found = read_run(tmp_path)
    assert [start.batch for start in found.starts] == [0, 12]
    assert found.result is not None and found.result["batches"] == 20
    assert found.config == {"lr": 0.5, "model": {"name": "linear", "widths": [4, 3]}}


def test_a_run_that_was_at_its_end_keeps_the_settings_that_it_was_trained_with(tmp_path: Path) -> None:
    with RunFolder(tmp_path, CONFIG, command="train.py") as run:
        train(run)
    kept = {name: (tmp_path / name).read_text() for name in ("config.toml", "plan.txt", "versions.json", "command.txt")}
    before = read_run(tmp_path)
    other = compose(loop_events, [label_smoothing(0.3)])
    with RunFolder(tmp_path, {**CONFIG, "lr": 0.9}, command="other.py", resume=True) as run:
        run.begin(other, make_state())
        kept_by = {"observers": run.observer, "checkpoints": run.checkpoints(), "resume": run.resume}
        with pytest.warns(CheckpointWarning, match="label_smoothing"):
            fit(other, make_state(), make_batches(), **kept_by)
    after = read_run(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in kept} == kept
    assert after.trained == before.trained
    assert after.result is not None and after.result["batches"] == 12
    assert [start.changed for start in after.starts] == [{}]


def test_an_exception_is_recorded_and_raised(tmp_path: Path) -> None:
    def give_up(event: Event, state: Any) -> None:
        if event is Event.EPOCH_END:
            raise ArithmeticError("the loss\nis odd")

    with pytest.raises(ArithmeticError), RunFolder(tmp_path / "run") as run:
        run.begin(STEP, make_state())
        fit(STEP, make_state(), make_batches(), observers=[run.observer, give_up])
    found = read_run(run.path)
    assert found.starts[0].outcome == "ArithmeticError: the loss is odd"
    assert found.result is None
    assert [record["batch"] for record in found.records] == [1, 2, 3, 4]
    assert "the loss is odd" in (run.path / "report.html").read_text()


def test_a_population_has_records_of_all_members(tmp_path: Path) -> None:
    states = stack_states([make_state(), make_state()])
    with RunFolder(tmp_path / "run") as run:
        step = population(STEP, 2)
        run.begin(step, states)
        fit(step, states, make_batches(), observers=run.observer)
    found = read_run(run.path)
    assert all(len(record["loss"]) == 2 for record in found.records)
    assert (found.trained["members"], found.trained["weights"]) == (2, 15)
    assert found.result is not None and len(found.result["metrics"]["loss"]) == 2


def test_the_commit_of_the_working_directory_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b.test")
        return subprocess.run(["git", *author, *words], check=True, capture_output=True, text=True).stdout.strip()

    def commit(name: str) -> str | None:
        RunFolder(tmp_path / name).begin(STEP, make_state())
        return json.loads((tmp_path / name / "versions.json").read_text()).get("commit")

    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit("none") is None
    git("init", "-q")
    Path("train.py").write_text("one")
    git("add", "train.py")
    git("commit", "-q", "-m", "one")
    assert commit("clean") == git("rev-parse", "HEAD")
    Path("train.py").write_text("two")
    assert commit("changed") == f"{git('rev-parse', 'HEAD')}-dirty"


def test_files_that_cannot_be_written_cause_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: Any) -> None:
        raise OSError(28, "No space left on device")

    run = RunFolder(tmp_path / "run")
    state = make_state()
    run.begin(STEP, state)
    monkeypatch.setattr("purecompose.records.folder.write_json", full)
    with pytest.warns(RuntimeWarning, match=r"history.json cannot be written: .*No space left") as told:
        fit(STEP, state, make_batches(), observers=run.observer)
    assert len(told) == 1
    with pytest.warns(RuntimeWarning, match="result.json was not written: OSError"):
        run.finish()
    assert len(read_run(run.path).records) == 12
    assert "report.html" in names_in(run.path)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_something_else_is_refused_and_unchanged(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.tex").write_text("chapter one")
    with pytest.raises(
        FileExistsError, match=r"neither empty nor the folder of a run: it has no config.toml, but thesis.tex"
    ):
        RunFolder(tmp_path, resume=resume)
    assert names_in(tmp_path) == {"thesis.tex"}
    with pytest.raises(NotADirectoryError, match=r"thesis.tex is a file"):
        RunFolder(tmp_path / "thesis.tex", resume=resume)


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder(tmp_path, {"seed": 1})
    with pytest.raises(FileExistsError, match="resume=True"):
        RunFolder(tmp_path, {"seed": 2})
    assert read_run(tmp_path).config == {"seed": 1}


def test_wrong_arguments_leave_no_folder(tmp_path: Path) -> None:
    path: Any = tmp_path / "run"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"config": {"net": object()}}, "net: expected a string"),
        ({"command": 3}, "command: expected a string or a list"),
        ({"command": ["a", 1]}, "command: expected a string or a list"),
        ({"resume": "auto"}, "resume: expected True or False"),
        ({"every": "soon"}, "every"),
    ]
    for arguments, words in wrong:
        with pytest.raises((TypeError, ValueError), match=words):
            RunFolder(path, **arguments)
    assert not path.exists()


def test_the_command_is_by_default_that_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "my script.py"])
    RunFolder(tmp_path / "a")
    assert read_run(tmp_path / "a").command == "python 'my script.py'"
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    RunFolder(tmp_path / "b")
    assert read_run(tmp_path / "b").command is None


def test_a_plan_that_needs_a_batch_does_not_stop_the_run(tmp_path: Path) -> None:
    def match(event: Event, state: Any) -> bool:
        return event is Event.AFTER_DATALOADER and len(state.batch[0]) > 2

    step = compose(loop_events, [Algorithm("large", match, lambda event, state: state)])
    run = RunFolder(tmp_path / "run")
    run.begin(step, make_state())
    assert "begin(step, state, batch)" in read_run(run.path).plan
    run.begin(step, make_state(), make_batches(1)[0])
    assert "large" in read_run(run.path).plan


def test_two_calls_of_fit_are_two_starts(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as run:
        state = train(run, duration="1ep")
        fit(STEP, state, make_batches(), duration="2ep", observers=run.observer)
    starts = read_run(run.path).starts
    assert [(start.batch, start.until, start.outcome) for start in starts] == [(0, 4, "finished"), (4, 8, "finished")]


def test_a_folder_that_was_left_open_writes_nothing_between_the_records_of_the_next(tmp_path: Path) -> None:
    left = RunFolder(tmp_path / "run")
    train(left, until=6)
    with RunFolder(tmp_path / "run", resume=True) as run:
        train(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        left._records.close()
    batches = [record["batch"] for record in read_run(tmp_path / "run").records]
    assert batches == sorted(batches)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("[!.]*") if file.is_file()}


def test_a_refused_run_changes_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path, CONFIG) as run:
        train(run)
    (tmp_path / "command.txt").unlink()
    before = contents(tmp_path)
    net = torch.nn.Linear(4, 3, bias=False)
    other = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="9ep")
    with pytest.raises(MismatchError), RunFolder(tmp_path, {"lr": 7.0}, command="other", resume=True) as run:
        run.begin(STEP, other)
        fit(STEP, other, make_batches(), observers=run.observer, checkpoints=run.checkpoints(), resume=run.resume)
    assert contents(tmp_path) == before
    RunFolder(tmp_path, resume=True).finish()
    assert contents(tmp_path) == before
    RunFolder(tmp_path, resume=True).finish({"checksum": "abc"})
    found = read_run(tmp_path).result
    assert found is not None and (found["batches"], found["checksum"]) == (12, "abc")
    assert contents(tmp_path) == before | {"result.json": (tmp_path / "result.json").read_bytes()}


def test_a_runs_folder_does_not_follow_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def leave(event: Event, state: Any) -> None:
        if event is Event.EPOCH_END:
            monkeypatch.chdir(tmp_path / "elsewhere")

    with RunFolder("run") as run:
        run.begin(STEP, make_state())
        kept = run.checkpoints(background=False)
        fit(STEP, make_state(), make_batches(), observers=[run.observer, leave], checkpoints=kept)
    assert run.path == tmp_path / "run"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    found = read_run(tmp_path / "run")
    assert found.result is not None and len(found.records) == 12 and found.checkpoints[0].batch == 12


def test_half_written_files_are_removed_when_the_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purecompose.run.saving.folder._LONG", -1.0)
    RunFolder(tmp_path).stop("enough")
    left = tmp_path / ".history.json.99999999-00000000.writing"
    left.write_text("half")
    run = RunFolder(tmp_path, resume=True)
    assert left.exists()  # the run has not begun
    train(run, until=1)
    assert not left.exists()


@pytest.mark.parametrize("place", ["FIT_END", "_write_result", "write_report"])
def test_a_run_that_died_between_its_last_checkpoint_and_the_end_of_its_folder_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with RunFolder(tmp_path / "whole", CONFIG) as run:
        train(run)
    whole = read_run(run.path)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        if place == "FIT_END":  # while signals are deferred, this is how the process ends in the last evaluation
            observe = RunFolder.__call__
            patch.setattr(RunFolder, "__call__", lambda *a: die() if a[1] is Event.FIT_END else observe(*a))
        else:
            patch.setattr(*((RunFolder, place) if place == "_write_result" else (folder, place)), die)
        with RunFolder(tmp_path / "run", CONFIG) as run:
            train(run)
    assert not (run.path / "report.html").exists()
    with RunFolder(tmp_path / "run", {**CONFIG, "lr": 9.0}, resume=True) as run:
        assert not run.was_complete
        train(run)
    found = read_run(run.path)
    assert found.result is not None and whole.result is not None
    same = {name for name, value in whole.result.items() if found.result[name] == value}
    assert same >= {"metrics", "batches", "epochs", "samples"}
    assert [one["batch"] for one in found.records] == [one["batch"] for one in whole.records]
    assert (found.config["lr"], found.starts[-1].outcome) == (0.5, "finished")
    assert (run.path / "report.html").exists()
    before = {file: file.read_bytes() for file in run.path.glob("[!.]*.*")}
    with RunFolder(run.path, CONFIG, resume=True) as run:
        train(run)  # now it is complete, and stays as it is
    assert run.was_complete and before == {file: file.read_bytes() for file in run.path.glob("[!.]*.*")}


def test_the_result_is_that_of_the_run_if_its_records_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(tmp_path / "whole", CONFIG) as run:
        train(run)
    expected = read_run(run.path).result
    append = files._append

    def full(path: Path, text: str) -> None:
        if '"batch": 9,' in text:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, text)

    monkeypatch.setattr(files, "_append", full)
    with pytest.warns(RuntimeWarning, match="records"), RunFolder(tmp_path / "run", CONFIG) as run:
        train(run)
    found = read_run(run.path)
    assert expected is not None and found.result is not None and found.result["metrics"] == expected["metrics"]
    assert found.last_metrics != expected["metrics"]  # the file lacks the newest records
    assert run.unwritten == ("records.jsonl",)
    assert found.starts[-1].outcome == "finished, but 5 records could not be written"
    assert "It finished, but 5 records could not be written." in (run.path / "report.html").read_text()


def test_records_up_to_a_checkpoint_are_on_disk_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[str, bytes] = {}
    checkpoints: dict[str, list[int]] = {}
    sync, rename = os.fsync, Path.rename

    def note(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced[path.name] = path.read_bytes() if path.is_file() else b""
        sync(handle)

    def renamed(path: Path, target: Path) -> Path:
        if target.name.startswith("ep"):  # from here on a run may continue from this checkpoint
            lines = synced.get("records.jsonl", b"").splitlines()
            checkpoints[target.name] = [record["batch"] for record in map(json.loads, lines) if "loss" in record]
            assert "run" in synced, "the name of the file is not on disk"
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", renamed)
    with RunFolder(tmp_path / "run", CONFIG) as run:
        train(run)
    assert checkpoints == {f"ep{i:04d}-ba{4 * i:08d}": list(range(1, 4 * i + 1)) for i in (1, 2, 3)}


def test_a_signal_ends_a_run_without_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "write_report", lambda *_, **__: pytest.fail("drawn"))
    with pytest.raises(SystemExit), RunFolder(tmp_path, CONFIG) as run:
        train(run, until=2)
        raise SystemExit(143)
    assert read_run(tmp_path).starts[-1].outcome == "SystemExit: 143" and not run.unwritten


def test_the_report_of_an_earlier_part_does_not_make_a_folder_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(tmp_path / "run", {}) as run:
        train(run)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folder, "write_report", killed)
        with RunFolder(tmp_path / "run", resume=True) as run:
            train(run, duration="4ep")
    with RunFolder(tmp_path / "run", resume=True) as run:
        assert not run.was_complete
        train(run, duration="4ep")
    assert (run.path / "report.html").exists()
