"""Runs with a folder, from the shell: stopped, continued, evaluated, drawn."""

import csv
import errno
import json
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Event, evaluate, fit, metrics, to_module, tree
from purecompose.cli import load_run
from purecompose.cli.options import UsageError
from purecompose.records import RunFolder
from purecompose.run.saving import folder


SMALL = ("--model", "mlp(hidden=16)", "--duration", "2ep", "--quiet")

Run = Callable[..., tuple[int, str, str]]


def checksum(out: str) -> str:
    found = re.search(r"checksum\W+([0-9a-f]{16})", out)
    assert found is not None, out
    return found[1]


def test_a_run_has_a_folder_with_all_records(run: Run) -> None:
    status, out, err = run("train", *SMALL, "--out", "a")
    assert (status, err) == (0, "")
    folder = pathlib.Path("a")
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.toml", "versions.json", "plan.txt", "records.jsonl", "checkpoints", "report.html"}
    result = json.loads((folder / "result.json").read_text())
    assert result["checksum"] == checksum(out)
    right = round(360 * result["metrics"]["eval/accuracy"])
    assert f"{right} of 360 examples are classified correctly" in (folder / "report.html").read_text()
    again = run("train", "--config", "a/config.toml", "--quiet")
    assert checksum(again[1]) == checksum(out)


@pytest.mark.parametrize(
    "number, status, word",
    [pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.slow), (signal.SIGINT, 130, "interrupted")],
)
def test_a_stopped_run_resumes_to_the_same_bits(
    run: Run, number: signal.Signals, status: int, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checksum(run("train", *SMALL)[1])
    observer = RunFolder.observer.fget
    assert observer is not None

    def stopping(self: RunFolder) -> Any:
        inner = observer(self)

        def observe(event: Event, state: Any) -> None:
            inner(event, state)
            if event is Event.BATCH_END and state.timestamp.batch == 30:
                signal.raise_signal(number)

        return observe

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "observer", property(stopping))
        found, _, err = run("train", *SMALL, "--out", "a")
    assert found == status
    assert f"{word}: the run is saved in" in err and "the same command with --resume continues from there" in err
    status, out, err = run("train", "--out", "a", "--resume", "--quiet")
    assert (status, checksum(out)) == (0, whole), err


def test_resume_starts_a_new_run_and_is_required_for_an_existing_one(run: Run) -> None:
    status, out, _ = run("train", *SMALL, "--out", "a", "--resume")
    assert status == 0
    status, _, err = run("train", *SMALL, "--out", "a")
    assert status == 2 and "a already holds a run; continue it with --resume" in err
    _, again, _ = run("train", "--out", "a", "--resume")
    assert checksum(again) == checksum(out)
    assert "had already ended, after 2ep" in again and " ba/s" not in again
    status, _, err = run("train", "--resume")
    assert status == 2 and "give the folder of the run, --out FOLDER" in err


@pytest.mark.slow
def test_a_checkpoint_of_another_network_is_an_error(run: Run) -> None:
    run("train", *SMALL, "--out", "a")
    status, _, err = run("train", "--out", "a", "--resume", "--quiet", "--set", "model.hidden=8")
    assert status == 2 and "--model: mlp(hidden=16) in the run, mlp(hidden=8) here" in err
    # Tensors of the same shapes may still belong to another network.
    status, _, err = run("train", "--out", "a", "--resume", "--quiet", "--set", "model.dropout=0.1")
    assert status == 2 and "--model: mlp(hidden=16) in the run" in err
    assert run("train", "--out", "a", "--resume", "--quiet", "--model", "mlp( hidden = 16 )")[0] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run is .* long, and was")
def test_settings_that_may_change_are_reported_and_are_not_errors(run: Run) -> None:
    run("train", *SMALL, "--out", "a")
    changes = ("--duration", "3ep", "--keep", "5")
    status, _, err = run("train", "--out", "a", "--resume", *changes, "--optimizer", "sgd(0.1, momentum=0.9)")
    assert status == 1 and "optimizer: adam(lr=0.005" in err and "sgd(lr=0.1" in err
    status, out, err = run("train", "--out", "a", "--resume", *changes)
    assert (status, err) == (0, "") and "  continues with --duration 3ep (2ep before), --keep 5 (3 before)\n" in out
    assert "  continues with --" not in run("train", "--out", "a", "--resume")[1]


def test_the_best_checkpoints_are_kept_and_listed(run: Run) -> None:
    """The table at the end names them, and each name is one that `evaluate` accepts."""
    options = (
        "--keep",
        "1",
        "--keep-best",
        "2",
        "--eval-every",
        "11ba",
        "--validation",
        "0.2",
        "--checkpoint-every",
        "1dur",
    )
    out = run("train", *SMALL, "--out", "a", *options)[1]
    listed = re.findall(r"([\d.]+)% on validation data, (ep\d+-ba\d+)", out)
    ranked = pc.saving.ranked("a/checkpoints")
    assert "best checkpoints" in out and len(listed) == 2 and len(ranked) in (2, 3)
    assert [(f"{100 * value:.2f}", path.name) for path, value in ranked[:2]] == listed
    assert ranked[0].value >= ranked[1].value == max(value for _, value in ranked[1:])
    best, second = (
        json.loads(run("evaluate", "a", "--checkpoint", name, "--json")[1]) for name in ("best", listed[1][1])
    )
    assert best["checkpoint"].endswith(listed[0][1]) and second["checkpoint"].endswith(listed[1][1])


@pytest.mark.slow
def test_checkpoints_are_evaluated(run: Run) -> None:
    out = run("train", *SMALL, "--out", "a")[1]
    accuracy = re.search(r"test accuracy\W+([\d.]+)%", out)
    assert accuracy is not None
    told = json.loads(run("evaluate", "a", "--json")[1])
    assert round(100 * told["accuracy"], 2) == float(accuracy[1]) and told["batch"] == 44
    first = json.loads(run("evaluate", "a", "--checkpoint", "ep0001-ba00000022", "--json")[1])
    named = json.loads(run("evaluate", "a/checkpoints/ep0001-ba00000022", "--json")[1])
    assert first == named and first["batch"] == 22
    best = json.loads(run("evaluate", "a", "--checkpoint", "best", "--json")[1])
    assert best["accuracy"] == max(first["accuracy"], told["accuracy"])
    table = run("evaluate", "a")[1]
    assert re.search(r"^accuracy +\d+\.\d+%$", table, re.M)
    for arguments, said in [
        (("evaluate", "nowhere"), "not a run's folder"),
        (
            ("evaluate", "a", "--checkpoint", "x"),
            "has no x; there are newest, best, ep0001-ba00000022, ep0002-ba00000044",
        ),
        (("evaluate", "a", "--data", "nowhere"), "--data"),
    ]:
        status, _, err = run(*arguments)
        assert status == 2 and said in err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run is .* long, and was")
def test_a_run_can_be_resumed_in_python(run: Run) -> None:
    run("train", *SMALL, "--out", "a")
    told = json.loads(run("evaluate", "a", "--json")[1])
    loaded = load_run("a")
    assert str(loaded.checkpoint) == told["checkpoint"] and loaded.state.timestamp.batch == told["batch"]
    found = evaluate(loaded.state, loaded.test_data, {"accuracy": metrics.accuracy}, step=loaded.step)
    assert found["accuracy"] == pytest.approx(told["accuracy"])
    net = to_module(loaded.state).eval()
    inputs = next(iter(loaded.test_data))[0]
    torch.testing.assert_close(net(inputs), loaded.state.forward(inputs))
    went_on = fit(loaded.step, loaded.state, loaded.train_data, duration="3ep")
    assert went_on.timestamp.epoch == 3
    folder = pathlib.Path(loaded.checkpoint)
    by_name = load_run(folder, data="digits")
    assert not tree.diff(by_name.state, load_run("a", folder.name).state)
    with pytest.raises(UsageError, match="b is not a run's folder"):
        load_run("b")


@pytest.mark.slow
def test_predictions_are_written(run: Run) -> None:
    run("train", *SMALL, "--out", "a")
    told = json.loads(run("evaluate", "a", "--json")[1])
    status, out, _ = run("predict", "a", "--out", "p.csv")
    assert status == 0 and "360 predictions" in out
    rows = list(csv.DictReader(pathlib.Path("p.csv").read_text().splitlines()))
    assert len(rows) == 360
    assert sum(row["class"] == row["target"] for row in rows) / 360 == pytest.approx(told["accuracy"])
    assert run("predict", "a")[1].splitlines()[1].startswith("0,")
    status, _, err = run("predict", "a", "--out", "nowhere/p.csv")
    assert status == 2 and "--out: nowhere/p.csv: there is no folder nowhere; create it" in err
    pathlib.Path("folder.csv").mkdir()
    status, _, err = run("predict", "a", "--out", "folder.csv")
    assert status == 2 and "--out: folder.csv is a folder; expected a file's name" in err


@pytest.mark.slow
def test_populations_train_from_the_shell(run: Run) -> None:
    status, out, _ = run("train", *SMALL, "--seeds", "3", "--out", "many")
    assert status == 0
    found = re.search(r"([\d.]+)% \(([\d.]+)% to ([\d.]+)%\)", out)
    assert found is not None and float(found[2]) <= float(found[1]) <= float(found[3])
    alone = run("train", *SMALL, "--seed", "1")[1]
    accuracy = re.search(r"test accuracy\W+([\d.]+)%", alone)
    told = json.loads(run("evaluate", "many", "--json")[1])
    assert accuracy is not None and len(told["accuracy"]) == 3
    # Members draw the same numbers as single runs; their batches are in the first one's order.
    assert all(0.3 < share <= 1 for share in told["accuracy"])
    status, _, err = run("predict", "many")
    assert status == 2 and "population" in err
    status, _, err = run("train", *SMALL, "--seeds", "2", "--patience", "1ep")
    assert status == 2 and "different times" in err


@pytest.mark.filterwarnings("always:.*without confusion matrix")
def test_a_report_shows_runs_and_their_mistakes(run: Run) -> None:
    for name, seed in (("a", "0"), ("b", "1")):
        run("train", *SMALL, "--seed", seed, "--out", name)
    status, out, err = run("report", "a", "b", "--out", "both.html")
    assert (status, err) == (0, "") and "the report of 2 runs in both.html" in out
    page = pathlib.Path("both.html").read_text()
    accuracy = json.loads(run("evaluate", "b", "--json")[1])["accuracy"]
    assert "Classes: a" in page and f"{round(360 * accuracy)} of 360 examples are classified correctly" in page
    assert "data:image/png" in page and page.count("differs") >= 2
    assert run("report", "a", "--curves-only", "--out", "one.html")[0] == 0
    assert "classified correctly" not in pathlib.Path("one.html").read_text()
    shutil.rmtree("b/checkpoints")
    status, _, err = run("report", "b", "--out", "one.html")
    assert status == 0 and "b: without confusion matrix and worst examples: there is no checkpoint in" in err
    status, _, err = run("report", "nowhere")
    assert status == 2 and "report: error: there is no folder nowhere" in err


def test_the_runs_of_a_folder_are_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("runs") == (2, "", "python -m purecompose runs: error: there is no folder runs\n")
    for seed in ("0", "1"):
        run("train", *SMALL, "--seed", seed, "--set", f"optimizer.lr=0.0{seed}1", "--out", f"runs/{seed}")
    status, out, _ = run("runs", "--sort", "optimizer.lr")
    head, _, first, second = out.splitlines()
    assert status == 0 and head.split()[:3] == ["run", "status", "done"] and "eval/accuracy (best)" in head
    assert first.startswith("0 ") and "100%" in first and "seed=0" in first and "lr=0.001" in first
    assert second.startswith("1 ") and "digits" not in out
    assert "algorithms" not in out
    status, out, _ = run("runs", "--sort=-optimizer.lr", "--json")
    assert status == 0 and [json.loads(line)["name"] for line in out.splitlines()] == ["1", "0"]
    status, _, err = run("runs", "--sort", "sed")
    assert status == 2 and "did you mean 'seed'" in err
    pathlib.Path("runs/1/config.toml").write_text(f'text = "{"abcdefghi " * 9}"')
    assert f"text={('abcdefghi ' * 9)[:77]}..." in " ".join(run("runs")[1].split())


@pytest.mark.slow
def test_a_run_shows_its_plan(run: Run) -> None:
    run("train", *SMALL, "--algorithms", "label_smoothing(smoothing=0.3)", "--out", "a")
    status, out, _ = run("plan", "a", "--at", "1ep")
    assert status == 0 and out == run("plan", "--config", "a/config.toml", "--at", "1ep")[1]
    assert "label_smoothing" in out and "mixup" not in out
    assert "mixup" in run("plan", "a", "--algorithms", "mixup")[1]
    pathlib.Path("a/config.toml").write_text("seed = ")
    status, _, err = run("plan", "a")
    assert status == 2 and "plan: error: a/config.toml is not valid TOML" in err


def test_compiled_and_in_half_precision(run: Run) -> None:
    plain = run("train", *SMALL, "--algorithms", "none")
    half = run("train", *SMALL, "--algorithms", "none", "--precision", "bf16")
    assert plain[0] == half[0] == 0 and checksum(plain[1]) != checksum(half[1])
    status, _, err = run("train", *SMALL, "--precision", "fp8")
    assert status == 2 and "no precision is called 'fp8'; known: bf16, fp16, fp32" in err
    status, _, err = run("train", *SMALL, "--microbatches", "few")
    assert status == 2 and "expected a number of slices, at least 1, or auto" in err


@pytest.mark.slow
def test_a_stretched_run_equals_one_of_that_length_with_stretched_schedules(run: Run) -> None:
    curve = ("--schedule", "multi_step(milestones=['2ep'])")
    whole = ("--schedule", "multi_step(milestones=['1ep'])", "--duration", "2ep")
    shorter = (*curve, "--duration", "4ep", "--scale-schedule", "0.5")
    expected = run("train", *SMALL, *whole)[1]
    assert checksum(run("train", *SMALL, *shorter, "--out", "b")[1]) == checksum(expected)
    status, out, _ = run("train", "--out", "b", "--resume", "--quiet")
    assert status == 0 and "had already ended, after 2ep" in out
    assert run("train", "--out", "b", "--resume", "--quiet", "--scale-schedule", "0.25")[0] == 1
    for ratio, said in [("0", "expected a finite number > 0"), ("0.01", "is less than 1ep"), ("x", "--scale-schedule")]:
        status, _, err = run("train", *SMALL, "--scale-schedule", ratio)
        assert status == 2 and said in err


def test_settings_are_checked_before_there_is_a_folder(run: Run) -> None:
    for arguments, said in [
        (("--keep", "0"), "--keep: 0: expected a number of checkpoints, at least 1, or log"),
        (("--keep-best", "0"), "--keep-best: keep_best: expected an int >= 1, got 0"),
        (("--keep-best", "2", "--seeds", "2"), "--keep-best: Checkpoints: keep_best=2 needs the metric"),
        (("--checkpoint-every", "0ep"), "--checkpoint-every"),
        (
            ("--validation", "1.5"),
            "--validation: share of the training data: expected a finite number in [0, 1), got 1.5",
        ),
    ]:
        status, _, err = run("train", *SMALL, "--out", "a", *arguments)
        assert status == 2 and said in err, err
        assert not pathlib.Path("a").exists()


def test_a_run_that_diverges_fails(run: Run) -> None:
    status, _, err = run("train", *SMALL, "--algorithms", "none", "--optimizer", "sgd(lr=1e30)", "--out", "a")
    assert status == 1 and "nan" in err and "batch" in err
    assert "FloatingPointError" in pathlib.Path("a/history.json").read_text()


@pytest.mark.slow
def test_data_may_be_held_out_for_decisions(run: Run) -> None:
    status, out, _ = run("train", *SMALL, "--validation", "0.2", "--patience", "5ep", "--out", "a")
    assert status == 0 and re.search(r"best checkpoint\W+[\d.]+% on validation data, ep000", out)
    records = pathlib.Path("a/records.jsonl").read_text()
    assert records.count('"val/accuracy') == 2 and records.count('"eval/accuracy') == 1
    assert run("evaluate", "a", "--checkpoint", "best")[0] == 0
    status, out, _ = run("train", "--model", "mlp", "--validation", "0.2", "--duration", "9ep", "--quiet",
                         "--optimizer", "sgd(lr=0.0)", "--schedule", "constant", "--patience", "1ep")  # fmt: skip
    assert status == 0 and re.search(r"stopped early\W+the loss has not improved for 1ep", out)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_full_disk_fails_the_run_and_the_table_names_missing_checkpoints(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = folder.sync

    def full(path: pathlib.Path) -> None:
        if "ep0002" in str(path) or "report" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(folder, "sync", full)
    status, out, err = run("train", *SMALL, "--validation", "0.2", "--out", "a")
    assert status == 1
    assert "a/report.html" not in out and re.search(r"could not be written\W+checkpoints/ep0002-\S+\W+report.html", out)
    assert "the run in a is incomplete: checkpoints/ep0002-" in err
    assert re.search(r"best checkpoint\W+[\d.]+% on validation data, ep0001-", out)  # the only one that was written
