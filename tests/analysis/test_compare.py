"""Two runs are compared at their checkpoints, and side by side between two of them."""

import math
import shutil
from pathlib import Path

import pytest
import torch

import purecompose as pc
from purecompose import algorithms as alg, compose, loop_events, optim
from purecompose.analysis import RecordedRun, compare
from tests.analysis.forms import Form, digests
from tests.helpers import changing, make_batches, make_state


def nudge(at: int, by: float) -> pc.Algorithm:
    """Return a method that changes a bias after one batch."""

    def act(state: pc.State) -> pc.State:
        assert state.clock is not None
        bias = state.params["3.bias"] + torch.where(state.clock.batch == at, torch.tensor([by, 0, 0]), 0)
        return state.replace(params={**state.params, "3.bias": bias})

    return changing("nudge", pc.Event.AFTER_TRAIN_BATCH, act)


def recorded(folder: Path, *algorithms: pc.Algorithm, lr: float = 0.1) -> RecordedRun:
    """Return a run of 24 batches with a record of each."""
    form = Form(compose(loop_events, algorithms), make_state(optimizer=optim.sgd(lr), duration="4ep"), make_batches(6))
    with pc.records.RunFolder(folder, {"lr": lr}) as out:
        out.begin(form.step, form.state)
        pc.fit(*form, observers=out.observer, checkpoints=out.checkpoints(keep="log", every="4ba", background=False))
    return RecordedRun(folder, *form)


@pytest.fixture
def plain(tmp_path: Path) -> RecordedRun:
    return recorded(tmp_path / "plain")


def test_equal_runs(plain: RecordedRun, tmp_path: Path) -> None:
    found = compare(plain, recorded(tmp_path / "same"))
    assert (found.batch, found.leaves, found.since, found.settings) == (None, (), 24, ())
    assert "no difference up to batch 24" in str(found)


def test_the_first_batch_and_leaf_and_the_growth(plain: RecordedRun, tmp_path: Path) -> None:
    other, before = recorded(tmp_path / "other", nudge(9, 1e-3)), digests(tmp_path)
    found = compare(plain, other)
    # The tenth batch is number 9 inside its step.
    assert (found.batch, found.since) == (10, 9)
    assert [line.partition(":")[0] for line in found.leaves] == ["params['3.bias']"]
    shares = {one.batch: one.distance for one in found.by_checkpoint}
    assert shares[8] == 0 < shares[12] and [*shares] == [0, 4, 8, 12, 16, 20, 24]
    assert "algorithm nudge: nothing in a, nudge() in b" in found.settings, found.settings
    assert "the first difference is at batch 10: params['3.bias']: 1 of 3 elements differ" in str(found)
    assert digests(tmp_path) == before


def test_folders_bound_the_place(plain: RecordedRun, tmp_path: Path) -> None:
    recorded(tmp_path / "other", nudge(9, 1e-3))
    found = compare(plain.path, str(tmp_path / "other"))
    assert (found.batch, found.since) == (12, 8)
    assert "after batch 8, at the latest at batch 12" in str(found)


def test_runs_that_never_agreed_have_no_batch_after_which_they_differ(plain: RecordedRun, tmp_path: Path) -> None:
    other = recorded(tmp_path / "other", nudge(1, 1e-3))
    shutil.rmtree(other.checkpoints[0].path)
    found = compare(plain.path, other.path)
    assert (found.batch, found.since) == (4, -1)
    assert "the first difference is at the latest at batch 4: " in str(found)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((3.0, 4.0), (3.0, 4.5), 0.1),  # 0.5 / |(3, 4)|
        ((math.nan, 4.0), (math.nan, 4.0), 0.0),
        ((3.0, math.nan), (3.0, 4.0), math.inf),
        ((3.0, 4.0), (3.0, math.nan), math.inf),
    ],
)
def test_the_distance_is_relative_and_equal_nans_do_not_count(
    tmp_path: Path, ours: tuple[float, ...], theirs: tuple[float, ...], expected: float
) -> None:
    for name, values in (("a", ours), ("b", theirs)):
        net = torch.nn.Linear(2, 1, bias=False)
        net.weight.data = torch.tensor([values])
        pc.save(make_state(net), tmp_path / name / "ep0000-ba00000000")
    assert [one.distance for one in compare(tmp_path / "a", tmp_path / "b").by_checkpoint] == [expected]


def test_a_tolerance_ignores_small_differences(plain: RecordedRun, tmp_path: Path) -> None:
    other = recorded(tmp_path / "other", nudge(9, 1e-6))
    assert compare(plain, other, tolerance=1e-3).batch is None
    assert compare(plain, other).batch == 10


def test_settings_that_differ_are_named(plain: RecordedRun, tmp_path: Path) -> None:
    found = compare(plain, recorded(tmp_path / "other", alg.ema("3ba"), lr=0.2))
    assert "lr: 0.1 in a, 0.2 in b" in found.settings
    assert any(line.startswith("optimizer: sgd(lr=0.1") and "0.2) in b" in line for line in found.settings)
    assert found.batch == 0 and any("slots['ema']" in line and "only in b" in line for line in found.leaves)
