"""The best checkpoints of a run: which are kept, and how they are found."""

import math
import pathlib
import threading
import warnings
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Checkpoints, Evaluator, State, compose, fit, loop_events, training
from purecompose.run.saving import folder as disk
from tests.helpers import assert_same, make_batches, make_mlp, make_state


BATCHES = make_batches(4)
STEP = compose(loop_events)


def start(**options: Any) -> State:
    return make_state(make_mlp(dropout=0.3), key=3, **{"duration": "6ep", **options})


def scores(values: list[float], name: str = "score") -> Evaluator:
    """Return an evaluator with these results, one after the other."""
    left = list(values)
    return Evaluator(BATCHES[:1], {name: lambda outputs, targets: torch.tensor(left.pop(0))})


def wobble(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a metric of the state that goes up and down."""
    return torch.sin(1000 * outputs.sum())


def kept(folder: pathlib.Path) -> dict[int, float]:
    """Return the value of each checkpoint, by its batch, in the order of `ranked`."""
    return {pc.saving.read_index(path).batch: value for path, value in pc.saving.ranked(folder)}


def batches_in(folder: pathlib.Path) -> set[int]:
    return {int(path.name.partition("-ba")[2]) for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("values", "settings", "best"),
    [
        ([0.5, 0.9, 0.1, 0.7, 0.8, 0.2], {"keep_best": 3}, {8: 0.9, 20: 0.8, 16: 0.7, 24: 0.2}),  # 24: the newest
        ([0.5, 0.9, 0.1, 0.7, 0.8, 0.2], {"keep_best": 1}, {8: 0.9, 24: 0.2}),
        ([0.5, 0.9, 0.1, 0.7, 0.8, 0.2], {"keep_best": 2, "mode": "min"}, {12: 0.1, 24: 0.2}),
        ([0.5, 0.5, 0.5, 0.5, 0.4, 0.5], {"keep_best": 2}, {4: 0.5, 8: 0.5, 24: 0.5}),  # equal ones: the earlier
        ([math.nan, 0.3, math.nan, 0.2, 0.1, math.nan], {"keep_best": 4}, {8: 0.3, 16: 0.2, 20: 0.1}),
        (
            [0.5, 0.9, 0.1, 0.7, 0.8, 0.2],
            {"keep_best": None, "keep": 1},
            {8: 0.9, 20: 0.8, 16: 0.7, 4: 0.5, 24: 0.2, 12: 0.1},
        ),
    ],
)
@pytest.mark.parametrize("background", [True, False])
def test_the_k_best_are_kept_besides_the_newest(
    values: list[float], settings: Any, best: dict[int, float], background: bool, tmp_path: pathlib.Path
) -> None:
    """None of them is due by `every`; of the newest ones only the last one is kept."""
    settings = {"every": "1dur", "keep": 1, "mode": "max", "background": background, **settings}
    fit(
        STEP,
        start(),
        BATCHES,
        evaluate=scores(values),
        checkpoints=Checkpoints(tmp_path, best="eval/score", **settings),
    )
    found = kept(tmp_path)
    assert list(found) == list(best) and found == pytest.approx(best)
    assert batches_in(tmp_path) == best.keys() | {24}
    path = pc.saving.best(tmp_path)
    assert path is not None and pc.saving.read_index(path).batch == next(iter(best))


def test_the_newest_are_kept_independently_of_the_best(tmp_path: pathlib.Path) -> None:
    settings = Checkpoints(tmp_path, every="2ba", keep=2, best="eval/score", keep_best=2, mode="max", background=False)
    evaluator = scores([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    fit(STEP, start(), BATCHES, evaluate=evaluator, checkpoints=settings)
    assert batches_in(tmp_path) == {4, 8, 22, 24}


@pytest.mark.parametrize("last", range(1, 12))
def test_a_resumed_run_keeps_the_same_ones(last: int, tmp_path: pathlib.Path) -> None:
    def run(folder: str) -> dict[str, Any]:
        settings = Checkpoints(tmp_path / folder, "3ba", keep=1, best="eval/wobble", keep_best=2, mode="max")
        return {
            "checkpoints": settings,
            "evaluate": Evaluator(BATCHES, {"wobble": wobble}, every="2ba"),
            "resume": "auto",
        }

    whole = fit(STEP, start(duration="3ep"), BATCHES, **run("whole"))
    for state in training(STEP, start(duration="3ep"), BATCHES, **run("cut")):
        if state.timestamp.batch == last:
            break
    assert_same(fit(STEP, start(duration="3ep"), BATCHES, **run("cut")), whole)
    assert kept(tmp_path / "cut") == kept(tmp_path / "whole") and len(kept(tmp_path / "cut")) >= 2
    assert batches_in(tmp_path / "cut") == batches_in(tmp_path / "whole")


def test_one_that_was_not_written_does_not_take_a_place(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = disk.write

    def flaky(target: pathlib.Path, *arguments: Any) -> None:
        if "ba00000008" in target.name:
            raise OSError("no space left")
        write(target, *arguments)

    monkeypatch.setattr(disk, "write", flaky)
    settings = Checkpoints(tmp_path, "1dur", 1, best="eval/score", keep_best=2, mode="max", background=False)
    with pytest.warns(pc.errors.CheckpointWarning, match="no space left"):
        fit(STEP, start(), BATCHES, evaluate=scores([0.5, 0.9, 0.6, 0.7, 0.1, 0.1]), checkpoints=settings)
    assert kept(tmp_path) == pytest.approx({16: 0.7, 12: 0.6, 24: 0.1})


def test_a_folder_says_which_metric_decides(tmp_path: pathlib.Path) -> None:
    """Neither the metric nor the direction, which its evaluator declares, have to be given again."""
    left = [0.5, 0.2, 0.4]

    def gap(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.tensor(left.pop(0))

    evaluator = Evaluator(
        BATCHES[:1], {"gap": pc.metrics.from_function(gap, higher_is_better=False), "loss": pc.losses.cross_entropy}
    )
    settings = Checkpoints(tmp_path, best="eval/gap", keep_best=3)
    state = fit(STEP, start(duration="3ep"), BATCHES, evaluate=evaluator, checkpoints=settings)
    assert kept(tmp_path) == pytest.approx({8: 0.2, 12: 0.4, 4: 0.5})
    by_loss = pc.saving.ranked(tmp_path, "eval/loss")
    assert [value for _, value in by_loss] == sorted(value for _, value in by_loss)
    assert pc.saving.ranked(tmp_path, "eval/loss", "max") == by_loss[::-1]
    assert pc.saving.ranked(tmp_path, "eval/gap", "max")[0].value == pytest.approx(0.5)
    path = pc.saving.best(tmp_path)
    assert path is not None and pc.load(path, like=state, step=STEP).timestamp.batch == 8


def test_what_cannot_be_ranked(tmp_path: pathlib.Path) -> None:
    assert pc.saving.ranked(tmp_path) == [] and pc.saving.best(tmp_path) is None
    fit(STEP, start(duration="1ep"), BATCHES, evaluate=scores([0.5]), checkpoints=Checkpoints(tmp_path))
    with pytest.raises(ValueError, match="no checkpoint in .* says which metric decides.*one of eval/score"):
        pc.saving.ranked(tmp_path)
    with pytest.raises(ValueError, match="are lower or higher values better"):
        pc.saving.best(tmp_path, "eval/score")
    assert pc.saving.best(tmp_path, "eval/loss") is None
    with pytest.raises(ValueError, match="best: s3://a is in remote storage|ranked: s3://a is in remote storage"):
        pc.saving.ranked("s3://a")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"keep_best": 3}, ValueError, "keep_best=3 needs the metric that decides, as in best='eval/loss'"),
        ({"best": "eval/loss", "keep_best": 0}, ValueError, "keep_best: expected an int >= 1, got 0"),
        ({"best": "eval/loss", "keep_best": "all"}, TypeError, "keep_best: expected an int.*or None for all"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Checkpoints("unused", **settings)


@pytest.mark.parametrize(("keep_best", "written"), [(1, [4, 24]), (2, [4, 20, 24]), (None, [4, 8, 12, 16, 20, 24])])
def test_checkpoints_that_wait_are_replaced_once_others_are_better(
    keep_best: int | None, written: list[int], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, write, seen = threading.Event(), disk.write, list[int]()

    def slow(path: pathlib.Path, *arguments: Any) -> None:
        release.wait(60)
        seen.append(int(path.name.partition("-ba")[2]))
        write(path, *arguments)

    monkeypatch.setattr(disk, "write", slow)
    settings = Checkpoints(tmp_path, "1dur", keep=1, best="eval/score", keep_best=keep_best, mode="max")
    evaluator = scores([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    with warnings.catch_warnings(action="ignore"):  # that checkpoints are skipped
        for state in training(STEP, start(), BATCHES, evaluate=evaluator, checkpoints=settings):
            if state.timestamp.batch == 24:
                release.set()
    assert seen == written
    assert batches_in(tmp_path) == set(written[-(keep_best or 6) :])
