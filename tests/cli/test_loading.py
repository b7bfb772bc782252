"""Selection of a run's checkpoint, and which one is the best."""

import dataclasses
import math
import os
import pathlib
from typing import Any

import pytest
from torch import nn

from purecompose import State, losses, optim
from purecompose.cli import load_run
from purecompose.cli.options import UsageError
from purecompose.cli.results import KeptRun, checkpoint_of
from purecompose.cli.setup import IMAGES, TEXT
from purecompose.run.saving.files import to_json
from purecompose.run.saving.folder import read_index
from purecompose.saving import save


NAN = math.nan


def index_of(run: Any, which: str, kind: Any) -> Any:
    return read_index(checkpoint_of(run, which, kind))


def make_state() -> State:
    return State.create(nn.Linear(2, 2), loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="8ba")


def make_run(folder: pathlib.Path, *metrics: dict[str, Any]) -> pathlib.Path:
    """Make a run's folder with checkpoints that have these metrics, the oldest first."""
    folder.mkdir()
    (folder / "config.toml").write_text("seed = 7\n")
    for number, found in enumerate(metrics, 1):
        path = save(make_state(), folder / "checkpoints" / f"ep0001-ba{number:08d}")
        (path / "index.json").write_text(to_json(dataclasses.replace(read_index(path), metrics=found)))
    return folder


@pytest.mark.parametrize(
    ("kind", "name", "values", "best"),
    [
        (IMAGES, "eval/accuracy", (0.25, 0.5, 0.125), 0.5),
        (IMAGES, "eval/accuracy", (NAN, 0.25, 0.5), 0.5),
        (IMAGES, "eval/accuracy", (0.25, 0.5, NAN), 0.5),
        (TEXT, "eval/loss", (2.0, NAN, 1.0, 3.0), 1.0),
        (TEXT, "val/loss", (2.0, 1.0, NAN), 1.0),
        (TEXT, "eval/loss", (math.inf, NAN), math.inf),
    ],
)
def test_the_best_one_is_chosen_among_comparable_checkpoints(
    kind: Any, name: str, values: tuple[float, ...], best: float, tmp_path: pathlib.Path
) -> None:
    run = make_run(tmp_path / "a", *({name: value} for value in values))
    assert index_of(run, "best", kind).metrics == {name: best}
    newest = index_of(run, "newest", kind).metrics[name]
    assert newest == values[-1] or math.isnan(newest) and math.isnan(values[-1])


def test_the_earliest_of_equal_checkpoints_is_the_best(tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path / "a", *({"eval/accuracy": 0.5, "eval/loss": float(loss)} for loss in (1, 2, 3)))
    assert index_of(run, "best", IMAGES).metrics["eval/loss"] == 1.0


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"eval/accuracy": [0.5, 0.25]}, "has a single number for accuracy"),  # of a population
        ({"eval/accuracy": NAN}, "has a single number for accuracy, which selects the best one; give newest"),
        ({"eval/loss": 1.0}, "has a single number for accuracy"),
        ({}, "has a single number for accuracy"),
    ],
)
def test_best_is_refused_if_no_checkpoint_has_the_metric(metrics: Any, message: str, tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path / "a", metrics, metrics)
    with pytest.raises(UsageError, match=message):
        index_of(run, "best", IMAGES)
    assert index_of(run, "newest", IMAGES).batch == 0


def test_a_checkpoint_is_found_from_any_working_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a", {"eval/loss": 1.0}, {"eval/loss": 2.0})
    first = run / "checkpoints" / "ep0001-ba00000001"
    for where, path in [
        (tmp_path, "a/checkpoints/ep0001-ba00000001"),
        (run, "checkpoints/ep0001-ba00000001"),
        (run / "checkpoints", "ep0001-ba00000001"),
        (first, "."),
        (run / "checkpoints" / "ep0001-ba00000002", "../ep0001-ba00000001"),
    ]:
        monkeypatch.chdir(where)
        assert KeptRun(path).settings()["seed"] == 7
        assert index_of(path, "newest", IMAGES).metrics == {"eval/loss": 1.0}
        assert index_of(path, "ep0001-ba00000001", IMAGES).metrics == {"eval/loss": 1.0}


def test_the_path_of_a_checkpoint_cannot_select_another_one(tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path / "a", {"eval/accuracy": 1.0}, {"eval/accuracy": 0.5})
    for which in ("best", "ep0001-ba00000001"):
        with pytest.raises(UsageError, match=f"ba00000002 is a checkpoint itself; for {which} give the run's folder"):
            index_of(run / "checkpoints" / "ep0001-ba00000002", which, IMAGES)
    with pytest.raises(UsageError, match="b is not a run's folder"):
        load_run(tmp_path / "b", "best")


def test_malicious_settings_are_refused_immediately(tmp_path: pathlib.Path) -> None:
    run = make_run(tmp_path / "a", {"eval/accuracy": 1.0})
    (run / "config.toml").unlink()
    os.mkfifo(run / "config.toml")
    with pytest.raises(UsageError, match="config.toml cannot be read: not a regular file"):
        load_run(run, "newest")
    (run / "config.toml").unlink()
    (run / "config.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(UsageError, match="config.toml is not valid TOML"):
        load_run(run, "newest")
