"""`train --tracker`: names of trackers make observers, also of services, which get the settings of the run."""

import csv
import pathlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from purecompose import observers
from purecompose.cli import training


Run = Callable[..., tuple[int, str, str]]
SMALL = ("--model", "mlp(hidden=4)", "--quiet", "--algorithms", "none")


def rows_of(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("ignore:the run is")
def test_a_table_has_what_the_records_have_and_continues(run: Run) -> None:
    status, _, err = run("train", *SMALL, "--duration", "3ba", "--out", "a", "--tracker", "csv")
    assert status == 0, err
    with open("a/metrics.csv", "a", encoding="utf-8") as file:
        file.write("3,0,1")  # of a process that was killed
    status, _, err = run(
        "train", "--out", "a", "--resume", "--duration", "5ba", "--quiet", "--tracker", "csv(every='2ba')"
    )
    assert status == 0, err
    rows, records = rows_of("a/metrics.csv"), observers.read_records("a/records.jsonl")
    losses = {record["batch"]: record["loss"] for record in records if "loss" in record}
    assert {int(row["batch"]): float(row["loss"]) for row in rows if row["loss"]} == {
        batch: losses[batch] for batch in (1, 2, 3, 4)
    }
    assert [int(row["batch"]) for row in rows if row["eval/loss"]] == [3, 5]
    assert all(row["lr"] for row in rows if row["loss"])


def test_several_trackers_and_the_settings_of_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, Any]]] = []

    def init(**settings: Any) -> Any:
        started.append(settings)
        return SimpleNamespace(
            log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append((-1, {}))
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    text = "wandb(project='digits', every='2ba'), csv('t/x.csv')"
    status, _, err = run("train", *SMALL, "--duration", "4ba", "--seed", "3", "--out", "runs/a", "--tracker", text)
    assert status == 0, err
    assert [(one["project"], one["name"], one["config"]["seed"]) for one in started] == [("digits", "a", 3)]
    assert [step for step, values in logged if "loss" in values] == [2, 4] and logged[-1][0] == -1
    assert len([row for row in rows_of("t/x.csv") if row["loss"]]) == 4


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("tensorbord", 2, "--tracker: no tracker is called 'tensorbord'; did you mean 'tensorboard'?"),
        ("csv", 2, "--tracker: csv: give a path in the call, or the run's folder, --out FOLDER"),
        ("csv('x.csv', every='5x')", 2, "no unit of time is called 'x'"),
        ("csv(file=1)", 2, "--tracker: csv: "),
        ("wandb", 1, "WandB needs wandb; install it with `pip install 'purecompose[wandb]'`"),
        ("mlflow", 1, "MLflow needs mlflow; install it with `pip install 'purecompose[mlflow]'`"),
    ],
)
def test_wrong_trackers_are_reported_before_the_data_are_loaded(
    text: str, status: int, message: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("purecompose.cli.setup.load_data", None)
    found, _, err = run("train", "--tracker", text)
    assert found == status and message in err and err.count("\n") == 1


def test_tensorboard_writes_into_the_folder_of_the_run(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboard")
    (tracker,) = training.trackers_of(["tensorboard"], tmp_path, {})
    assert isinstance(tracker, observers.TensorBoard)
    tracker.close()
