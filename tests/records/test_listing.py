import json
import math
from pathlib import Path
from typing import Any

import pytest

from purecompose.records import list_runs
from purecompose.records.layout import to_toml, write_json
from purecompose.records.listing import differing


def write_run(
    folder: Path,
    settings: dict[str, Any],
    accuracies: list[Any],
    *,
    day: int = 1,
    duration: str = "4ep",
    **trained: Any,
) -> None:
    """Write the folder of a run that has trained for an epoch of ten batches before each evaluation."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(settings))
    start = {"batch": 0, "started": f"2026-05-{day:02}T10:00:00+00:00", "seconds": 5.0, "outcome": "finished"}
    starts = [{**start, "until": 10 * len(accuracies)}]
    write_json(folder / "history.json", {"trained": {"duration": duration, **trained}, "starts": starts})
    records = [
        record
        for epoch, accuracy in enumerate(accuracies, 1)
        for record in (
            {"batch": 10 * epoch, "epoch": epoch, "loss": 1 / epoch},
            {"batch": 10 * epoch, "epoch": epoch, "eval/accuracy": accuracy, "eval/norm": 1.0},
        )
    ]
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "a", {"optimizer": "sgd(lr=0.1)", "seed": 0}, [0.5, 0.75, 0.625], day=1)
    write_run(
        tmp_path / "sweep/b",
        {"optimizer": "adam(lr=1e-3, eps=1e-8)", "note": "odd (text"},
        [0.25, 0.875],
        day=3,
        algorithms=["mixup(alpha=0.4, per_example=False)"],
    )
    write_run(tmp_path / "c", {"seed": 7, "model": {"width": 8}}, [[0.5, 0.625, 1.0]], day=2, duration="40ba")
    (tmp_path / "code").mkdir()
    (tmp_path / "code/config.toml").write_text("not = 'a run'")
    return tmp_path


def names(folder: Path, **options: Any) -> list[str]:
    return [row["name"] for row in list_runs(folder, **options)]


def test_a_row_tells_how_far_and_how_good_a_run_is(folder: Path) -> None:
    newest, middle, oldest = list_runs(folder)
    assert oldest == {
        "name": "a",
        "status": "finished",
        "progress": 0.75,
        "batches": 30,
        "started": "2026-05-01T10:00:00+00:00",
        "seconds": 5.0,
        "algorithms": [],
        "settings": {"optimizer": "sgd(lr=0.1)", "seed": 0},
        "metrics": {"loss": pytest.approx(1 / 3), "eval/accuracy": 0.625, "eval/norm": 1.0},
        "best": {"eval/accuracy": 0.75},
    }
    assert (newest["name"], middle["name"]) == ("sweep/b", "c")
    assert middle["progress"] == 0.25 and middle["settings"]["model.width"] == 8
    assert middle["metrics"]["eval/accuracy"] == [0.5, 0.625, 1.0] and middle["best"]["eval/accuracy"] == 0.625


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("eval/accuracy", "bca"),  # c has the median 0.625, as a has, and is newer
        ("-eval/accuracy", "cab"),
        ("best.eval/accuracy", "bac"),
        ("optimizer.lr", "bac"),
        ("-seed", "cab"),
        ("loss", "abc"),
        ("name", "acb"),
        ("started", "acb"),
    ],
)
def test_runs_are_sorted(folder: Path, sort: str, expected: str) -> None:
    found = "".join(name[-1] for name in names(folder, sort=sort))
    assert found == expected


def test_loss_is_the_metric_and_positional_arguments_have_names(tmp_path: Path) -> None:
    for name, accuracies, rate in (("a", [0.5], 0.1), ("b", [0.5, 0.5], 0.001)):
        write_run(tmp_path / name, {"loss": "cross_entropy", "optimizer": f"sgd({rate})"}, accuracies)
    assert names(tmp_path, sort="loss") == ["b", "a"] == names(tmp_path, sort="optimizer.lr")


def test_what_differs_are_arguments_and_not_how_they_are_written() -> None:
    written = {"algorithms": "mixup", "optimizer": "sgd(0.1)", "keep_best": 1, "seed": 0}
    rows: list[dict[str, Any]] = [
        {"settings": written, "algorithms": ["mixup(alpha=0.2)"]},
        {
            "settings": {**written, "algorithms": "mixup(0.2)", "optimizer": "sgd(lr=0.1)", "keep_best": 3},
            "algorithms": ["mixup(alpha=0.2)"],
        },
    ]
    assert differing(rows) == [{}, {}]
    rows.append({"settings": {**written, "optimizer": "sgd(0.5)"}, "algorithms": ["mixup(alpha=0.1)", "sam(rho=0.05)"]})
    plain = {"algorithms": "mixup", "mixup.alpha": "0.2", "optimizer.lr": "0.1"}
    other = {"algorithms": "mixup, sam", "mixup.alpha": "0.1", "optimizer.lr": "0.5"}
    assert differing(rows) == [plain, plain, other]
    twice = {"settings": written, "algorithms": ["chain(a(x=1))", "chain(a(x=2))"]}
    assert differing([twice, {**twice, "algorithms": ["chain(a(x=1))", "chain(a(x=3))"]}])[1] == {
        "algorithms": "chain(a(x=1)), chain(a(x=3))"
    }


def test_wrong_names_are_refused(folder: Path) -> None:
    for options, words in (
        ({"sort": "sed"}, "no setting or metric is called 'sed'; did you mean 'seed'"),
        ({"sort": "accuracy"}, "no setting or metric is called 'accuracy'"),
    ):
        with pytest.raises(ValueError, match=words):
            list_runs(folder, **options)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        list_runs(folder / "nowhere")
    assert list_runs(folder / "code", sort="seed") == []


def test_a_metric_that_is_not_finite_is_not_the_best(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {}, [0.5, math.nan])
    write_run(tmp_path / "b", {}, [math.nan])
    a, b = list_runs(tmp_path, sort="best.eval/accuracy")
    assert a["best"] == {"eval/accuracy": 0.5} and b["best"] == {}
